"""Compare methods by a preregistered protocol: equal searches, equal seeds, one use of the test set, intervals.

    dicedist evidence --list                     the protocols of conf/evidence/
    dicedist evidence digits --plan              how many runs and hours, from a short timed run of each method
    dicedist evidence digits                     the whole protocol
    dicedist evidence digits --no-test           everything but the test set
    dicedist evidence digits --dir /data/digits --at-once 2

The same command resumes after a stop. The protocol must be committed before the test set is read.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dicedist.cluster.process import command
from dicedist.config.compose import CONF
from dicedist.config.extras import require
from dicedist.config.options import Parser
from dicedist.console.lines import say


def run(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    if options.list or options.protocol is None:
        say("\n".join(sorted(path.stem for path in (CONF / "evidence").glob("*.yaml"))))
        return
    require("search", "dicedist evidence")
    from dicedist.studies.evidence import Evidence  # not above: importing torch takes seconds
    from dicedist.studies.findings import write_findings
    from dicedist.studies.protocol import read_protocol

    protocol = read_protocol(options.protocol)
    directory = Path(options.dir or Path("runs") / "evidence" / protocol.path.stem)
    evidence = Evidence(protocol, directory, options.at_once)
    evidence.forecast()
    if options.plan:
        return
    best = evidence.train()
    if options.no_test:
        say("everything is trained; without --no-test the same command reads the test set")
        return
    evidence.test(best)
    write_findings(evidence, best)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("dicedist evidence", __doc__)
    parser.add_argument("protocol", nargs="?", help="a name in conf/evidence/, or a path that ends with .yaml")
    parser.add_argument("--list", action="store_true", help="show the protocols, run none")
    parser.add_argument("--plan", action="store_true", help="count runs and hours, and end there")
    parser.add_argument("--no-test", action="store_true", help="leave the test set unread")
    parser.add_argument("--dir", help="folder of all results (runs/evidence/NAME)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    options = parser.parse_args(arguments)
    if options.at_once < 1:
        raise ValueError(f"--at-once {options.at_once}: write a number above 0")
    return options


if __name__ == "__main__":
    command(run)

"""Check this machine before a training: what works, what is missing, and how to fix it.

Examples:
    python -m dicedist.doctor                                  one rank per GPU, or two without one
    python -m dicedist.doctor --ranks 5 data=cifar10           another number of ranks, and keys of a training
    python -m dicedist.doctor --nodes gpu1,gpu2:29500 --json   also whether other nodes can be reached
    python -m dicedist.doctor run.remote=s3://bucket/runs      also whether the bucket can be written to

Exit code 0 if no check failed, also with warnings, and 2 otherwise. The checks fill the cache with decoded images, and
write and remove a small file in the bucket. They change nothing else.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from dicedist.cluster.process import command
from dicedist.config import compose_config
from dicedist.config.options import Parser, check_counts


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    import torch  # not above: importing torch takes seconds

    from dicedist.diagnosis import examination
    from dicedist.diagnosis.finding import findings, refuse_failures

    options = parse(arguments)
    ranks = options.ranks or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    nodes = [name for name in options.nodes.split(",") if name]
    found = {}
    for name, finding in findings(examination.checks(compose_config(options.overrides), ranks, nodes)):
        found[name] = finding
        if not options.json:
            remedy = f"\n{'':28}-> {finding.remedy}" if finding.remedy else ""
            print(f"{finding.state:>8}  {name:16}  {finding.what}{remedy}", flush=True)
    if options.json:
        print(json.dumps([{"name": name, **asdict(finding)} for name, finding in found.items()], indent=1))
    refuse_failures(found)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("dicedist doctor", __doc__)
    parser.allow_abbrev = False
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--nodes", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    check_counts(options, "ranks")
    return options


if __name__ == "__main__":
    command(run)

"""Check this machine before a training: what is here, what is missing, what to do about it.

Examples:
    python -m dicedist.doctor                                  one rank per GPU, or two without one
    python -m dicedist.doctor --ranks 5 data=cifar10           as many ranks, and the keys of a training
    python -m dicedist.doctor --nodes gpu1,gpu2:29500 --json   also whether other nodes can be reached

Exit code 0 if nothing failed (warnings are told), 2 otherwise. Nothing is trained or changed; images that a training
would prepare are prepared.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from dicedist.cluster.process import command


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    from dicedist.diagnosis.examination import examine, parsed  # not above: torch takes seconds, which help need not
    from dicedist.diagnosis.finding import FAILED

    request = parsed(arguments)
    found = []
    for finding in examine(request):
        found.append(finding)
        if not request.as_json:
            remedy = f"\n{'':28}-> {finding.remedy}" if finding.remedy else ""
            print(f"{finding.state:>8}  {finding.name:16}  {finding.what}{remedy}", flush=True)
    if request.as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    failed = [finding.name for finding in found if finding.state == FAILED]
    if failed:
        raise ValueError(f"{len(failed)} of {len(found)} checks failed: {', '.join(failed)}")


if __name__ == "__main__":
    command(run)

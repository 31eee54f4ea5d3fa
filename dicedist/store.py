"""Rendezvous server for elastic runs, outside of their nodes: any node may then be lost and replaced, even the first.

Examples:
    python -m dicedist.store 10.0.0.5:29400      on a machine that stays, at its address in the nodes' private network
    python -m dicedist.launch --nnodes=2:4 --nproc_per_node=8 --max-restarts=100 --rdzv-backend=c10d \\
        --rdzv-endpoint=10.0.0.5:29400 --rdzv-id=NAME -m dicedist.train ...                      on each node

The server holds the list of nodes, a few kB, and ends on SIGTERM or Ctrl-C. It has no password: only the nodes may
reach its port.
"""

import os
from collections.abc import Sequence

from dicedist.cluster.process import command


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return
    host, _, port = arguments[0].rpartition(":") if len(arguments) == 1 else ("", "", "")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("write the address at which nodes reach this machine: dicedist store 10.0.0.5:29400")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides torch's warning for every node without a name
    from dicedist.cluster.elastic import serve  # not above: importing torch takes seconds

    serve(host.strip("[]"), int(port))


if __name__ == "__main__":
    command(run)

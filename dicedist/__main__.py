"""dicedist COMMAND key=value ...

Examples:
    dicedist train --nproc 5                                    the paper's main job, a member or w on each rank
    dicedist train --nproc auto                                 the same over the GPUs there are, or in one process
    dicedist train data=shapes ensemble.size=3                  everything in one process
    dicedist evaluate run=runs/NAME
    dicedist predict run=runs/NAME photos/
    dicedist export run=runs/NAME format=onnx
    dicedist COMMAND --help                                     its examples and every key
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from dicedist.cluster.process import command

COMMANDS = {  # name of the module, which has a function run(arguments) -> what it does
    "train": "train an ensemble, or continue to",
    "evaluate": "accuracy, calibration, diversity, redundancy, out-of-distribution detection",
    "report": "one page with tables and figures of runs",
    "predict": "label images, and tell how sure that is",
    "export": "write pt2, onnx or safetensors",
    "sweep": "train over values of keys and seeds",
    "mirror": "send a run's records to MLflow",
    "bench": "measure this machine",
}


def main() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return
    sys.argv = [f"dicedist {name}", *rest]
    command(import_module(f"dicedist.{name}").run if name in available() else refuse)


def usage() -> str:
    return "\n".join([f"{__doc__}\nCommands:", *(f"    {name:10}{COMMANDS[name]}" for name in available())])


def available() -> list[str]:
    return [name for name in COMMANDS if find_spec(f"dicedist.{name}")]


def refuse(arguments: Sequence[str]) -> None:
    from dicedist.config import nearest

    name = sys.argv[0].removeprefix("dicedist ")
    raise ValueError(f"{name}: there is no such command{nearest(name, available())} (dicedist --help lists them)")


if __name__ == "__main__":
    main()

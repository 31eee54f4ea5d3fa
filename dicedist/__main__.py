"""dicedist COMMAND key=value ...

Examples:
    dicedist train --nproc 5                                    the paper's main job, a member or w on each rank
    dicedist train --nproc auto                                 the same on all GPUs of this machine, or in one process
    dicedist train data=shapes ensemble.size=3                  everything in one process
    dicedist evaluate run=runs/NAME
    dicedist predict run=runs/NAME photos/
    dicedist export run=runs/NAME format=onnx
    dicedist COMMAND --help                                     its examples and keys
    dicedist --version
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from dicedist import __version__
from dicedist.cluster.process import command
from dicedist.config.commands import COMMANDS, available


def main() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        command(lambda _: print(usage()))
    if name == "--version":
        print(f"dicedist {__version__}")
        return
    if os.getcwd() not in sys.path:  # like `python -m`, so that the user's own modules can be imported
        sys.path.insert(0, os.getcwd())
    sys.argv = [f"dicedist {name}", *rest]
    command(import_module(f"dicedist.{name}").run if name in available() else refuse)


def usage() -> str:
    return "\n".join([f"{__doc__}\nCommands:", *(f"    {name:12}{COMMANDS[name]}" for name in available())])


def refuse(arguments: Sequence[str]) -> None:
    from dicedist.config import nearest

    name = sys.argv[0].removeprefix("dicedist ")
    raise ValueError(f"{name}: there is no such command{nearest(name, available())}; dicedist --help lists them")


if __name__ == "__main__":
    main()

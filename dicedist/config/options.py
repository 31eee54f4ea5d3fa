"""Command-line options that are not keys, such as `--dir FOLDER`."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Parser that prints the command's docstring as help, and refuses mistakes in one line."""

    def __init__(self, command: str, description: str | None):
        super().__init__(command, description=description, formatter_class=argparse.RawTextHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (`{self.prog} --help` has examples)")


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1 for these options. Options that are not given pass."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: write a number above 0")

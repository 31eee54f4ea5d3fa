"""Options of commands that are not keys, as in `--dir FOLDER`."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Shows the command's docstring as help, and refuses mistakes in one line, as every command does."""

    def __init__(self, command: str, description: str | None):
        super().__init__(command, description=description, formatter_class=argparse.RawTextHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (`{self.prog} --help` has examples)")

"""Completion of commands, keys and values for a shell.

Examples:
    python -m dicedist.completion bash >> ~/.bashrc
    dicedist completion zsh >> ~/.zshrc                 behind the line that calls compinit
    dicedist completion fish > ~/.config/fish/completions/dicedist.fish
"""

from collections.abc import Sequence

from dicedist.cluster.process import command
from dicedist.config.commands import available
from dicedist.config.completion import SCRIPTS, candidates


def run(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    shell, *words = arguments
    if shell == "candidates":  # what the scripts ask for
        for word in candidates(words, available()):
            print(word)
    elif shell in SCRIPTS:
        print(SCRIPTS[shell], end="")
    else:
        raise ValueError(f"{shell}: write one of {', '.join(SCRIPTS)}")


if __name__ == "__main__":
    command(run)

"""Print a script that completes commands, keys and values in a shell.

Examples:
    python -m dicedist.completion bash >> ~/.bashrc
    dicedist completion zsh >> ~/.zshrc                 after the line that calls compinit
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
    if shell == "candidates":  # called by the scripts
        for word in candidates(words, available()):
            print(word)
    elif shell in SCRIPTS:
        print(SCRIPTS[shell], end="")
    else:
        raise ValueError(f"{shell}: write one of {', '.join(SCRIPTS)}")


if __name__ == "__main__":
    command(run)

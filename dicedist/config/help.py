"""What `--help` prints: what a command does, and every key with its value by default and what the schema says of it."""

import re
from collections.abc import Iterator

from omegaconf import OmegaConf

from dicedist.config.compose import CONF, by_folder, choices_of, composed
from dicedist.config.keys import keys_of


def show_help(usage: str | None, name: str, schema: type) -> None:
    """Prints the help of the command whose defaults are conf/NAME.yaml."""
    known = keys_of(schema)
    defaults = [
        f"{line:<32} # {known[key].metadata['help']}" if key in known else line
        for key, line in keyed(OmegaConf.to_yaml(composed(name, [])))
    ]
    groups = [group.name for group in sorted(CONF.iterdir()) if group.is_dir()]
    choices = [f"{group}={'|'.join(by_folder(choices_of(group)))}" for group in groups]
    listed = "Choices\n\n    " + "\n    ".join(choices) + "\n\n" if name == "train" else ""
    print(f"{usage}\n{listed}Keys and their values by default (write key=value)\n")
    print("\n".join(defaults))


def keyed(text: str) -> Iterator[tuple[str, str]]:
    """The lines of a YAML mapping, each with the whole key that it sets, or none."""
    above: list[str] = []
    for line in text.splitlines():
        setting = re.match(r"( *)(\w+):", line)
        if setting is not None:
            above[len(setting[1]) // 2 :] = [setting[2]]
        yield ".".join(above) if setting is not None else "", line

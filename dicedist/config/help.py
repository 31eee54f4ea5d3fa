"""The text of `--help`: examples, choices, and keys with their default values and descriptions."""

import json
import re
from collections.abc import Iterator

from omegaconf import OmegaConf

from dicedist.config.compose import by_folder, choices_of, composed, groups
from dicedist.config.schema import keys_of

USUAL = (
    "data.root", "data.size", "structure", "ensemble.size", "epochs", "batch_size", "optimizer.lr", "redundancy.delta",
    "seed", "run.name",
)  # fmt: skip


def show_help(usage: str | None, name: str, schema: type, longer: str | None = None) -> None:
    """Print the help of the command whose defaults are in conf/NAME.yaml.

    longer: the command that prints all keys. If given, only the usual keys are printed.
    """
    values, known = composed(name, []), keys_of(schema)
    print(f"{usage}\n{choices() if name == 'train' else ''}", end="")
    if longer is None:
        print("Keys and their values by default (write key=value)\n")
        for key, line in keyed(OmegaConf.to_yaml(values)):
            print(f"{line:<32} # {known[key].metadata['help']}" if key in known else line)
        return
    print("The usual keys and their values by default\n")
    for key in USUAL:
        setting = f"{key}={json.dumps(OmegaConf.select(values, key)).strip(chr(34))}"
        print(f"    {setting:<44} {known[key].metadata['help']}")
    print(f"\n{longer} lists every key.")


def choices() -> str:
    """Return the config groups with their files."""
    lines = (f"    {group}={'|'.join(by_folder(choices_of(group)))}\n" for group in groups())
    return f"Choices\n\n{''.join(lines)}\n"


def keyed(text: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a YAML mapping, each with the full name of the key that it sets, or an empty one."""
    above: list[str] = []
    for line in text.splitlines():
        setting = re.match(r"( *)(\w+):", line)
        if setting is not None:
            above[len(setting[1]) // 2 :] = [setting[2]]
        yield ".".join(above) if setting is not None else "", line

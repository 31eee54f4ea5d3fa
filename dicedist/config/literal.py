"""Translate overrides from the way people write them in a shell to Hydra's grammar.

Values are literal: ~/my images, über, a=b and [draft].jpg are text. Only a value that YAML reads as a number, true,
false, null, a list or a mapping is not text. ~ at the beginning of a value stands for the user's home.
"""

import os
import re
from typing import Any

import yaml

PLAIN = re.compile(r"[\w./:+-]+", re.ASCII)  # Hydra and YAML read such a word alike
FOREIGN = re.compile(r"network=((?:torchvision|timm)/.+)")


def literal(override: str) -> str:
    """Return the override in Hydra's grammar."""
    if foreign := FOREIGN.fullmatch(override):
        override = f"network.name={foreign[1]}"  # a network of a library has no file in conf/network/
    override = re.sub(r"^tracking=\[", "tracking.to=[", override)  # a list of trackers has no file in conf/tracking/
    override = re.sub(r"^resume\.", "resuming.", override)  # `resume` itself has a value, so it cannot have keys
    key, _, text = override.partition("=")
    return f"{key}={in_hydras_words(parsed(text))}" if text and not PLAIN.fullmatch(text) else override


def parsed(text: str) -> Any:
    """Return a list or mapping for text in brackets, else the text itself."""
    if (text[0], text[-1]) in (("[", "]"), ("{", "}")):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return os.path.expanduser(text)


def split_values(text: str) -> list[str]:
    """Split the values of a sweep at commas outside of brackets and quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{(") - (character in ")}]") if not quote else 0
        if character == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += character
    return values


def in_hydras_words(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(in_hydras_words, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{in_hydras_words(key)}:{in_hydras_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value not in ("null", "true", "false") else quoted(value)
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]  # a number, true, false, null


def quoted(text: str) -> str:
    """Put text in single quotes, where only quotes and the backslashes before them need an escape."""
    escaped = re.sub(r"(\\*)'", lambda found: f"{found[1] * 2}\\'", text)
    doubled_at_the_end = re.sub(r"(\\+)$", lambda found: found[1] * 2, escaped)
    return f"'{doubled_at_the_end}'"

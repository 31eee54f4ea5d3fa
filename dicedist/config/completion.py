"""Shell completion of commands, keys and values."""

import json
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from dicedist.config.compose import choices_of, groups
from dicedist.config.requests import EvaluateRequest, ExportRequest, PredictRequest
from dicedist.config.schema import Config, keys_of

SCHEMAS: dict[str, Any] = {
    "train": Config,
    "sweep": Config,
    "distill": Config,
    "evaluate": EvaluateRequest,
    "predict": PredictRequest,
    "export": ExportRequest,
}
SCRIPTS = {
    "bash": """_dicedist() {
    local words line=${COMP_LINE:0:COMP_POINT}
    read -ra words <<<"$line"
    [[ $line != *[[:space:]] ]] || words+=("")
    local word=${words[${#words[@]} - 1]}
    mapfile -t COMPREPLY < <(dicedist completion candidates "${words[@]:1}" 2>/dev/null)
    # Bash cuts words at "=" and completes what is behind it.
    [[ $word != *=* || $COMP_WORDBREAKS != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    [[ ${COMPREPLY[0]-} != *= ]] || compopt -o nospace
}
complete -o default -F _dicedist dicedist
""",
    "zsh": """#compdef dicedist
_dicedist() {
    local -a found
    found=(${(f)"$(dicedist completion candidates ${words[2,CURRENT]} 2>/dev/null)"})
    compadd -S '' -- $found
}
compdef _dicedist dicedist
""",
    "fish": """function __dicedist
    dicedist completion candidates (commandline -opc)[2..] (commandline -ct) 2>/dev/null
end
complete -c dicedist -f -a '(__dicedist)'
""",
}


def candidates(words: Sequence[str], commands: Sequence[str]) -> list[str]:
    """Return the completions of the last word. words: the command line after `dicedist`."""
    *before, word = words or [""]
    if not before:
        return [command for command in commands if command.startswith(word)]
    schema = SCHEMAS.get(before[0])
    if schema is None:
        return []
    key, given, value = word.partition("=")
    if given:
        return [f"{key}={choice}" for choice in values_of(schema, key) if choice.startswith(value)]
    chosen = groups() if schema is Config else []
    keys = [name for name, entry in keys_of(schema).items() if not is_dataclass(entry.type)]
    return sorted(f"{name}=" for name in {*chosen, *keys} if name.startswith(word))


def values_of(schema: Any, key: str) -> list[str]:
    """Return the choices of a key, or of a group of files in conf/."""
    if schema is Config and key in groups():
        return choices_of(key)
    entry = keys_of(schema).get(key)
    if entry is None:
        return []
    choices = (True, False) if entry.type is bool else entry.metadata["choices"] or ()
    return [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]

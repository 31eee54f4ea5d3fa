"""The configuration of a run: typed keys (schema), their checks, composition of conf/ and overrides, and help."""

from dicedist.config.checks import check
from dicedist.config.compose import (
    changed_keys,
    choices_of,
    compose_config,
    compose_request,
    flatten,
    nearest,
    parse_config,
    refuse_unknown_sets,
    to_yaml,
)
from dicedist.config.help import show_help
from dicedist.config.schema import Config, Scope

__all__ = [
    "Config", "Scope", "changed_keys", "check", "choices_of", "compose_config", "compose_request", "flatten",
    "nearest", "parse_config", "refuse_unknown_sets", "show_help", "to_yaml",
]  # fmt: skip

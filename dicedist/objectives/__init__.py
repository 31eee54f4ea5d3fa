"""What members minimise: a method is a list of terms, one term a file.

A module of this room defines a class `Term`. Its options come from the method's YAML, as keyword arguments:

    class Term(Objective):
        sends = ("logits",)                      # fields that every member must see of its peers
        def __call__(self, view, now): ...       # named parts of one member's loss, to be added up

Peers are constants for a member: of a joint loss each member computes the value with its own row alone
differentiable, which gives exactly its own partial derivative.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from dicedist.member import Encoding, Member
from dicedist.schedules import Moment


@dataclass
class MethodConfig:
    name: str
    terms: dict[str, dict[str, Any]]  # term -> options
    structures: list[str]


@dataclass
class View:
    """A member's view of one step: itself, its encoding of the batch, and what its peers sent."""

    index: int
    member: Member
    own: Encoding
    labels_B: Tensor
    peers: Mapping[str, list[Tensor]]  # by field, every member's [B, ...], its own among them with its gradient


class Objective(nn.Module):
    """A term of a method. The class attributes say what it needs of the rest of the system."""

    sends: ClassVar[tuple[str, ...]] = ()
    prior: ClassVar[str | None] = None  # "class" or "shared": the bottleneck's backward encoder
    discriminator: bool = False
    conditional: bool = True

    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        """Named parts of the member's loss, each a scalar with its weight applied."""
        raise NotImplementedError


class Method:
    """The terms of a method and what they need together."""

    def __init__(self, config: MethodConfig):
        self.name = config.name
        self.terms = [build(name, options) for name, options in config.terms.items()]

    @property
    def sends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for term in self.terms for name in term.sends))

    @property
    def redundancy(self) -> Objective | None:
        return next((term for term in self.terms if term.discriminator), None)

    def prior_rows(self, num_classes: int) -> int:
        priors = {term.prior for term in self.terms} - {None}
        return num_classes if "class" in priors else len(priors)

    def losses(self, view: View, now: Moment) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for term in self.terms:
            parts |= term(view, now)
        return parts


def build(name: str, options: Mapping[str, Any]) -> Objective:
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise ValueError(f"method.terms.{name}: no such term; write one of {', '.join(known)}")
    term = importlib.import_module(f"{__name__}.{name}").Term
    try:
        return term(**options)
    except TypeError as error:
        raise ValueError(f"method.terms.{name}: {str(error).split('__init__() ')[-1]}") from error

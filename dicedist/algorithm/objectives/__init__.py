"""What members minimise: a method is a list of terms, with one file per term.

The module of a term defines a class `Term`. Its options come from the method's YAML, as keyword arguments:

    class Term(Objective):
        sends = ("logits",)                      # fields that every member must see of its peers
        def __call__(self, view, now): ...       # named parts of one member's loss, to be added up

Members are coupled only through the fields that they send. Each member evaluates a joint loss with its own fields
differentiable and its peers' fields constant, which gives exactly its own partial derivative. A parameter that members
share (a trunk, a gate, an attention) acts on each member's own fields only, so summing its gradients over members
gives the whole derivative, and nothing is counted twice.

Legend: M members, B inputs, D features, K classes.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dicedist.algorithm.adversary import Adversary
from dicedist.algorithm.member import Encoding, Member
from dicedist.algorithm.messages import Fields, Traffic
from dicedist.algorithm.networks import Network
from dicedist.algorithm.schedules import Moment
from dicedist.config.schema import MethodConfig, RedundancyConfig


@dataclass
class View:
    """A member's view of one step: itself, its encoding of the batch, and what everyone sent."""

    index: int
    num_members: int
    member: Member
    own: Encoding
    labels_B: Tensor
    fields: Mapping[int, Fields]  # by member: its own with gradient, its peers' constant

    def rows(self, name: str, members: Sequence[int] | None = None) -> Tensor:
        """A field of those members (all of them by default), one row each."""
        chosen = range(self.num_members) if members is None else members
        return torch.stack([self.fields[member][name] for member in chosen])


class Objective:
    """A term of a method. The class attributes say what it needs from the rest of the system."""

    sends: ClassVar[tuple[str, ...]] = ()
    least: ClassVar[int] = 1  # the minimum number of members
    prior: ClassVar[str | None] = None  # "class" or "shared": the kind of backward encoder in the bottleneck
    follows: tuple[str, ...] = ()  # schedules that it depends on, besides the learning rate
    student: ClassVar[bool] = False  # the last member learns from the others and can be used alone
    averages_trunk: ClassVar[bool] = False  # the gradient is divided by M where branches leave the trunk

    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        """Named parts of the member's loss, each a scalar with its weight applied; none by default."""
        return {}

    def check(self, networks: Sequence[Network]) -> None:
        """ValueError if the members' networks do not suit the term."""

    def hears(self, listener: int, speaker: int, num_members: int) -> tuple[str, ...]:
        """The fields of the speaker that the listener must see."""
        return self.sends

    def shared(self, networks: Sequence[Network]) -> dict[str, nn.Module]:
        """Modules that all members share; `networks` are the members' networks, without weights."""
        return {}

    def fields(self, index: int, num_members: int, own: Encoding, shared: nn.ModuleDict | None) -> Fields:
        """The fields that a member sends in addition to its encoding."""
        return {}

    def widths(self, feature_dims: Sequence[int]) -> dict[str, list[int]]:
        """For each of those fields, the floats per input of each member."""
        return {}


class AdversarialTerm(Objective):
    """A term whose gradients come from an adversary: the step gathers its inputs, and sends its gradients back."""

    conditional: bool  # whether the adversary is told the class

    def reads(self, settings: RedundancyConfig) -> tuple[str, ...]:
        """The fields that the adversary reads from each member, as far as members have them."""
        raise NotImplementedError

    def build_adversary(
        self, settings: RedundancyConfig, num_members: int, feature_dim: int, num_classes: int, seed: int
    ) -> Adversary:
        raise NotImplementedError


class Method:
    """The terms of a method and their combined needs."""

    def __init__(self, config: MethodConfig):
        self.name = config.name
        self.terms = [build(name, options) for name, options in config.terms.items()]

    @property
    def adversarial(self) -> AdversarialTerm | None:
        return next((term for term in self.terms if isinstance(term, AdversarialTerm)), None)

    @property
    def follows(self) -> set[str]:
        return {name for term in self.terms for name in term.follows}

    @property
    def averages_trunk(self) -> bool:
        return any(term.averages_trunk for term in self.terms)

    def prior_rows(self, num_classes: int) -> int:
        priors = {term.prior for term in self.terms} - {None}
        return num_classes if "class" in priors else len(priors)

    def student(self, num_members: int) -> int | None:
        """The member that is used alone at inference, if the method trains one for that."""
        return num_members - 1 if any(term.student for term in self.terms) else None

    def compared(self, num_members: int) -> range:
        """The members whose features the discriminator compares: all but the student."""
        return range(num_members if self.student(num_members) is None else num_members - 1)

    def hears(self, listener: int, speaker: int, num_members: int) -> tuple[str, ...]:
        if listener == speaker:
            return ()
        names = (name for term in self.terms for name in term.hears(listener, speaker, num_members))
        return tuple(dict.fromkeys(names))

    def traffic(self, feature_dims: Sequence[int], num_classes: int, settings: RedundancyConfig) -> Traffic:
        """What members with these feature dimensions send to each other and to the adversary."""
        members = range(len(feature_dims))
        sampled = bool(self.prior_rows(num_classes))  # a deterministic member has no scale
        wanted = self.adversarial.reads(settings) if self.adversarial else ()
        return Traffic(
            widths=self.widths(feature_dims, num_classes),
            heard={(one, other): self.hears(one, other, len(members)) for one in members for other in members},
            features=tuple(name for name in wanted if sampled or name != "scale"),
            compared=self.compared(len(members)),
        )

    def widths(self, feature_dims: Sequence[int], num_classes: int) -> dict[str, Sequence[int]]:
        """For every field that may be sent, the floats per input of each member."""
        widths: dict[str, Sequence[int]] = {"mean": feature_dims, "scale": feature_dims}
        widths["logits"] = [num_classes] * len(feature_dims)
        for term in self.terms:
            widths |= term.widths(feature_dims)
        return widths

    def shared(self, networks: Sequence[Network]) -> nn.ModuleDict | None:
        modules = {name: module for term in self.terms for name, module in term.shared(networks).items()}
        return nn.ModuleDict(modules) if modules else None

    def fields(self, index: int, num_members: int, own: Encoding, shared: nn.ModuleDict | None) -> Fields:
        sent = {"mean": own.mean_BD, "logits": own.logits_BK}
        if own.scale_BD is not None:
            sent["scale"] = own.scale_BD
        for term in self.terms:
            sent |= term.fields(index, num_members, own, shared)
        return sent

    def losses(self, view: View, now: Moment) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for term in self.terms:
            parts |= term(view, now)
        return parts

    def check(self, networks: Sequence[Network]) -> None:
        """ValueError if the method cannot train such an ensemble."""
        least = max(term.least for term in self.terms)
        if len(networks) < least:
            raise ValueError(
                f"method={self.name} needs at least {least} members, got {len(networks)}: write ensemble.size={least}"
            )
        for term in self.terms:
            term.check(networks)


def build(name: str, options: Mapping[str, Any]) -> Objective:
    known = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    if name not in known:
        raise ValueError(f"method.terms.{name}: no such term; write one of {', '.join(known)}")
    term = importlib.import_module(f"{__name__}.{name}").Term
    try:
        return term(**options)
    except TypeError as error:
        raise ValueError(f"method.terms.{name}: {str(error).split('__init__() ')[-1]}") from error

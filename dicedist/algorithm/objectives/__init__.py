"""Objectives of members: a method is a list of terms, with one file per term.

The module of a term defines a class `Term`. Its options come from the method's YAML, as keyword arguments:

    class Term(Objective):
        sends = ("logits",)                      # fields that every member must see of its peers
        def fields(self, view): ...              # fields that a member sends in addition to mean, scale and logits
        def __call__(self, view, now): ...       # named parts of one member's loss, to be added up

In every step, `fields` is called for each member on the rank that hosts it. Then the fields are sent, and the
counterpart answers. Then `__call__` is called for each member, and its loss is differentiated. A *view* is all that a
term sees of one member. *now* holds the values of the schedules at this step. A *field* is a tensor [B, ...] that a
member sends.

Members are coupled only through the fields that they send. Each member evaluates a joint loss with its own fields
differentiable and its peers' fields constant. This gives exactly its own partial derivative. A parameter that members
share (a trunk, a gate, an attention) acts on each member's own fields only, so the sum of its gradients over members
is the whole derivative.

Three kinds of modules go beyond this:
counterpart   acts on the fields of several members at once, answers every member, and learns (CounterpartTerm). It
              may have a rank of its own, as the discriminator w.
companion     lives with one member, and has a loss and an optimizer of its own (the D_i of AFD).
probe         reads more of a member than its features and logits (dicedist.algorithm.probes).

Legend: M members, B inputs, D features, K classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from dicedist.algorithm.by_name import class_of, construct
from dicedist.algorithm.companion import Companion
from dicedist.algorithm.counterpart import Counterpart
from dicedist.algorithm.member import Encoding, Member
from dicedist.algorithm.messages import Answers, Fields, Sizes, Traffic, Values
from dicedist.algorithm.networks import Network
from dicedist.algorithm.probes import Probe
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.algorithm.targets import Targets
from dicedist.config import names
from dicedist.config.schema import Config, MethodConfig, RedundancyConfig
from dicedist.config.targets import resolve


@dataclass
class View:
    """A member's view of one step: its encoding of the batch and, after the gather, the fields of all members."""

    index: int
    num_members: int
    member: Member
    own: Encoding
    targets: Targets
    shared: nn.ModuleDict | None = None  # the modules that all members share
    fields: Mapping[int, Fields] = field(default_factory=dict)  # by member; the fields of peers are constant
    answers: Answers = field(default_factory=Answers)  # of the counterpart

    def as_records(self, values: Mapping[str, Tensor]) -> Values:
        """Name the member's values for the records."""
        own = names.member(self.index)
        return {names.record(own, name): value.detach() for name, value in values.items()}

    @property
    def labels_B(self) -> Tensor:
        """Return the classes; a mixed input has the class of its larger share."""
        return self.targets.labels_B

    def rows(self, name: str, members: Sequence[int] | None = None) -> Tensor:
        """Stack a field of these members, by default of all."""
        chosen = range(self.num_members) if members is None else members
        return torch.stack([self.fields[member][name] for member in chosen])


@dataclass(frozen=True)
class FusedHead:
    """A classifier of the whole ensemble that a term trains, and that evaluation and prediction read."""

    reads: str  # the field of every member that the head reads: mean | map
    part: str  # the part of a checkpoint that holds the head
    name: str  # its name in that part
    build: Callable[[Sequence[Sizes]], nn.Module]  # maps this field of every member, [B, width] each, to logits


class Objective:
    """A term of a method. Its attributes declare what the term needs from the rest of the system.

    Examples:
        >>> class Confident(Objective):
        ...     def __call__(self, view, now):
        ...         return {"entropy": -0.1 * view.own.logits_BK.log_softmax(1).max(1).values.mean()}
        >>> Confident().sends, Confident().min_members  # needs nothing of its peers
        ((), 1)
    """

    sends: ClassVar[tuple[str, ...]] = ()  # fields of every peer that each member must see; `receives` may narrow this
    min_members: int = 1
    follows: tuple[str, ...] = ()  # schedules that the term depends on, besides the learning rate
    mixes: ClassVar[bool] = False  # the loss is defined for mixup and CutMix
    probes: ClassVar[tuple[type[Probe], ...]] = ()  # what the term reads beyond features and logits

    def __call__(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        """Return named parts of the member's loss, each a scalar with its weight applied; none by default."""
        return {}

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        """Raise a ValueError if the term cannot train these members; networks: one per member, without weights."""

    def prior_rows(self, num_classes: int) -> int | None:
        """Return how many means b the bottleneck has (one per class in VCEB, 1 in VIB); None: no bottleneck."""
        return None

    def student(self, num_members: int) -> int | None:
        """Return the member that learns from the others and can be used alone, if the term trains one."""
        return None

    def receives(self, receiver: int, sender: int, num_members: int) -> tuple[str, ...]:
        """Return the fields of the sender that the receiver must see."""
        return self.sends

    def shared(self, networks: Sequence[Network], num_classes: int) -> dict[str, nn.Module]:
        """Build the modules that all members share; `networks` are the members' networks, without weights."""
        return {}

    def companion(self, member: int, sizes: Sequence[Sizes]) -> Companion | None:
        """Build the module that lives with a member and is trained with it."""
        return None

    @classmethod
    def fused_head(cls) -> FusedHead | None:
        """Return the classifier of the whole ensemble that the term trains, if it trains one."""
        return None

    def fields(self, view: View) -> Fields:
        """Return the fields that a member sends in addition to its encoding; nothing has been gathered yet."""
        return {}

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        """Return for each of these additional fields the floats per input of each member."""
        return {}


class CounterpartTerm(Objective):
    """A term with a counterpart: the step gathers the fields that it reads, and sends its answers to the members."""

    part: ClassVar[str] = "discriminator"  # the counterpart's name in messages and checkpoints
    estimates_redundancy: ClassVar[bool] = False  # the counterpart is a w, which evaluation reads
    conditional: bool = False  # w reads the class
    gradients: tuple[str, ...] = ("mean",)  # the fields whose gradients the counterpart answers
    outputs: tuple[str, ...] = ()  # other fields that it answers

    def reads(self, settings: RedundancyConfig) -> tuple[str, ...]:
        """Return the fields that the counterpart reads from each member, if members have them."""
        raise NotImplementedError

    def build_counterpart(self, config: Config, sizes: Sequence[Sizes]) -> Counterpart:
        """Build the counterpart. sizes: of the members that it reads, in their order."""
        raise NotImplementedError


class WeighingTerm(Objective):
    """A term that weighs members by their predictions for the held-out inputs, after every validation."""

    def weigh(self, logits_MNK: Tensor, labels_N: Tensor) -> list[float] | None:
        """Return a weight for each member; None if the term's options need none. Called on rank 0."""
        raise NotImplementedError

    def take_weights(self, weights: Sequence[float], shared: nn.ModuleDict) -> None:
        """Store the weights from rank 0. Called on every rank that hosts members."""
        raise NotImplementedError


class Method:
    """The terms of a method and their combined needs."""

    def __init__(self, config: MethodConfig, own_terms: Sequence[Objective] = ()):
        """own_terms: the user's own terms, which only training needs. Readers of a trained run never import them."""
        self.name = config.name
        self.terms = [*(build(name, options) for name, options in config.terms.items()), *own_terms]

    @classmethod
    def to_train(cls, config: MethodConfig) -> Self:
        """Build the method with the user's own terms (method._target_)."""
        return cls(config, build_own(config))

    @property
    def counterpart(self) -> CounterpartTerm | None:
        return next((term for term in self.terms if isinstance(term, CounterpartTerm)), None)

    @property
    def estimator(self) -> CounterpartTerm | None:
        """Return the term whose counterpart estimates redundancy for the evaluation."""
        return self.counterpart if self.counterpart and self.counterpart.estimates_redundancy else None

    @property
    def fused_head(self) -> FusedHead | None:
        return next((head for term in self.terms if (head := term.fused_head()) is not None), None)

    @property
    def weighing(self) -> WeighingTerm | None:
        return next((term for term in self.terms if isinstance(term, WeighingTerm)), None)

    @property
    def probes(self) -> dict[type[Probe], Objective]:
        """Return the probes of all terms, each with the first term that names it."""
        return {kind: term for term in reversed(self.terms) for kind in term.probes}

    @property
    def keeps(self) -> tuple[str, ...]:
        """Return the outputs of networks that probes read."""
        return tuple(dict.fromkeys(name for probe in self.probes for name in probe.keeps))

    @property
    def follows(self) -> set[str]:
        return {name for term in self.terms for name in term.follows}

    def prior_rows(self, num_classes: int) -> int | None:
        """Return the number of means of the backward encoder; None: members are deterministic, without bottleneck."""
        rows = (term.prior_rows(num_classes) for term in self.terms)
        return max((number for number in rows if number is not None), default=None)

    def student(self, num_members: int) -> int | None:
        """Return the member that is used alone at inference, if the method trains one for that."""
        return next((found for term in self.terms if (found := term.student(num_members)) is not None), None)

    def compared(self, num_members: int) -> range:
        """Return the members whose fields the counterpart reads: all but the student, which is always the last."""
        return range(num_members if self.student(num_members) is None else num_members - 1)

    def receives(self, receiver: int, sender: int, num_members: int) -> tuple[str, ...]:
        if receiver == sender:
            return ()
        fields = (name for term in self.terms for name in term.receives(receiver, sender, num_members))
        return tuple(dict.fromkeys(fields))

    def traffic(self, sizes: Sequence[Sizes], num_classes: int, settings: RedundancyConfig) -> Traffic:
        """Return the fields that members of these sizes send to each other and to the counterpart."""
        members = range(len(sizes))
        sampled = self.prior_rows(num_classes) is not None  # a deterministic member has no scale
        wanted = self.counterpart.reads(settings) if self.counterpart else ()
        return Traffic(
            widths=self.widths(sizes, num_classes),
            received={(one, other): self.receives(one, other, len(members)) for one in members for other in members},
            features=tuple(name for name in wanted if sampled or name != "scale"),
            compared=self.compared(len(members)),
            gradients=self.counterpart.gradients if self.counterpart else (),
            outputs=self.counterpart.outputs if self.counterpart else (),
        )

    def widths(self, sizes: Sequence[Sizes], num_classes: int) -> dict[str, Sequence[int]]:
        """Return for every field that may be sent the floats per input of each member."""
        features = [size.features for size in sizes]
        widths: dict[str, Sequence[int]] = {"mean": features, "scale": features, "logits": [num_classes] * len(sizes)}
        for term in self.terms:
            widths |= term.widths(sizes)
        return widths

    def shared(self, networks: Sequence[Network], num_classes: int) -> nn.ModuleDict | None:
        modules = {name: module for term in self.terms for name, module in term.shared(networks, num_classes).items()}
        return nn.ModuleDict(modules) if modules else None

    def companion(self, member: int, sizes: Sequence[Sizes]) -> Companion | None:
        """Build the companion of the first term that has one."""
        return next((found for term in self.terms if (found := term.companion(member, sizes)) is not None), None)

    def fields(self, view: View) -> Fields:
        sent = {"mean": view.own.mean_BD, "logits": view.own.logits_BK}
        if view.own.scale_BD is not None:
            sent["scale"] = view.own.scale_BD
        for term in self.terms:
            sent |= term.fields(view)
        return sent

    def losses(self, view: View, now: ScheduleValues) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for term in self.terms:
            parts |= term(view, now)
        return parts

    def refuse_mixed(self) -> None:
        """Raise a ValueError if a term is not defined for mixed inputs."""
        if unfit := [type(term).__module__.rpartition(".")[2] for term in self.terms if not term.mixes]:
            raise ValueError(
                f"method={self.name}: its term {unfit[0]} needs one class for each input, but loss.mixup and "
                "loss.cutmix mix two: leave them out"
            )

    def check(self, config: Config, networks: Sequence[Network], sizes: Sequence[Sizes]) -> None:
        """Raise a ValueError if the method cannot train this ensemble."""
        least = max(term.min_members for term in self.terms)
        if len(networks) < least:
            raise ValueError(
                f"method={self.name} needs at least {least} members, got {len(networks)}: write ensemble.size={least}"
            )
        assert self.student(len(networks)) in (None, len(networks) - 1)
        if len([term for term in self.terms if isinstance(term, CounterpartTerm)]) > 1:
            raise ValueError(
                f"method={self.name} has two terms with a counterpart, but only one can be trained: leave one out"
            )
        if config.loss.mixes:
            self.refuse_mixed()
        for probe in self.probes:
            probe.check(config)
        for term in self.terms:
            term.check(config, networks, sizes)


def build(name: str, options: Mapping[str, Any]) -> Objective:
    term = construct(__name__, name, "Term", options, f"method.terms.{name}")
    assert isinstance(term, Objective)
    return term


def build_own(config: MethodConfig) -> list[Objective]:
    """Build the user's own terms. Refuse terms that change the trained ensemble, because readers do not import them."""
    options = config.options if isinstance(config.options, list) else [config.options or {}] * len(config.targets)
    if len(options) != len(config.targets):
        raise ValueError(
            f"method.options has {len(options)} entries for {len(config.targets)} terms: write one for each"
        )
    terms: list[Objective] = []
    for target, arguments in zip(config.targets, options, strict=True):
        found = resolve("method", target, config.trusted)
        try:
            term = found if isinstance(found, Objective) else found(**arguments)
        except TypeError as error:
            raise ValueError(f"method._target_={target}, method.options={arguments}: {error}") from error
        if not isinstance(term, Objective):
            raise ValueError(f"method._target_={target} is not a term: derive it from dicedist.Objective")
        own = {name for kind in type(term).__mro__ if not issubclass(Objective, kind) for name in vars(kind)}
        for name in ("prior_rows", "student", "fused_head"):
            if name in own:
                raise ValueError(
                    f"method._target_={target} defines {name}, but prediction does not import your code: leave {name} "
                    "out, and choose the bottleneck or the student by method="
                )
        if isinstance(term, CounterpartTerm) and term.estimates_redundancy:
            raise ValueError(
                f"method._target_={target}: set estimates_redundancy = False, evaluation reads only its own estimators"
            )
        terms.append(term)
    return terms


def term_class(name: str) -> type[Objective]:
    """Return the class of a term, which can rebuild a trained fused head without the term's options."""
    found: type[Objective] = class_of(__name__, name, "Term", f"method.terms.{name}")
    return found

"""Redundancy between the features of members, equations 4 and 6 of the paper. A student is not compared.

The term adds no loss to a member: the gradient comes from the discriminator, which reads the members' features.
"""

from collections.abc import Sequence

from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.messages import FEATURES, Sizes
from dicedist.algorithm.objectives import CounterpartTerm
from dicedist.config.schema import Config, RedundancyConfig


class Term(CounterpartTerm):
    follows = ("ramp_up", "covariance", "delta")
    estimates_redundancy = True
    mixes = True  # w reads the label of the larger share (docs/backbones.md)

    def __init__(self, conditional: bool):
        self.conditional = conditional

    def reads(self, settings: RedundancyConfig) -> tuple[str, ...]:
        return FEATURES if settings.reads_scale else ("mean",)

    def build_counterpart(self, config: Config, sizes: Sequence[Sizes]) -> Discriminator:
        widest, classes = max(size.features for size in sizes), sizes[0].classes
        return Discriminator(config.redundancy, len(sizes), widest, classes, self.conditional, config.seed)

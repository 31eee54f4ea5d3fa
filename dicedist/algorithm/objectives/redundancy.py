"""Redundancy between members' features, equations 4 and 6 of the paper; with a student, only among the others.

The term adds no loss to a member: the gradient comes from the discriminator, which reads the members' features.
"""

from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.messages import FEATURES
from dicedist.algorithm.objectives import AdversarialTerm
from dicedist.config.schema import RedundancyConfig


class Term(AdversarialTerm):
    follows = ("ramp_up", "covariance", "delta")
    mixes = True  # w is told the label of the larger share (docs/backbones.md)

    def __init__(self, conditional: bool):
        self.conditional = conditional

    def reads(self, settings: RedundancyConfig) -> tuple[str, ...]:
        return FEATURES if settings.reads_scale else ("mean",)

    def build_adversary(
        self, settings: RedundancyConfig, num_members: int, feature_dim: int, num_classes: int, seed: int
    ) -> Discriminator:
        assert self.conditional is not None
        return Discriminator(settings, num_members, feature_dim, num_classes, self.conditional, seed)

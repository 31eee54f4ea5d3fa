"""Redundancy between members' features, equations 4 and 6 of the paper; with a student, among the others only.

Its gradient comes from the discriminator (dicedist.discriminator), so a member adds no loss of its own here.
"""

from torch import Tensor

from dicedist.objectives import Objective, View
from dicedist.schedules import Moment


class Term(Objective):
    discriminator = True

    def __init__(self, conditional: bool):
        self.conditional = conditional

    def __call__(self, view: View, now: Moment) -> dict[str, Tensor]:
        return {}

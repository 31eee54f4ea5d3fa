"""Gradients of each member's cross-entropy with respect to the pixels, shared by GAL and GPMR.

A member sends g_i = d CE_i / d x of every input. The member differentiates the joint loss through its own g_i, which
takes second derivatives, and holds its peers' gradients constant. In training mode batch norm makes the loss of
an input depend on the others. So g_i is the gradient of the sum over the batch, as in public implementations.

Legend: M members, B inputs, X pixels, P pairs of members.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dicedist.algorithm.batch import Views
from dicedist.algorithm.member import Encoding
from dicedist.algorithm.messages import Fields, Sizes
from dicedist.algorithm.objectives import Objective, View
from dicedist.algorithm.probes import Probe, refuse_settings
from dicedist.config.schema import Config

TINY = 1e-8  # a gradient with a smaller norm has no direction


class Pixels(Probe):
    """The images that each member read, as `probed["images"]`: leaves for gradients of its loss."""

    @classmethod
    def check(cls, config: Config) -> None:
        refuse_settings(config, "needs second derivatives")

    def on_images(self, images: Views) -> Views:
        return images.apart().map(lambda view: view.detach().requires_grad_())

    def on_encodings(self, encodings: Mapping[int, Encoding], images: Views) -> None:
        for member, own in encodings.items():
            own.probed["images"] = images[member]


class OnPixelGradients(Objective):
    sends = ("pixel_gradient",)
    min_members = 2
    probes = (Pixels,)

    def fields(self, view: View) -> Fields:
        loss = F.cross_entropy(view.own.logits_BK, view.labels_B, reduction="sum")
        (gradient_BCHW,) = torch.autograd.grad(loss, view.own.probed["images"], create_graph=True)
        return {"pixel_gradient": gradient_BCHW.flatten(1)}

    def widths(self, sizes: Sequence[Sizes]) -> dict[str, list[int]]:
        return {"pixel_gradient": [size.pixels for size in sizes]}


def pairwise_cosines(gradients_MBX: Tensor) -> Tensor:
    """Return the cosines [P, B] of the pairs i < j."""
    directions_MBX = F.normalize(gradients_MBX, dim=-1, eps=TINY)
    num_members = len(gradients_MBX)
    first_P, second_P = torch.triu_indices(num_members, num_members, offset=1, device=gradients_MBX.device)
    return torch.einsum("ibx,jbx->ijb", directions_MBX, directions_MBX)[first_P, second_P]

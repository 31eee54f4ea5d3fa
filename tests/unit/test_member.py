"""The bottleneck of a member stays finite wherever its dense layer goes."""

import pytest
import torch
from torch.nn import functional as F

from dicedist.algorithm.build import build_member
from dicedist.algorithm.checks import check_batch_of_one
from dicedist.algorithm.member import Bottleneck
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.objectives.vceb import gaussian_divergence
from dicedist.config import compose_config
from tests.support.steps import plan_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_scale_that_underflows_has_a_finite_divergence_and_a_gradient(dtype):
    bottleneck = Bottleneck(4, 1)
    with torch.no_grad():
        bottleneck.scale.weight.zero_()
        bottleneck.scale.bias.copy_(torch.tensor([-300.0, -104.0, -50.0, 1.0]))
    bottleneck.to(dtype)
    mean = torch.zeros(2, 4, dtype=dtype)
    scale, raw = bottleneck(mean)
    assert scale.dtype == torch.float32 and scale[0, 0] == 0
    divergence = gaussian_divergence(mean.float(), scale, mean.float(), raw).sum()
    divergence.backward()
    assert divergence.isfinite() and bottleneck.scale.bias.grad.isfinite().all()
    assert (bottleneck.scale.bias.grad[:3] < -1.9).all(), "two inputs push each tiny scale up"


def test_where_it_does_not_underflow_nothing_changes_to_the_bit():
    """Values and gradients are those of the plain logarithm, although the scale is used three times."""
    config = compose_config(["data=shapes", "network=resnet8", "method=ceb", "ensemble.size=2"])
    member = build_member(config, Method(config.method), plan_of(config), 0, num_classes=5)
    torch.manual_seed(0)
    images, noise, labels = torch.randn(32, 3, 32, 32), torch.randn(32, 64), torch.arange(32) % 5

    def gradients(plain):
        member.zero_grad()
        own = member.encode(images, noise)
        prior = member.bottleneck.prior_KD[labels]
        divergence = gaussian_divergence(own.mean_BD, own.scale_BD, prior, None if plain else own.raw_scale_BD)
        (F.cross_entropy(own.logits_BK, labels) + 0.3 * divergence.mean()).backward()
        return [divergence, *(parameter.grad.clone() for parameter in member.parameters())]

    for plain, ours in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(plain, ours)


def test_a_last_batch_of_one_image_is_refused_where_batch_norms_cannot_take_it():
    deep = compose_config(["data=shapes", "network=torchvision/resnet18", "method=ind", "ensemble.size=2"])
    with pytest.raises(ValueError, match="has 1 input, too few for the batch norms of torchvision/resnet18 .*=129"):
        check_batch_of_one(deep, plan_of(deep))
    shallow = compose_config(["data=shapes", "network=resnet8", "ensemble.size=2"])
    check_batch_of_one(shallow, plan_of(shallow))

"""Terms of the methods at points where their value is known in closed form."""

import math

import pytest
import torch
from torch.nn import functional as F

from dicedist.algorithm.objectives import dibs, gal, gpmr, kdcl
from dicedist.algorithm.objectives.pcl import Fusion
from dicedist.algorithm.parts import moving_average
from dicedist.algorithm.schedules import Moment
from dicedist.config import compose_config

ALL = Moment(learning_rate=0.1, log_beta=0.0, ramp_up=1.0, covariance=1.0)


def simplex(num_members):
    """M unit vectors whose pairwise cosines are all -1/(M-1); one input."""
    centred = torch.eye(num_members, dtype=torch.float64) - 1 / num_members
    return F.normalize(centred, dim=1)[:, None]


def test_kdcl_minlogit_is_never_worse_than_the_best_member():
    z = torch.tensor([[[2.0, 0, -1]], [[1.0, 2, -3]]], dtype=torch.float64)
    label = torch.tensor([0])
    teacher = kdcl.minlogit(z, label)
    assert teacher.tolist() == [[0, -2, -4]]
    assert F.cross_entropy(teacher, label).item() == pytest.approx(0.142932, abs=1e-6)
    assert kdcl.naive(z, label).tolist() == [[2, 0, -1]]
    many, labels = torch.randn(4, 50, 7), torch.randint(7, (50,))
    each = torch.stack([F.cross_entropy(member, labels, reduction="none") for member in many])
    assert (F.cross_entropy(kdcl.minlogit(many, labels), labels, reduction="none") <= each.min(0).values + 1e-6).all()


def test_kdcl_general_weights():
    products = torch.tensor([[0.5, 0.2], [0.2, 0.8]], dtype=torch.float64)
    weights = kdcl.least_error_weights(products)
    torch.testing.assert_close(weights, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64), atol=1e-5, rtol=0)
    assert (weights @ products @ weights).item() == pytest.approx(0.4, abs=1e-5)
    alike = torch.randn(1, 20, 5).expand(3, -1, -1)
    torch.testing.assert_close(kdcl.general_weights(alike, torch.arange(20) % 5), torch.full((3,), 1 / 3).double())


@pytest.mark.parametrize("num_members", [2, 3, 5])
def test_alignment_phase_and_magnitude_of_known_directions(num_members):
    pairs = num_members * (num_members - 1) / 2
    orthogonal, apart = torch.eye(num_members).double()[:, None], simplex(num_members)
    alike = torch.ones(num_members, 1, 4).double()
    found = [gal.alignment(gradients).item() for gradients in (alike, orthogonal, apart)]
    assert found == pytest.approx([1 + math.log(pairs), math.log(pairs), math.log(pairs) - 1 / (num_members - 1)])
    found = [gpmr.phase(gradients).item() for gradients in (apart, orthogonal, alike)]
    bound = 1 / (num_members - 1)
    assert found == pytest.approx([0, bound**2, (num_members * bound) ** 2], abs=1e-12)
    assert gpmr.magnitude(7 * apart).item() == pytest.approx(0, abs=1e-12)
    scaled = apart * torch.arange(1, num_members + 1)[:, None, None]
    torch.testing.assert_close(gal.alignment(scaled), gal.alignment(apart))
    torch.testing.assert_close(gpmr.magnitude(5 * scaled), gpmr.magnitude(scaled))
    assert gpmr.magnitude(scaled).item() > 0.1


def test_inputs_without_gradient_leave_the_penalties_finite():
    nothing = torch.zeros(3, 2, 4, requires_grad=True)
    (gal.alignment(nothing) + gpmr.phase(nothing) + gpmr.magnitude(nothing)).sum().backward()
    assert nothing.grad.isfinite().all()


def test_a_warming_average_is_the_mean_of_the_first_weights():
    module = torch.nn.Linear(3, 2)
    average, seen = moving_average(module, 0.999, warms_up=True), []
    for step in range(20):
        torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(step))
        average.update_parameters(module)
        seen.append(module.weight.detach().clone())
    torch.testing.assert_close(average.module.weight.data, torch.stack(seen).mean(0))


def test_the_shares_of_a_fusion_add_up_to_one_dense_layer():
    fusion, features = Fusion([3, 5], 4), [torch.randn(6, 3), torch.randn(6, 5)]
    torch.testing.assert_close(fusion.fused(features), fusion.dense(torch.cat(features, 1)))
    assert sum(parameter.numel() for parameter in Fusion([64] * 3, 100).parameters()) == 19_300


def an_adversary(num_members=3, feature_dim=4, **options):
    config = compose_config(["data=shapes", *(f"redundancy.{name}={value}" for name, value in options.items())])
    torch.manual_seed(0)
    return dibs.Dibs(config.redundancy, num_members, feature_dim, seed=0, pulls_to_noise=True)


def test_dibs_of_an_undecided_discriminator():
    adversary = an_adversary()
    for parameter in adversary.network.rest[-1].parameters():
        torch.nn.init.zeros_(parameter)
    z, draws = torch.randn(2, 3, 6, 4), torch.Generator().manual_seed(0)
    assert adversary.gain(z, draws).item() == pytest.approx(-2.079442, abs=1e-5)
    assert sum(adversary.members_terms(z, z, draws).values()).item() == pytest.approx(-2.079442, abs=1e-5)


def test_dibs_on_pure_noise_comes_to_two_thirds_everywhere():
    adversary = an_adversary(num_steps=120, num_samples=4, lr=0.001)
    read = {"mean": torch.zeros(3, 64, 4), "scale": torch.ones(3, 64, 4)}
    adversary.study(adversary.build_optimizer(), read, torch.zeros(64, dtype=torch.int64), ALL, (0, 0))
    draws = torch.Generator().manual_seed(1)
    z, again = torch.randn(2, 20, 3, 64, 4, generator=draws)
    with torch.no_grad():
        assert adversary.gain(z, draws).item() == pytest.approx(-1.909543, abs=0.03)
        assert sum(adversary.members_terms(z, again, draws).values()).item() == pytest.approx(-2.602690, abs=0.1)

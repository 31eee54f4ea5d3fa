"""Trajectories: rates, moments and posteriors at points where their values are known."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dicedist.algorithm import trajectories
from dicedist.algorithm.checks import check_trajectory
from dicedist.algorithm.member import Encode, Member
from dicedist.algorithm.networks.network import Network
from dicedist.algorithm.trajectories import Surroundings, TrainingSet, disturb
from dicedist.algorithm.trajectories.kfac_laplace import Factors, Laplace, kronecker_factors, moved
from dicedist.algorithm.trajectories.swag import Moments
from dicedist.config import compose_config

SURROUNDINGS = Surroundings(num_images=50_000, weight_decay=3e-4)


def kind_of(method, *overrides):
    return trajectories.build(compose_config([f"method={method}", *overrides]).trajectory)


@pytest.mark.parametrize(
    ("method", "rates"),
    [
        ("sse", {0: 0.2, 20: 0.1, 30: 0.0293, 40: 0.2, 60: 0.1}),
        ("csgld", {0: 0.5, 25: 0.25, 50: 0.5}),
        ("fge", {0: 0.1, 80: 0.1, 144: 0.001, 160: 0.05, 161: 0.02525, 162: 0.0005, 163: 0.02525}),
        ("swag", {0: 0.1, 96: 0.0875, 112: 0.075, 128: 0.0625, 144: 0.05, 299: 0.05}),
        ("vi", {0: 0.1, 210: 0.0505, 270: 0.001, 320: 0.001, 345: 1e-5, 349: 1e-5, 399: 1e-6}),
        ("kfac_laplace", {0: 0.1, 180: 0.07525, 299: 0.001}),
    ],
)  # fmt: skip
def test_rates(method, rates):
    kind = kind_of(method)
    assert {epoch: kind.rate(epoch) for epoch in rates} == pytest.approx(rates, abs=1e-4, rel=1e-3)


def test_moments_at_which_samples_are_kept():
    assert kind_of("sse").moments == [40, 80, 120, 160, 200]
    assert kind_of("csgld").moments == [48, 49, 50, 98, 99]
    fge = kind_of("fge")
    assert fge.moments == [162, 166, 170, 174, 178]
    assert fge.rate(162) == min(fge.rate(160 + step / 50) for step in range(200))


def test_langevin_noise_only_at_the_end_of_a_cycle():
    kind = kind_of("csgld")
    assert kind.deviation(46.9, 50_000) == 0
    # The reference divides sqrt(2 lr) by its 782 batches.
    assert kind.deviation(48, 50_000) == pytest.approx(math.sqrt(2 * kind.rate(48)) / 782, rel=1e-3)
    assert kind_of("csgld", "trajectory.temperature=0").deviation(48, 50_000) == 0


def test_langevin_dynamics_has_the_stationary_variance_of_a_quadratic():
    rate, curvature, num_images = 0.1, 2.0, 50_000
    chains, draws = nn.ParameterList([nn.Parameter(torch.zeros(20_000))]), torch.Generator().manual_seed(0)
    for _ in range(60):
        with torch.no_grad():
            chains[0] -= rate * curvature * chains[0]
        disturb(chains, math.sqrt(2 * rate / num_images), draws)
    assert chains[0].var().item() == pytest.approx(1.111e-5, rel=0.04)


def a_member(bias=True):
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    tail = nn.Sequential(nn.Conv2d(4, 5, 3, stride=2, bias=bias), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Member(Network(trunk, tail, feature_dim=5, trunk_dim=4), 3, None)


def batches(images, labels):
    return lambda: iter(zip(images.split(2), labels.split(2), strict=True))


def training_set(num_images=6):
    images, labels = torch.randn(num_images, 3, 6, 6), torch.randint(3, (num_images,))
    return TrainingSet(lambda: iter(images.split(2)), batches(images, labels), batches(images, labels))


def test_swag_of_the_numbers_one_to_five():
    moments = Moments(1, start=0, rank=3, scale=0.5)
    for value in range(1, 6):
        moments.add(torch.tensor([float(value)]))
    assert moments.mean_P.item() == 3 and (moments.squares_P / moments.count).item() == 2
    assert moments.deviations_RP[:, 0].tolist() == [1, 1.5, 2]
    draws = torch.Generator().manual_seed(0)
    drawn = torch.cat([moments.draw(draws) for _ in range(20_000)])
    assert drawn.var().item() == pytest.approx(2.8125, rel=0.04) and drawn.mean().item() == pytest.approx(3, abs=0.05)


def test_swag_without_spread_is_the_average_of_the_weights_with_new_statistics():
    member, data = a_member(), training_set()
    moments, average = kind_of("swag", "trajectory.scale=0").collector(member, SURROUNDINGS), AveragedModel(member)
    for epoch in range(158, 164):
        disturb(member, 0.1, torch.Generator().manual_seed(epoch))
        moments.after_epoch(member, epoch + 1)
        if epoch + 1 > 160:
            average.update_parameters(member)
    (sample,) = moments.samples(member, [torch.Generator()], data)
    for name, value in average.module.named_parameters():
        torch.testing.assert_close(dict(sample.named_parameters())[name], value, atol=1e-6, rtol=1e-5)
    read = torch.cat([sample.encoder.trunk[0](images) for images in data.augmented()])
    torch.testing.assert_close(sample.encoder.trunk[1].running_mean, read.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)


def test_statistics_of_swag_count_every_image_once():
    member, images = a_member(), torch.randn(5, 3, 6, 6)
    data = TrainingSet(lambda: iter(images.split(3)), None, None)  # batches of 3 and of 2
    moments = kind_of("swag", "trajectory.scale=0").collector(member, SURROUNDINGS)
    moments.after_epoch(member, 161)
    (sample,) = moments.samples(member, [torch.Generator()], data)
    norm = sample.encoder.trunk[1]
    read = sample.encoder.trunk[0](images)
    torch.testing.assert_close(norm.running_mean, read.mean((0, 2, 3)), atol=1e-6, rtol=1e-5)
    variance = (3 * read[:3].var((0, 2, 3)) + 2 * read[3:].var((0, 2, 3))) / 5
    torch.testing.assert_close(norm.running_var, variance, atol=1e-6, rtol=1e-5)
    assert norm.momentum == member.encoder.trunk[1].momentum


@pytest.mark.parametrize("keys", [["optimizer.momentum=0.9"], ["optimizer.name=adam", "optimizer.lr=0.1"]])
def test_langevin_noise_is_that_of_plain_sgd(keys):
    config = compose_config(["method=csgld", *keys])
    with pytest.raises(ValueError, match="trajectory.kind=csgld does not work with these settings: write optimizer"):
        check_trajectory(config)


def test_posterior_of_vi():
    member = a_member()
    posterior = kind_of("vi").collector(member, SURROUNDINGS)
    with torch.no_grad():
        for rho in posterior.rhos:
            rho.fill_(-5)
    count = sum(rho.numel() for rho in posterior.rhos)
    assert (posterior.divergence() / count).item() == pytest.approx(3.146315, abs=1e-5)
    with torch.no_grad():
        for rho in posterior.rhos:
            rho.fill_(0.5 * math.log(posterior.prior_variance))
    posterior.divergence().backward()
    assert posterior.divergence().item() == pytest.approx(0, abs=1e-3)
    assert all(rho.grad.abs().max() < 1e-5 for rho in posterior.rhos)


def test_vi_draws_the_outputs_of_the_dense_layer_and_is_plain_before_its_start():
    member, images = a_member(), torch.randn(1, 3, 6, 6).expand(4000, -1, -1, -1)
    member.eval()
    posterior = kind_of("vi").collector(member, SURROUNDINGS)
    encode, plain = posterior.encoder(member), Encode(member)(images, None).logits_BK
    posterior.before_step(299, torch.Generator())
    assert torch.equal(encode(images, None).logits_BK, plain)
    with torch.no_grad():
        for name, rho in zip(posterior.names, posterior.rhos, strict=True):
            rho.fill_(-1.0 if name == "classifier.weight" else -30.0)
    posterior.before_step(300, torch.Generator().manual_seed(0))
    own = encode(images, None)
    expected = math.exp(-2.0) * own.z_BD[0].square().sum()
    torch.testing.assert_close(own.logits_BK.var(0), expected.expand(3), rtol=0.1, atol=0)
    torch.testing.assert_close(own.logits_BK.mean(0), plain[0], atol=0.05, rtol=0)
    own.logits_BK.square().sum().backward()
    assert all(rho.grad is not None for rho in posterior.rhos)


def test_kronecker_factors_are_sums_over_inputs_and_positions():
    member, data = a_member(), training_set()
    found = kronecker_factors(member, data.plain)
    assert {path: factors.positions for path, factors in found.items()} == {
        "encoder.trunk.0": 36, "encoder.tail.0": 4, "classifier": 1,
    }  # fmt: skip
    inputs, outputs = torch.zeros(6, 6), torch.zeros(3, 3)
    member.eval()
    for images, labels in data.plain():
        for image, label in zip(images, labels, strict=True):
            features = member.encoder(image[None])[0]
            row = torch.cat([features, torch.ones(1)])
            gradient = member.classifier(features).softmax(0) - torch.eye(3)[label]
            inputs, outputs = inputs + row.outer(row), outputs + gradient.outer(gradient)
    torch.testing.assert_close(found["classifier"].inputs.float(), inputs.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["classifier"].outputs.float(), outputs.detach(), atol=1e-5, rtol=1e-4)


def test_draws_of_laplace_have_the_covariance_of_the_factors():
    inputs = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    outputs = torch.tensor([[4.0, -1.5], [-1.5, 1.0]], dtype=torch.float64)
    laplace = Laplace(1.0, Surroundings(num_images=10, weight_decay=0.01))
    draws = [torch.Generator().manual_seed(0)] * 20_000
    drawn = torch.stack([step["dense"] for step in laplace.directions({"dense": Factors(inputs, outputs, 1)}, draws)])
    damping, ratio = 0.1, (5 / 2) / (5 / 2)
    damped = [matrix + math.sqrt(damping * factor) * torch.eye(2) for matrix, factor in ((inputs, ratio), (outputs, 1))]
    expected = torch.kron(damped[1].inverse(), damped[0].inverse())
    covariance = torch.cov(drawn.flatten(1).T)
    assert ((covariance - expected).norm() / expected.norm()).item() < 0.03


def test_laplace_without_scale_is_the_mode_and_tunes_on_held_out_images():
    member, data = a_member(), training_set()
    laplace = kind_of("kfac_laplace").collector(member, SURROUNDINGS)
    draws = [torch.Generator().manual_seed(nth) for nth in range(2)]
    samples = laplace.samples(member, draws, data)
    assert len(samples) == 2 and not torch.equal(samples[0].classifier.weight, samples[1].classifier.weight)
    still = moved(member, {"classifier": torch.ones(3, 6, dtype=torch.float64)}, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(still.parameters(), member.parameters(), strict=True))
    shifted = moved(copy.deepcopy(member), {"classifier": torch.ones(3, 6, dtype=torch.float64)}, 2.0)
    torch.testing.assert_close(shifted.classifier.bias, member.classifier.bias + 2)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["trajectory.kind=swa"], "trajectory.kind=swa: there is no such trajectory; write one of none, csgld"),
        (["trajectory.samples=0"], "trajectory.samples=0: write a whole number from 1"),
    ],
)
def test_mistakes_are_one_line(overrides, line):
    with pytest.raises(ValueError, match=line):
        kind_of("sse", *overrides)

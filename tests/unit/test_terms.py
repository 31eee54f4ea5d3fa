"""Terms of the methods at points where their value is known in closed form."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from dicedist.algorithm.averages import MovingAverage
from dicedist.algorithm.messages import Sizes
from dicedist.algorithm.networks import build as build_network
from dicedist.algorithm.objectives import afd, dibs, ffl, gal, gpmr, kdcl
from dicedist.algorithm.objectives.pcl import Fusion
from dicedist.algorithm.schedules import Schedules, ScheduleValues
from dicedist.algorithm.targets import Targets
from dicedist.config import compose_config

ALL = ScheduleValues(learning_rate=0.1, log_beta=0.0, ramp_up=1.0, covariance=1.0)


def simplex(num_members):
    """M unit vectors whose pairwise cosines are all -1/(M-1); one input."""
    centered = torch.eye(num_members, dtype=torch.float64) - 1 / num_members
    return F.normalize(centered, dim=1)[:, None]


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
    average, seen = MovingAverage(module, 0.999, warms_up=True), []
    for step in range(20):
        torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(step))
        average.follow(module)
        seen.append(module.weight.detach().clone())
    torch.testing.assert_close(average.module.weight.data, torch.stack(seen).mean(0))


def test_the_shares_of_a_fusion_add_up_to_one_dense_layer():
    fusion, features = Fusion([3, 5], 4), [torch.randn(6, 3), torch.randn(6, 5)]
    torch.testing.assert_close(fusion(features), fusion.dense(torch.cat(features, 1)))
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
    adversary.study(adversary.build_optimizer(), read, Targets(torch.zeros(64, dtype=torch.int64)), ALL, (0, 0))
    draws = torch.Generator().manual_seed(1)
    z, again = torch.randn(2, 20, 3, 64, 4, generator=draws)
    with torch.no_grad():
        assert adversary.gain(z, draws).item() == pytest.approx(-1.909543, abs=0.03)
        assert sum(adversary.members_terms(z, again, draws).values()).item() == pytest.approx(-2.602690, abs=0.1)


@pytest.mark.parametrize(
    ("channels", "members", "classes", "weights"),
    [(64, 2, 100, 16_228), (64, 3, 100, 21_028), (256, 3, 100, 231_268), (256, 3, 10, 208_138)],
)
def test_the_weights_of_a_fusion(channels, members, classes, weights):
    fusion = ffl.Fusion([(channels, 8, 8)] * members, classes)
    assert sum(parameter.numel() for parameter in fusion.parameters()) == weights


def a_fusion(num_members=3, shape=(4, 8, 8), num_classes=5):
    torch.manual_seed(0)
    settings = compose_config(["data=shapes"]).optimizer
    return ffl.FusedClassifier([shape] * num_members, num_classes, temperature=3.0, settings=settings)


def test_a_fusion_that_knows_nothing_teaches_nothing():
    fusion = a_fusion()
    for parameter in fusion.network.layers[-1].parameters():
        torch.nn.init.zeros_(parameter)
    read = {"map": torch.randn(3, 6, 4 * 64), "logits": torch.zeros(3, 6, 5)}
    told, values = fusion.answers(read, Targets(torch.arange(6) % 5), ALL, (0, 0))
    assert values["fusion/cross_entropy"].item() == pytest.approx(math.log(5), abs=1e-6)
    assert values["fusion/distillation"].item() == pytest.approx(0, abs=1e-6)
    assert told.gradients["map"].abs().max() == 0 and told.outputs["fused"].abs().max() == 0


def test_a_fusion_decays_as_it_is_told_and_not_as_members():
    config = compose_config(["data=shapes", "method=ffl", "optimizer.weight_decay=0.5"])
    term = ffl.Term(temperature=3.0, weight_decay=1e-5)
    built = term.build_counterpart(config, [Sizes(4, 3072, 5, (4, 8, 8))] * 2)
    assert {group["weight_decay"] for group in built.build_optimizer().param_groups} == {1e-5}


def a_judge(channels=4, member=0, num_members=3, **options):
    given = {"rates": [[0, 2e-5], [75, 2e-6], [150, 2e-7]], "weight_decay": 0.1, "spares_norms": False, "ramp_up": True}
    torch.manual_seed(0)
    sizes = [Sizes(channels, 3072, 5, (channels, 8, 8))] * num_members
    return afd.Term(temperature=3.0, **given | options).companion(member, sizes)


@pytest.mark.parametrize(("channels", "weights"), [(64, 38_017), (128, 149_761)])
def test_the_weights_of_a_judge(channels, weights):
    assert sum(parameter.numel() for parameter in a_judge(channels).parameters()) == weights


def test_an_undecided_judge():
    judge = a_judge()
    for parameter in judge.layers[3].parameters():
        torch.nn.init.zeros_(parameter)
    fields = {member: {"map": torch.randn(6, 256)} for member in (0, 2)}
    assert judge.lesson(fields).item() == pytest.approx(0.25)
    assert judge.study(judge.build_optimizer(), fields, ALL).item() == pytest.approx(0.5)


def test_a_judge_comes_to_the_share_of_the_peer():
    """If the judge cannot separate the maps, the share is one half; if all maps are the peer's, it is one."""
    draws = torch.Generator().manual_seed(0)
    found = []
    for shift in (0.0, 3.0):
        judge = a_judge(rates=[[0, 5e-3]], weight_decay=0.0)
        optimizer = judge.build_optimizer()
        real, fake = (torch.randn(150, 128, 256, generator=draws), torch.randn(150, 128, 256, generator=draws))
        real[..., :64] += shift * torch.sign(torch.randn(64, generator=draws))  # BN takes away what all values share
        for peer_BX, own_BX in zip(real, fake, strict=True):
            judge.study(optimizer, {0: {"map": own_BX}, 2: {"map": peer_BX}}, ALL)
        with torch.no_grad():
            found.append((judge(real[-1]).mean().item(), judge(fake[-1]).mean().item()))
    assert found[0] == pytest.approx((0.5, 0.5), abs=0.1)
    assert found[1] == pytest.approx((1, 0), abs=0.1)


def test_gradients_of_afd_stay_where_they_belong():
    judge, fields = a_judge(), {member: {"map": torch.randn(6, 256).requires_grad_()} for member in range(3)}
    judge.lesson(fields).backward()
    assert fields[0]["map"].grad is not None and fields[2]["map"].grad is None  # neither the peer's
    fields[0]["map"].grad = None
    judge.study(judge.build_optimizer(), fields, ALL)
    assert all(fields[member]["map"].grad is None for member in range(3))  # nor any by the judge's own loss
    network = build_network(
        compose_config(["data=shapes", "network=resnet8", "network.feature_dim=16"]).network, (3, 32, 32)
    )
    taught = {id(p) for group in judge.build_second(network).param_groups for p in group["params"]}
    inside = {name for name, parameter in network.named_parameters() if id(parameter) in taught}
    assert inside == {name for name, _ in network.named_parameters() if not name.startswith("projection.")}


def test_a_ring_hears_the_member_before():
    term = afd.Term(3.0, rates=[[0, 2e-5]], weight_decay=0.1, spares_norms=False, ramp_up=True)
    received = {(i, j) for i in range(3) for j in range(3) if term.receives(i, j, 3)}
    assert received == {(0, 2), (1, 0), (2, 1)}
    assert [term.companion(i, [Sizes(4, 3072, 5, (4, 8, 8))] * 3).peer for i in range(3)] == [2, 0, 1]


def test_the_rates_of_afd_fall_at_epochs_of_a_run_of_300():
    judge = a_judge()
    rates = [judge.rate(replace(ALL, epoch=epoch)) for epoch in (0, 74.9, 75, 149.9, 150, 299)]
    assert rates == [2e-5, 2e-5, 2e-6, 2e-6, 2e-7, 2e-7]
    config = compose_config(["data=shapes", "epochs=30"])
    assert Schedules(config).at(7.5).epoch == 75
    with pytest.raises(ValueError, match="epochs ascending from 0"):
        a_judge(rates=[[5, 1e-3], [0, 1e-4]])


def test_norms_may_be_spared():
    judge = a_judge(spares_norms=True)
    groups = judge.build_optimizer().param_groups
    assert {group["weight_decay"]: {p.ndim for p in group["params"]} for group in groups} == {0.1: {4}, 0.0: {1}}

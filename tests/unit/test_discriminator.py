"""The discriminator w equals the paper's literal network in value and gradient, and recovers known information."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator, PairClassifier
from dicedist.algorithm.pairs import Partners
from dicedist.algorithm.precision import Precision
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.config.schema import RedundancyConfig
from dicedist.evaluation.redundancy import PREDICTED, estimate, fit, fresh_estimates
from tests.support.literal import literal_of
from tests.support.pretend import CUDA, PretendGpu

CONFIG = RedundancyConfig(
    delta="auto", delta_by_size=[[2, 0.1], [3, 0.15], [4, 0.2], [5, 0.22], [6, 0.25]], tau=10, num_samples=4,
    num_steps=4, negatives=4, max_pairs=None, memory=4, lr=0.005, scale="predicted", terms="lhs",
)  # fmt: skip


@pytest.mark.parametrize(("num_members", "feature_dim", "num_classes"), [(2, 8, 5), (4, 16, 10), (5, 64, 100)])
def test_equals_the_literal_network(num_members, feature_dim, num_classes):
    torch.manual_seed(0)
    network = PairClassifier(num_members, feature_dim, num_classes)
    literal = literal_of(network)
    batch = 12
    labels = torch.randint(num_classes, (batch,))
    z = torch.randn(num_members, batch, feature_dim, requires_grad=True)
    z_literal = z.detach().clone().requires_grad_()
    pairs = [(i, j) for i in range(num_members) for j in range(i + 1, num_members)]
    projected, of_class = network.project(z), network.of_class(labels)
    first = torch.stack([projected[i] + projected[j] + of_class.first_BH for i, j in pairs])
    ours = network.logits(first, of_class)
    slots = torch.zeros(len(pairs), batch, num_members, feature_dim)
    for row, (i, j) in enumerate(pairs):
        slots[row, :, i], slots[row, :, j] = z_literal[i], z_literal[j]
    theirs = literal(slots.view(len(pairs) * batch, -1), labels.repeat(len(pairs))).view_as(ours)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(z.grad, z_literal.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.cat([network.slots_MDH.grad.flatten(0, 1), network.embedding_first_EH.grad]).T,
        literal.first.weight.grad, atol=1e-5, rtol=1e-4,
    )  # fmt: skip
    torch.testing.assert_close(network.embedding_KE.grad, literal.embedding.weight.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(network.last.weight.grad, literal.last.weight.grad, atol=1e-5, rtol=1e-4)


def test_blockwise_equals_autograd():
    torch.manual_seed(2)
    w = Discriminator(CONFIG, 3, 8, 5, True, seed=0).double()
    labels = torch.tensor([0, 0, 1, 1, 2, 3, 3])
    means, scales = torch.randn(3, 7, 8).double(), torch.rand(3, 7, 8).double()
    features, partners = Features(means, scales), Partners.of(labels, w.memory)
    targets, weights = w.targets(partners.found_B, len(w.pairs_P2))
    results = []
    for differentiate in (w.differentiate, partial(by_autograd, w)):
        w.zero_grad()
        draws = torch.Generator().manual_seed(5)
        (compared,) = w.comparisons(features, labels, partners, [w.pairs_P2], PREDICTED, [draws])
        logits = differentiate(compared, targets, weights)
        results.append((logits, *(parameter.grad.clone() for parameter in w.network.parameters())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


def by_autograd(w, compared, targets, weights):
    logits = w.logits(compared)
    targets = targets.expand_as(logits)
    torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, weights, reduction="sum").backward()
    return logits.detach()


def test_every_learning_step_reads_the_weights_of_the_one_before_in_half_precision_too():
    """Autocast keeps weights in bf16 until its context ends, and several steps are taken inside it."""

    def learned(forgets):
        torch.manual_seed(0)
        w = discriminator()
        w.in_blocks = False
        optimizer = w.build_optimizer()
        if forgets:
            optimizer.register_step_post_hook(lambda *_: torch.clear_autocast_cache())
        features = Features(torch.randn(3, 16, 8), torch.rand(3, 16, 8))
        with Precision("bf16", CUDA).for_discriminator():
            w.learn(optimizer, features, torch.arange(16) % 5, PREDICTED, (0, 0))
        return [parameter.detach() for parameter in w.network.parameters()]

    with PretendGpu():  # its autocast is the CPU's
        pairs = zip(learned(False), learned(True), strict=True)
    assert all(torch.equal(plain, forgetful) for plain, forgetful in pairs)


def test_half_precision_is_close_and_its_answer_whole():
    """The computation of a GPU with precision=bf16, here on the CPU without blockwise gradients."""
    torch.manual_seed(0)
    w = discriminator()
    means, labels = torch.randn(3, 16, 8), torch.randint(5, (16,))
    draws = partial(torch.Generator().manual_seed, 1)
    whole, halved = [], []
    for halves, results in ((False, whole), (True, halved)):
        leaf = means.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=halves):
            features = Features(leaf, torch.full((3, 16, 8), 0.5))
            terms = w.redundancy(features, labels, w.pairs_P2, PREDICTED, draws())
        results += [terms["lhs"], torch.autograd.grad(terms["lhs"], leaf)[0]]
    assert [value.dtype for value in halved] == [torch.float32] * 2
    torch.testing.assert_close(halved[0], whole[0], atol=0.01, rtol=0.1)
    assert torch.cosine_similarity(halved[1].flatten(), whole[1].flatten(), dim=0) > 0.99


def test_unconditional_has_no_embedding_and_one_output():
    network = PairClassifier(3, 16, 1)
    counts = {name: parameter.numel() for name, parameter in network.named_parameters()}
    assert counts["embedding_KE"] == 0
    assert sum(counts.values()) == (3 * 16 + 1) * 256 + 257 * 256 + 257 * 100 + 101


def test_size_is_the_papers():
    counts = [sum(p.numel() for p in PairClassifier(m, 64, 100).parameters()) for m in (4, 5)]
    assert counts[1] - counts[0] == 256 * 64  # "an additional member only adds 256*d trainable weights"
    assert counts[0] == 64 * 100 + (4 * 64 + 64 + 1) * 256 + (256 + 64 + 1) * 256 + 257 * 100 + 101 * 100


@pytest.mark.parametrize(("members", "delta"), [(2, 0.1), (4, 0.2), (6, 0.25), (9, 0.25)])
def test_delta_by_size(members, delta):
    assert CONFIG.delta_for(members) == delta


def discriminator(num_members=3, terms="lhs", scale="predicted"):
    torch.manual_seed(1)
    return Discriminator(replace(CONFIG, terms=terms, scale=scale), num_members, 8, 5, True, seed=0)


def test_both_terms_are_the_sum_of_the_two_and_rhs_uses_partners_only():
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 4])
    features = Features(torch.randn(3, 8, 8), torch.rand(3, 8, 8))
    now = ScheduleValues(0.1, 1.0, 1.0, 0.5)
    gradients = {}
    for terms in ("lhs", "rhs", "both"):
        w = discriminator(terms=terms)
        gradients[terms], _ = w.redundancy_gradients(features, labels, now, (0, 0))
    torch.testing.assert_close(gradients["both"], gradients["lhs"] + gradients["rhs"])
    assert gradients["rhs"][:, 6:].abs().max() == 0  # classes 3 and 4 have no partner yet
    assert gradients["lhs"][:, 6:].abs().min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    alone = Features(features.means_MBD[:, 6:], features.scales_MBD[:, 6:])
    lonely, _ = discriminator(terms="rhs").redundancy_gradients(alone, labels[6:], now, (0, 0))
    assert lonely.abs().max() == 0


def test_inputs_without_partner_are_counted():
    w = discriminator()
    labels = torch.tensor([0, 0, 1, 2])
    features = Features(torch.randn(3, 4, 8), torch.rand(3, 4, 8))
    optimizer = torch.optim.RMSprop(w.network.parameters(), lr=1e-3)
    values = w.learn(optimizer, features, labels, PREDICTED, (0, 0))
    assert values["discriminator/without_partner"] == 2
    values = w.learn(optimizer, features, labels, PREDICTED, (0, 1))  # now the memory has them
    assert values["discriminator/without_partner"] == 0


def correlated(dims, rho, count, num_classes, generator):
    """Gaussian pairs with correlation rho per dimension, given the class."""
    labels = torch.randint(num_classes, (count,), generator=generator)
    centers = torch.randn(2, num_classes, dims, generator=torch.Generator().manual_seed(7))
    first = torch.randn(count, dims, generator=generator)
    second = rho * first + math.sqrt(1 - rho**2) * torch.randn(count, dims, generator=generator)
    means = torch.stack([first, second]) + centers[:, labels]
    return Features(means, torch.ones_like(means)), labels


def recovered(dims, rho, num_steps):
    config = replace(CONFIG, num_samples=1, scale="none")
    generator = torch.Generator().manual_seed(0)
    train, train_labels = correlated(dims, rho, 50_000, 3, generator)
    held_out, labels = correlated(dims, rho, 4_000, 3, generator)
    w = fit(config, train, train_labels, 3, num_steps=num_steps)
    return estimate(w, held_out, labels, w.pairs_P2)


def test_estimate_recovers_gaussian_information():
    truth = -0.5 * 4 * math.log(1 - 0.3**2)
    assert recovered(4, 0.3, 500).nats_P[0] == pytest.approx(truth, rel=0.15)


def test_estimate_reads_zero_for_independent_features():
    result = recovered(8, 0.0, 150)
    assert abs(result.nats_P[0]) < 0.02
    assert result.accuracy == pytest.approx(0.8, abs=0.01)  # the best guess, with four product pairs per joint pair
    for bin_ in result.calibration:
        if bin_["count"] > 1000:
            assert bin_["joint"] == pytest.approx(bin_["mean"], abs=0.05)


def test_held_out_means_that_partners_are_held_out_too():
    """Whatever w remembers of its training features, the estimate does not see it; nor does w forget it."""
    held_out, labels = correlated(8, 0.5, 600, 3, torch.Generator().manual_seed(0))
    w = Discriminator(replace(CONFIG, num_samples=1, scale="none"), 2, 8, 3, conditional=True, seed=0)
    before = estimate(w, held_out, labels, w.pairs_P2)
    w.memory.write(1e3 * torch.ones(2, 30, 8), torch.ones(2, 30, 8), torch.arange(30) % 3)
    after = estimate(w, held_out, labels, w.pairs_P2)
    assert before == after and all(deviation > 0 for deviation in before.deviation_P)
    assert w.memory.means_MQD.max() == 1e3


@pytest.mark.slow
def test_fresh_estimates_do_not_depend_on_the_scale_of_features(monkeypatch):
    monkeypatch.setattr("dicedist.evaluation.redundancy.fit", partial(fit, num_steps=200))
    draws = torch.Generator().manual_seed(0)
    train, train_labels = correlated(4, 0.9, 4000, 3, draws)
    held_out, labels = correlated(4, 0.9, 2000, 3, draws)
    found = fresh_estimates((train, train_labels), (held_out, labels), 3)
    scaled = [Features(50 * of.means_MBD + 3, 0.01 * of.scales_MBD) for of in (train, held_out)]
    again = fresh_estimates((scaled[0], train_labels), (scaled[1], labels), 3)
    for kind in ("conditional", "unconditional"):
        assert again[kind].nats_P == pytest.approx(found[kind].nats_P, abs=1e-3)
    assert found["unconditional"].nats_P[0] > found["conditional"].nats_P[0] > 0.05  # the class is shared, too


def test_without_any_partner_there_is_no_estimate():
    """This happens with one held-out image per class."""
    held_out, _ = correlated(8, 0.5, 3, 3, torch.Generator().manual_seed(0))
    w = Discriminator(CONFIG, 2, 8, 3, conditional=True, seed=0)
    assert estimate(w, held_out, torch.arange(3), w.pairs_P2) is None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dims", [4, 8, 16])
@pytest.mark.parametrize("rho", [0.3, 0.5, 0.8])
def test_estimate_recovers_gaussian_information_on_the_whole_grid(dims, rho):
    truth = -0.5 * dims * math.log(1 - rho**2)
    assert recovered(dims, rho, 3000).nats_P[0] == pytest.approx(truth, rel=0.15)


def test_a_budget_of_pairs_is_unbiased_and_has_the_stated_variance():
    """Without noise on z, only the choice of pairs differs between steps."""
    torch.manual_seed(0)
    config = replace(CONFIG, scale="none")
    features = Features(3 * torch.randn(4, 6, 8), torch.ones(4, 6, 8))
    labels, now = torch.arange(6) % 3, ScheduleValues(learning_rate=0.0, log_beta=0.0, ramp_up=1.0, covariance=1.0)
    w = Discriminator(config, 4, 8, 3, True, seed=0)
    whole = w.redundancy_gradients(features, labels, now, (0, 0))[1]["redundancy"]
    pairs = [w.redundancy(features, labels, pair[None], now, torch.Generator())["lhs"] for pair in w.pairs_P2]
    w.config = replace(config, max_pairs=2)
    found = torch.stack([w.redundancy_gradients(features, labels, now, (0, n))[1]["redundancy"] for n in range(1500)])
    variance = torch.stack(pairs).var() * (1 / 2) * (1 - 2 / 6)
    assert found.mean().item() == pytest.approx(whole.item(), abs=4 * (variance / 1500).sqrt().item())
    assert found.var().item() == pytest.approx(variance.item(), rel=0.15)

"""Label smoothing, class weights, mixup and CutMix against plain references, in the loss and in the step."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dicedist.algorithm.batch import Batch, paired
from dicedist.algorithm.checks import check_members
from dicedist.algorithm.mixing import Mixing, draw
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.targets import Loss, Targets
from dicedist.config import compose_config
from tests.support.steps import CPU, STRONG, batch_at, build_step, configured, plan_of, weights_of

PLAIN = ("network._target_=tests.support.networks.Plain", "network.trusted=true")


def soft_cross_entropy(logits_BK, labels_B, smoothing, weights):
    """Written out: the mean over inputs of - sum_k w_k q_k log p_k, q the smoothed label."""
    total, classes = 0.0, logits_BK.shape[1]
    for logits_K, label in zip(logits_BK, labels_B.tolist(), strict=True):
        for k, log_p in enumerate(logits_K.log_softmax(0)):
            q = (1 - smoothing) * (k == label) + smoothing / classes
            total -= weights[k] * q * log_p
    return total / len(labels_B)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("own", [1.0, 0.7])
def test_cross_entropy_written_out(weights, smoothing, own):
    torch.manual_seed(0)
    logits_BK, labels_B, others_B = torch.randn(4, 3), torch.tensor([0, 2, 1, 2]), torch.tensor([1, 0, 1, 2])
    targets = Targets(labels_B, others_B, own, smoothing, None if weights is None else torch.tensor(weights))
    factors = weights or [1.0] * 3
    expected = own * soft_cross_entropy(logits_BK, labels_B, smoothing, factors)
    expected += (1 - own) * soft_cross_entropy(logits_BK, others_B, smoothing, factors)
    torch.testing.assert_close(targets.cross_entropy(logits_BK), expected)


def test_plain_labels_are_torchs_cross_entropy_to_the_bit():
    logits_BK, labels_B = torch.randn(8, 5), torch.randint(5, (8,))
    assert torch.equal(Targets(labels_B).cross_entropy(logits_BK), F.cross_entropy(logits_BK, labels_B))


def test_balanced_weights_have_mean_one_over_the_inputs():
    config = compose_config(["loss.class_weights=balanced"]).loss
    weights_K = Loss.of(config, 0, (4,), [1, 3, 4], CPU).weights_K
    assert weights_K.tolist() == pytest.approx([8 / 3, 8 / 9, 2 / 3])
    assert (weights_K * torch.tensor([1, 3, 4])).sum() / 8 == pytest.approx(1)
    with pytest.raises(ValueError, match="loss.class_weights has 2 numbers for 3 classes: write one for each"):
        Loss.of(compose_config(["loss.class_weights=[1,2]"]).loss, 0, (4,), [1, 3, 4], CPU)


def test_mixup_of_neighbors():
    images = torch.randn(5, 3, 4, 4)
    mixed = Mixing(0.75).of_inputs(images)
    for row, partner in enumerate([1, 0, 3, 2, 4]):  # the last has none
        torch.testing.assert_close(mixed[row], 0.75 * images[row] + 0.25 * images[partner])


def test_cutmix_shows_a_box_of_the_neighbor():
    images = torch.randn(2, 3, 8, 8)
    mixed = Mixing(1 - 8 / 64, (4, 8, 2, 4)).of_inputs(images)
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[4:8, 2:4] = True
    assert torch.equal(mixed[0][:, inside], images[1][:, inside]) and torch.equal(
        mixed[0][:, ~inside], images[0][:, ~inside]
    )


def drawn_over(steps, mixup, cutmix, shape=(3, 32, 32)):
    return [draw(mixup, cutmix, shape, 0, *divmod(step, 20)) for step in range(steps)]


def test_draws_are_keyed():
    drawn = drawn_over(400, 1.0, 1.0)
    assert drawn == drawn_over(400, 1.0, 1.0)
    assert 150 < sum(mixing.box is not None for mixing in drawn) < 250
    mixups = [mixing.own for mixing in drawn_over(400, 1.0, 0.0)]
    assert min(mixups) >= 0.5
    assert sum(mixups) / 400 == pytest.approx(0.75, abs=0.03)  # of max(u, 1 - u), u uniform
    assert draw(0.0, 0.0, (3, 32, 32), 0, 0, 0) is None and draw(0.2, 0.0, (5,), 0, 0, 0).box is None


def published_cutmix(draws):
    """Yun et al.: a box whose area is 1 - lambda around a uniform center, cut off at the border; its share."""
    side = (1 - draws.beta(1.0, 1.0)) ** 0.5
    edges = [np.clip([center - side / 2, center + side / 2], 0, 1) for center in draws.uniform(size=2)]
    return float(np.prod([end - start for start, end in edges]))


def test_boxes_of_cutmix_are_as_large_as_published():
    draws = np.random.default_rng(0)
    published = np.array([published_cutmix(draws) for _ in range(20_000)])
    mixings = drawn_over(5000, 0.0, 1.0)
    areas = np.array([(b - t) * (r - left) / 1024 for t, b, left, r in (mixing.box for mixing in mixings)])
    assert [1 - mixing.own for mixing in mixings] == pytest.approx(areas)
    assert areas.mean() == pytest.approx(published.mean(), abs=0.015)
    smaller, of_published = np.minimum(areas, 1 - areas), np.minimum(published, 1 - published)
    assert smaller.mean() == pytest.approx(of_published.mean(), abs=0.01)
    assert np.quantile(areas, [0.25, 0.5, 0.75]) == pytest.approx(np.quantile(published, [0.25, 0.5, 0.75]), abs=0.03)


@pytest.mark.parametrize("images", [[torch.zeros(5, 3, 32, 32)], []])
def test_a_box_over_half_makes_the_partners_class_the_first(images):
    """On a rank without images too, because w reads the class of the larger share."""
    loss, labels_B = Loss(0, (3, 32, 32), cutmix=1.0), torch.arange(5)
    seen = set()
    for step in range(40):
        batch = Batch(0, step, 5, slice(0, 5), torch.arange(5), labels_B, 0, images)
        mixing, targets = draw(0.0, 1.0, loss.shape, 0, 0, step), loss.prepare(batch)[1]
        swapped = mixing.own < 0.5
        assert targets.labels_B.tolist() == ([1, 0, 3, 2, 4] if swapped else [0, 1, 2, 3, 4])
        assert targets.others_B.tolist() == ([0, 1, 2, 3, 4] if swapped else [1, 0, 3, 2, 4])
        assert targets.own == pytest.approx(max(mixing.own, 1 - mixing.own))
        seen.add(swapped)
    assert seen == {False, True}


@pytest.mark.parametrize("rows", [slice(0, 5), slice(5, 9), slice(3, 6)])
def test_a_replica_mixes_as_the_whole_batch_does(rows):
    loss, images, labels_B = Loss(0, (3, 4, 4), mixup=1.0), torch.randn(9, 3, 4, 4), torch.arange(9)
    whole, of_whole = loss.prepare(Batch(0, 0, 9, slice(0, 9), torch.arange(9), labels_B, 0, [images]))
    loaded = paired(rows, 9)
    margin = rows.start - loaded.start, loaded.stop - rows.stop
    share = Batch(0, 0, 9, rows, torch.arange(9)[loaded], labels_B[loaded], 0, [images[loaded]], margin)
    mixed, targets = loss.prepare(share)
    assert mixed.images[0].equal(whole.images[0][rows]) and mixed.indices_B.tolist() == list(range(9))[rows]
    assert targets.labels_B.equal(of_whole.labels_B[rows]) and targets.others_B.equal(of_whole.others_B[rows])


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("key", ["mixup", "cutmix"])
def test_the_step_trains_on_mixtures(key):
    """Members see the mixture and both labels, in cross-entropy and divergence; w the label of the larger share."""
    config = configured(2, *PLAIN, *STRONG, f"loss.{key}=1")
    step, batch = build_step(config), batch_at(0, side=32)
    mixing = draw(step.loss.mixup, step.loss.cutmix, (3, 32, 32), step.loss.seed, *batch.key)
    images = mixing.of_inputs(batch.images[0])
    told = []
    learn = step.hosted.w.learn
    step.hosted.w.learn = lambda optimizer, features, labels_B, *rest: (
        told.append((features.means_MBD, labels_B)), learn(optimizer, features, labels_B, *rest)
    )[1]  # fmt: skip
    member = step.hosted.member(0)
    with torch.no_grad():
        mean_BD, own = member.encoder(images), mixing.own
        noise = step.encoders.noise(batch, 0)
        encoding = member.encode(images, noise)
        others_B = batch.labels_B[torch.arange(24) ^ 1]
        log_p = encoding.logits_BK.log_softmax(1)
        scale_BD, now = encoding.scale_BD, step.schedules.at(0)
        entropy, divergence = 0.0, 0.0
        for share, labels_B in ((own, batch.labels_B), (1 - own, others_B)):
            entropy += share * -log_p[torch.arange(24), labels_B].mean()
            gap = mean_BD - member.bottleneck.prior_KD[labels_B]
            divergence += share * 0.5 * (scale_BD**2 - 2 * scale_BD.log() - 1 + gap**2).sum(1).mean()
    values = step(batch).values
    assert float(values["member_0/cross_entropy"]) == pytest.approx(float(entropy), rel=1e-6)
    assert float(values["member_0/compression"]) == pytest.approx(float(now.compression_ceb * divergence), rel=1e-6)
    assert torch.equal(told[0][1], batch.labels_B if own > 0.5 else others_B)
    torch.testing.assert_close(told[0][0][0], mean_BD)


def test_a_mixed_batch_may_go_in_pieces():
    """Partners are those of the whole batch."""
    given = (*PLAIN, "method=ind", "loss.mixup=1")
    whole, pieces = (build_step(configured(2, *given, f"optimizer.accumulate={n}")) for n in (1, 3))
    for step in (whole, pieces):
        step(batch_at(0))
    for part, weights in weights_of(whole).items():
        torch.testing.assert_close(weights_of(pieces)[part], weights)


def test_methods_that_need_one_class_refuse_mixtures():
    config = configured(2, "method=adp", "loss.cutmix=1")
    with pytest.raises(ValueError, match="method=adp: its term adp needs one class for each input"):
        check_members(config, Method(config.method), plan_of(config), 1, 1)

"""Label smoothing, class weights, mixup and CutMix against plain references, in the loss and in the step."""

import pytest
import torch
from torch.nn import functional as F

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
    weights_K = Loss.of(config, 0, [1, 3, 4], CPU).weights_K
    assert weights_K.tolist() == pytest.approx([8 / 3, 8 / 9, 2 / 3])
    assert (weights_K * torch.tensor([1, 3, 4])).sum() / 8 == pytest.approx(1)
    with pytest.raises(ValueError, match="loss.class_weights has 2 numbers for 3 classes: write one for each"):
        Loss.of(compose_config(["loss.class_weights=[1,2]"]).loss, 0, [1, 3, 4], CPU)


def test_mixup_of_neighbours():
    images = torch.randn(5, 3, 4, 4)
    mixed = Mixing(0.75).of_inputs(images)
    for row, partner in enumerate([1, 0, 3, 2, 4]):  # the last has none
        torch.testing.assert_close(mixed[row], 0.75 * images[row] + 0.25 * images[partner])


def test_cutmix_shows_a_box_of_the_neighbour():
    images = torch.randn(2, 3, 8, 8)
    mixing = Mixing(0.8, (0.5, 1.0, 0.25, 0.5))
    mixed = mixing.of_inputs(images)
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[4:8, 2:4] = True
    assert torch.equal(mixed[0][:, inside], images[1][:, inside]) and torch.equal(
        mixed[0][:, ~inside], images[0][:, ~inside]
    )
    assert mixing.own_share(images) == 1 - 8 / 64


def test_draws_are_keyed_and_leave_the_larger_share_to_the_input():
    drawn = [draw(1.0, 1.0, 0, epoch, step) for epoch in range(20) for step in range(20)]
    assert drawn == [draw(1.0, 1.0, 0, epoch, step) for epoch in range(20) for step in range(20)]
    assert all(0.5 <= mixing.own <= 1 for mixing in drawn)
    assert all(Mixing.own_share(mixing, torch.empty(1, 3, 32, 32)) >= 0.45 for mixing in drawn)  # whole pixels
    boxes = sum(mixing.box is not None for mixing in drawn)
    assert 150 < boxes < 250
    assert sum(mixing.own for mixing in drawn) / 400 == pytest.approx(0.75, abs=0.03)  # of max(u, 1 - u), u uniform
    assert draw(0.0, 0.0, 0, 0, 0) is None and draw(0.2, 0.0, 0, 0, 0).box is None


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("key", ["mixup", "cutmix"])
def test_the_step_trains_on_mixtures(key):
    """Members see the mixture and both labels, in cross-entropy and divergence; w the label of the larger share."""
    config = configured(2, *PLAIN, *STRONG, f"loss.{key}=1")
    step, batch = build_step(config), batch_at(0)
    mixing = draw(step.loss.mixup, step.loss.cutmix, step.loss.seed, *batch.key)
    images = mixing.of_inputs(batch.images[0])
    told = []
    learn = step.hosted.w.learn
    step.hosted.w.learn = lambda optimizer, features, labels_B, *rest: (
        told.append((features.means_MBD, labels_B)), learn(optimizer, features, labels_B, *rest)
    )[1]  # fmt: skip
    member = step.hosted.member(0)
    with torch.no_grad():
        mean_BD, own = member.encoder(images), mixing.own_share(images)
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
    assert torch.equal(told[0][1], batch.labels_B)
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

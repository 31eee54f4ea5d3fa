"""A member trained by several ranks, each on its share of the batch, equals one trained by a single rank."""

import gc

import pytest
import torch
from torch import nn

from dicedist.algorithm.batch import share
from dicedist.algorithm.networks.batch_norm import SyncBatchNorm, statistics_untouched, synchronize
from dicedist.algorithm.networks.freezing import frozen_norms
from dicedist.training.job import refuse_empty_shares
from tests.support.processes import run_ranks
from tests.support.steps import STRONG, batch_at, build_step, configured, share_of, side_for, weights_of

SIZE, BATCH = 2, 9  # not a multiple of the replicas
CASES = {  # number of ranks -> cases, with two replicas
    5: [
        ("dice", "net"),
        ("dice", "branch"),
        ("ce_cr", "net"),
        ("dice", "net", "loss.mixup=1"),
        ("dice", "branch", "loss.cutmix=1"),
        ("dibs", "net"),
        ("ffl", "net"),
        ("ffl", "branch"),
    ],
    4: [
        ("adp", "net"),
        ("ind", "branch"),
        ("cl_ilr", "branch"),
        ("distill", "net"),
        ("pcl", "branch"),
        ("kdcl", "net"),
    ],
    6: [("okddip", "net")],
}


def config_of(replicas, method, structure, *options):
    replicated = (f"ensemble.replicas={replicas}", "ensemble.sync_batch_norm=true", *options)
    size = 3 if method == "okddip" else SIZE
    return configured(size, *STRONG, f"method={method}", f"structure={structure}", *replicated)


def train_on_rank(rank, world_size, cases, replicas, options=(), num_steps=3):
    """On a rank, per case: the weights of its parts and the last values."""
    results = []
    for case in cases:
        step = build_step(config_of(replicas, *case, *options), rank, world_size)
        side = 32 if "loss.cutmix=1" in case else side_for(case[0])
        for n in range(num_steps):
            values = step(share_of(batch_at(n, BATCH, side=side), step)).values
        results.append((weights_of(step), {name: float(value) for name, value in values.items()}))
    return results


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("world_size", "cases"), CASES.items())
def test_replicas_with_synchronized_batch_norm_equal_one_process(world_size, cases):
    alone = train_on_rank(0, 1, cases, 1)
    by_rank = run_ranks(world_size, train_on_rank, world_size, cases, 2)
    for nth, case in enumerate(cases):
        expected, expected_values = alone[nth]
        seen = [(part, tensors) for results in by_rank for part, tensors in results[nth][0].items()]
        assert {part for part, _ in seen} == expected.keys()
        assert len([part for part, _ in seen if part == "member-1"]) == 2
        for part, tensors in seen:
            assert tensors.keys() == expected[part].keys()
            for name, tensor in tensors.items():
                where = (*case, part, name)
                torch.testing.assert_close(
                    tensor, expected[part][name], atol=1e-7, rtol=1e-6, msg=lambda m, w=where: f"{w}: {m}"
                )
        if "dice" in case:  # the values of the discriminator w cover the rows of all replicas
            w_values = by_rank[-1][nth][1]
            assert w_values["redundancy"] == pytest.approx(expected_values["redundancy"], rel=1e-6)


def rebuilt_on_rank(rank, world_size, times):
    for n in range(times):  # what the last step has sent may still be under way when it is dropped
        step = build_step(configured(SIZE, "method=dice"), rank, world_size)
        values = step(share_of(batch_at(n, BATCH), step)).values
        del step
        gc.collect()
    return all(value.isfinite() for value in values.values())


def test_a_step_may_be_dropped_and_built_again():
    assert run_ranks(3, rebuilt_on_rank, 3, 12) == [True] * 3


def test_without_it_weights_agree_and_statistics_are_each_replicas_own():
    by_rank = run_ranks(5, train_on_rank, 5, [("dice", "net")], 2, ("ensemble.sync_batch_norm=false",))
    one, other = (by_rank[rank][0][0]["member-0"] for rank in (0, 1))
    different = {name.rpartition(".")[2] for name in one if not torch.equal(one[name], other[name])}
    assert different == {"running_mean", "running_var"}


def test_shares_cover_a_batch_in_order():
    for size, replicas in [(9, 2), (128, 3), (4, 4)]:
        rows = [row for nth in range(replicas) for row in range(size)[share(size, replicas, nth)]]
        assert rows == list(range(size))


def over_one_replica(norm):
    return SyncBatchNorm(norm, lambda values: values)


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm2d(4), (6, 4, 3, 3)), (nn.BatchNorm1d(4), (6, 4))])
def test_synchronized_batch_norm_of_one_replica_is_torchs(norm, shape):
    torch.manual_seed(0)
    nn.init.normal_(norm.weight)
    plain = nn.Sequential(norm)
    synced = nn.Sequential(type(norm)(4))
    synced.load_state_dict(plain.state_dict())
    synchronize(synced, over_one_replica)
    assert isinstance(synced[0], SyncBatchNorm)
    for network in (plain, synced):
        network.double()
    inputs = (3 + torch.randn(shape)).double()
    ours, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    torch.testing.assert_close(synced(ours), plain(theirs))
    synced(ours).square().sum().backward()
    plain(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert synced.state_dict().keys() == plain.state_dict().keys()
    for one, other in zip(synced.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(synced.eval()(inputs), plain.eval()(inputs))


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, SyncBatchNorm, nn.SyncBatchNorm])
def test_statistics_untouched_leaves_every_kind_of_batch_norm_alone(kind):
    """torch's own synchronized one has kernels on GPUs only: here it is asked what it would do."""
    norm = nn.BatchNorm2d(4)
    if kind is SyncBatchNorm:
        norm = SyncBatchNorm(norm, lambda values: values)
    elif kind is nn.SyncBatchNorm:
        norm = nn.SyncBatchNorm(4)
    before, counter = {name: buffer.clone() for name, buffer in norm.named_buffers()}, norm.num_batches_tracked
    with statistics_untouched(norm):
        if kind is nn.SyncBatchNorm:
            assert norm.momentum == 0 and norm.num_batches_tracked is not counter
        else:
            norm(torch.randn(6, 4, 3, 3))
    assert norm.momentum == 0.1 and norm.num_batches_tracked is counter
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


def test_a_large_mean_does_not_drown_the_variance():
    synced = nn.Sequential(nn.BatchNorm1d(1))
    synchronize(synced, over_one_replica)
    inputs = 1e4 + torch.tensor([[-0.5], [0.5], [-0.5], [0.5]])
    torch.testing.assert_close(synced(inputs), torch.tensor([[-1.0], [1.0], [-1.0], [1.0]]), atol=1e-3, rtol=0)
    torch.testing.assert_close(synced[0].running_var, torch.tensor([0.9 + 0.1 / 3]))


def test_a_batch_norm_that_cannot_be_synchronized_is_named():
    with pytest.raises(ValueError, match="sync_batch_norm=true needs torch's batch norms with weights.*affine=False"):
        synchronize(nn.Sequential(nn.Sequential(nn.BatchNorm2d(4, affine=False))), over_one_replica)


def test_a_batch_norm_that_does_more_than_normalize_is_not_replaced():
    norm_act = pytest.importorskip("timm.layers").BatchNormAct2d  # ends with an activation, which would be lost
    with pytest.raises(ValueError, match="not BatchNormAct2d"):
        synchronize(nn.Sequential(norm_act(4)), over_one_replica)


def test_frozen_batch_norms_are_not_synchronized():
    network = nn.Sequential(nn.BatchNorm2d(4).requires_grad_(False), nn.Sequential(nn.BatchNorm2d(4)))
    synchronize(network, over_one_replica, [*frozen_norms(network)])
    assert isinstance(network[0], nn.BatchNorm2d) and isinstance(network[1][0], SyncBatchNorm)


def test_a_last_batch_that_leaves_a_replica_without_images_is_refused():
    refuse_empty_shares(50, 16, replicas=2)
    with pytest.raises(ValueError, match="last batch of an epoch has 1 of 49 images, too few for ensemble.replicas=2"):
        refuse_empty_shares(49, 16, replicas=2)

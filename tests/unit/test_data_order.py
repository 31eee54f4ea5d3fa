"""Order and augmentation are functions of (seed, epoch, step): checked as such, and as random draws."""

import torch

from dicedist.data.order import augmentation, balanced_order, batch_indices, checksum, epoch_order, num_batches

N, B = 1003, 128


def test_each_input_once_an_epoch():
    batches = [batch_indices(0, 5, step, N, B) for step in range(num_batches(N, B))]
    assert [len(batch) for batch in batches] == [128] * 7 + [107]
    assert torch.cat(batches).sort().values.equal(torch.arange(N))
    assert num_batches(1024, B) == 8


def test_order_differs_by_epoch_and_seed_only():
    assert epoch_order(0, 1, N).equal(epoch_order.__wrapped__(0, 1, N))
    assert not epoch_order(0, 1, N).equal(epoch_order(0, 2, N))
    assert not epoch_order(0, 1, N).equal(epoch_order(1, 1, N))


def test_augmentation_is_uniform(data_config):
    drawn = augmentation(0, 0, 0, 90_000, data_config("cifar100", augment="cutout"))
    for axis in range(2):
        counts = (drawn.starts_B2[:, axis] + 4).bincount(minlength=9)
        assert len(counts) == 9 and (counts - 10_000).abs().max() < 500
        assert len(drawn.cutout_B2[:, axis].unique()) == 32
    assert abs(drawn.flips_B.float().mean() - 0.5) < 0.01
    pairs = torch.stack([drawn.starts_B2[:, 0], drawn.starts_B2[:, 1], drawn.flips_B.int()]).float()
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 0.02


def test_augmentation_has_its_keys(data_config):
    config = data_config("cifar100")
    shared = augmentation(0, 1, 2, B, config).starts_B2
    others = [
        augmentation(1, 1, 2, B, config),
        augmentation(0, 2, 2, B, config),
        augmentation(0, 1, 3, B, config),
        augmentation(0, 1, 2, B, config, member=0),
        augmentation(0, 1, 2, B, config, member=1),
    ]
    starts = [shared, *(other.starts_B2 for other in others)]
    assert shared.equal(augmentation(0, 1, 2, B, config).starts_B2)
    assert not any(starts[i].equal(starts[j]) for i in range(6) for j in range(i))


def test_crops_reach_as_far_as_the_image_is_large(data_config):
    large = augmentation(0, 0, 0, 10_000, data_config("folder", size=96))
    assert large.starts_B2.min() == -12 and large.starts_B2.max() == 12
    still = augmentation(0, 0, 0, 10, data_config("cifar100", augment="none"))
    assert not still.starts_B2.any() and not still.flips_B.any() and still.cutout_B2 is None


def test_checksum_notices_everything():
    indices = batch_indices(0, 0, 0, N, B)
    swapped = indices.clone()
    swapped[[3, 90]] = swapped[[90, 3]]
    changed = indices.clone()
    changed[5] += 1
    sums = [checksum(indices, 0, 0), checksum(indices, 0, 1), checksum(indices, 1, 0), checksum(indices[:-1], 0, 0)]
    sums += [checksum(swapped, 0, 0), checksum(changed, 0, 0)]
    assert len(set(sums)) == 6
    assert all(0 <= one < 2**63 for one in sums)
    assert checksum(indices.clone(), 0, 0) == sums[0]


def test_balanced_order_sees_every_class_equally_often():
    labels = torch.tensor([0] * 70 + [1] * 25 + [3] * 5)
    order = balanced_order(0, 1, labels)
    assert len(order) == 100 and sorted(labels[order].bincount().tolist()) == [0, 33, 33, 34]
    for label, own in ((0, 70), (1, 25), (3, 5)):
        times = order[labels[order] == label].bincount(minlength=100)[labels == label]
        assert len(times) == own and times.max() - times.min() <= 1  # the inputs of a class take turns
    assert order.equal(balanced_order(0, 1, labels)) and not order.equal(balanced_order(0, 2, labels))
    assert not (order[:50].sort().values == order[50:].sort().values).all()

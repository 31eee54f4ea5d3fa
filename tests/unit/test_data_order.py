"""The order is a function of (seed, epoch), and every input is seen once."""

import torch

from dicedist.data.order import balanced_order, checksum, epoch_order, num_batches
from dicedist.data.pipeline import Loader
from dicedist.data.sources import Source, Split

N, B = 1003, 128


def test_each_input_once_an_epoch(data_config):
    labels = Split(None, torch.zeros(N, dtype=torch.int64))
    source = Source("shapes", ["one"], (0, 0, 0), (1, 1, 1), 32, labels, labels, labels, "digest")
    loader = Loader(labels, data_config("shapes"), source, B, 0, torch.device("cpu"), members=[])
    batches = [batch.indices_B for batch in loader.epoch(5)]
    assert [len(batch) for batch in batches] == [128] * 7 + [107] and torch.cat(batches).equal(epoch_order(0, 5, N))
    assert torch.cat(batches).sort().values.equal(torch.arange(N))
    assert num_batches(1024, B) == 8


def test_order_differs_by_epoch_and_seed_only():
    assert epoch_order(0, 1, N).equal(epoch_order(0, 1, N))
    assert not epoch_order(0, 1, N).equal(epoch_order(0, 2, N))
    assert not epoch_order(0, 1, N).equal(epoch_order(1, 1, N))


def test_checksum_notices_everything():
    indices = epoch_order(0, 0, N)[:B]
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

"""The class memory and the draw of partners: never another class, the input itself, or an empty slot."""

import pytest
import torch

from dicedist.algorithm.memory import ClassMemory
from dicedist.algorithm.pairs import PairTable, Partners, within_budget

K, C, D, M = 6, 4, 3, 2


def tagged(labels, first):
    """Features that carry their class and the running number of their input."""
    numbers = torch.arange(first, first + len(labels)).float()
    return torch.stack([labels.float(), numbers, torch.zeros_like(numbers)], 1).expand(M, -1, D).clone()


def test_memory_keeps_the_last_inputs_of_each_class():
    generator = torch.Generator().manual_seed(0)
    memory = ClassMemory(M, D, K, C)
    seen = {label: [] for label in range(K)}
    for batch in range(12):
        labels = torch.randint(K - 1, (17,), generator=generator)  # the last class never occurs
        memory.write(tagged(labels, 17 * batch), tagged(labels, 17 * batch) + 0.5, labels)
        for n, label in enumerate(labels.tolist()):
            seen[label].append(17 * batch + n)
        for label in range(K):
            rows = memory.means_MQD[:, label * C : (label + 1) * C]
            kept = seen[label][-C:]
            assert sorted(rows[0, : len(kept), 1].tolist()) == kept
            assert (rows[:, : len(kept), 0] == label).all()
            assert int(memory.written_K[label]) == len(seen[label])


@pytest.mark.parametrize("batches_before", [0, 1, 5])
def test_partners(batches_before):
    generator = torch.Generator().manual_seed(1)
    memory = ClassMemory(M, D, K, C)
    for batch in range(batches_before):
        labels = torch.randint(K - 2, (9,), generator=generator)
        memory.write(tagged(labels, 100 * batch), tagged(labels, 100 * batch), labels)
    labels = torch.tensor([0, 0, 1, 2, 3, 3, 3, 4, 5, 0])
    partners = Partners.of(labels, memory)
    pool = torch.cat([tagged(labels, 1000), memory.means_MQD], 1)[0]
    rows_XB = partners.rows(torch.rand(len(labels), 4000, generator=generator))
    for n, label in enumerate(labels.tolist()):
        in_batch = [1000 + k for k in range(len(labels)) if k != n and labels[k] == label]
        entries = memory.means_MQD[0, label * C : label * C + min(C, int(memory.written_K[label])), 1].tolist()
        candidates = in_batch + entries
        assert bool(partners.found_B[n]) == bool(candidates)
        if not candidates:
            continue
        drawn = pool[rows_XB[:, n]]
        assert (drawn[:, 0] == label).all()
        counts = {int(k): int(v) for k, v in zip(*drawn[:, 1].unique(return_counts=True), strict=True)}
        assert sorted(counts) == sorted(map(int, candidates))
        for count in counts.values():  # uniform within six standard deviations
            expected = 4000 / len(candidates)
            assert abs(count - expected) <= 6 * expected**0.5 + 1


def test_plan_pairs_each_joint_row_once_and_moves_either_member():
    generator = torch.Generator().manual_seed(2)
    pairs = torch.combinations(torch.arange(4))
    num_samples, negatives = 3, 5
    moved = torch.randint(2, (2, len(pairs), num_samples, negatives), generator=generator)
    table = PairTable.of(pairs, num_samples, negatives)
    plan, _ = table.plans(moved, slice(0, len(pairs)))
    assert plan.num_joint == len(pairs) * num_samples
    seen = set()
    for row, (first, second) in enumerate(zip(plan.first_X.tolist(), plan.second_X.tolist(), strict=True)):
        joint = row < plan.num_joint
        pair = row // num_samples if joint else (row - plan.num_joint) // (num_samples * negatives)
        stays, sample = divmod(first, num_samples)
        moves, drawn = divmod(second, num_samples * (1 + negatives))
        assert {stays, moves} == set(pairs[pair].tolist())
        assert (drawn < num_samples) == joint
        assert sample == (drawn if joint else (drawn - num_samples) // negatives)
        seen.add((pair, moves))
    assert len(seen) == 2 * len(pairs)


def test_a_share_of_the_pairs_has_its_rows_of_the_plan_of_all():
    pairs, num_samples, negatives = torch.combinations(torch.arange(4)), 2, 3
    moved = torch.randint(2, (1, len(pairs), num_samples, negatives))
    table = PairTable.of(pairs, num_samples, negatives)
    (whole,) = table.plans(moved, slice(0, 6))
    parts = [table.plans(moved, own)[0] for own in (slice(0, 2), slice(2, 6))]
    for name in ("first_X", "second_X"):
        joint = torch.cat([getattr(part, name)[: part.num_joint] for part in parts])
        product = torch.cat([getattr(part, name)[part.num_joint :] for part in parts])
        assert torch.equal(torch.cat([joint, product]), getattr(whole, name))
    assert torch.equal(table.joint(slice(2, 6)).first_X, parts[1].first_X[: parts[1].num_joint])


def test_budget():
    generator = torch.Generator().manual_seed(3)
    pairs = torch.combinations(torch.arange(6))
    assert within_budget(pairs, None, generator) is pairs
    chosen = within_budget(pairs, 4, generator)
    assert len({tuple(pair) for pair in chosen.tolist()}) == 4


def test_a_batch_and_the_memory_are_one_pool_without_copying_the_memory():
    memory = ClassMemory(num_members=2, feature_dim=3, num_classes=4, capacity=2)
    for size in (5, 9, 4):  # room is made for the largest, and smaller ones fit
        means, labels = torch.randn(2, size, 3), torch.arange(size) % 4
        pool, scales = memory.with_batch(means, 2 * means)
        torch.testing.assert_close(pool, torch.cat([means, memory.means_MQD], dim=1))
        torch.testing.assert_close(scales, torch.cat([2 * means, memory.scales_MQD], dim=1))
        memory.write(means, 2 * means, labels)
        assert pool.untyped_storage().data_ptr() == memory.means_MQD.untyped_storage().data_ptr()
    saved = {name: value.clone() for name, value in memory.state_dict().items()}
    assert {name: tuple(value.shape) for name, value in saved.items()} == {
        "written_K": (4,), "means_MQD": (2, 9, 3), "scales_MQD": (2, 9, 3),
    }  # fmt: skip
    fresh = ClassMemory(num_members=2, feature_dim=3, num_classes=4, capacity=2)
    fresh.load_state_dict(saved)
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in saved.items())

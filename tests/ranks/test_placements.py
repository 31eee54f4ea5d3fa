"""Every placement of a step over ranks equals one process, and sends the stated messages."""

from dataclasses import replace

import pytest
import torch

from tests.support.processes import run_ranks
from tests.support.steps import LATE, B, batch_at, build_step, configured, weights_of


def train_on_rank(rank, world_size, overrides, num_steps):
    """On a rank: the weights of its parts and the last values, after some steps."""
    step = build_step(configured(*overrides), rank, world_size)
    for n in range(num_steps):
        values = step(batch_at(n, size=B if n != 1 else 7)).values
    return weights_of(step), {name: float(value) for name, value in values.items()}


def together(world_size, overrides, num_steps=4):
    weights, values = {}, {}
    for part_weights, rank_values in run_ranks(world_size, train_on_rank, world_size, overrides, num_steps):
        weights |= part_weights
        values |= rank_values
    return weights, values


@pytest.mark.parametrize(("members", "placements"), [(2, (2, 3)), (4, (2, 3, 4, 5))])
def test_every_placement_equals_one_process(members, placements):
    overrides = (members, *LATE, "redundancy.delta=0.5")
    expected, expected_values = together(1, overrides)
    for world_size in placements:
        weights, values = together(world_size, overrides)
        assert weights.keys() == expected.keys()
        for part, tensors in expected.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(weights[part][name], tensor, atol=1e-6, rtol=1e-5)
        for name, value in expected_values.items():
            assert values[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (world_size, name)


def test_messages_of_half_the_bytes_are_rounded_alike_in_every_placement():
    overrides = (2, *LATE, "redundancy.delta=0.5", "distributed.wire=bf16")
    expected, values = together(1, overrides)
    for world_size in (2, 3):
        weights, found = together(world_size, overrides)
        for part, tensors in expected.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(weights[part][name], tensor, atol=1e-6, rtol=1e-5)
        assert found == pytest.approx(values, rel=1e-5, abs=1e-6)
    rounded, exact = (together(1, keys, num_steps=1)[1]["redundancy"] for keys in (overrides, overrides[:-1]))
    assert 1e-6 < abs(rounded - exact) < 0.02


def count_messages(rank, world_size, size, wire):
    import torch.distributed as dist

    step = build_step(configured(size, f"distributed.wire={wire}"), rank, world_size)
    sent = []
    original = dist.batch_isend_irecv

    def counting(operations):
        sent.append([op.tensor.nbytes for op in operations if op.op is dist.isend])
        return original(operations)

    dist.batch_isend_irecv = counting
    try:
        step(batch_at(0))
    finally:
        dist.batch_isend_irecv = original
    return sent, step.exchange.bytes_per_step(B)


@pytest.mark.parametrize(("wire", "width"), [("fp32", 4), ("bf16", 2)])
def test_a_step_is_one_gather_and_one_scatter_of_the_stated_size(wire, width):
    size, dims = 4, 64
    results = run_ranks(5, count_messages, 5, size, wire)
    sent = [group for groups, _ in results for group in groups]
    assert len(sent) == 5 * 2  # every rank takes part once in the gather and once in the scatter
    features, gradients, checksums = 2 * size * B * dims * width, size * B * dims * width, size * 8
    assert sum(map(sum, sent)) == features + gradients + checksums
    assert results[0][1] == {"features": features, "gradients": gradients, "checksums": checksums}


def step_with_a_wrong_batch(rank, world_size):
    step = build_step(configured(2), rank, world_size)
    batch = replace(batch_at(0), checksum=7 if rank == 1 else 6)
    return step(batch).out_of_step_M.tolist()


def test_a_member_out_of_step_is_named():
    late = run_ranks(3, step_with_a_wrong_batch, 3)[2]
    assert late == [0, 1]

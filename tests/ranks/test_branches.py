"""Every method on ranks equals one process, and the parts that members share stay bitwise equal on all ranks."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_ranks
from tests.support.steps import CASES, STRONG, batch_at, build_step, configured, side_for, weights_of

SIZE, BATCH = 3, 7


MIXED = ("dice", "net", "network.per_member=[resnet8,wrn28_2,resnet8]")  # D differs between members


@functools.cache
def config_of(method, structure, *options):
    return configured(SIZE, *STRONG, f"method={method}", f"structure={structure}", *options)


def train_on_rank(rank, world_size, cases, num_steps=2):
    """On a rank, per case: the weights of its parts, the last values, and the last step's bytes, sent and stated."""
    sent = []
    original = dist.batch_isend_irecv

    def counting(operations):
        sent.append(sum(op.tensor.nbytes for op in operations if op.op is dist.isend))
        return original(operations)

    dist.batch_isend_irecv = counting
    results = []
    for case in cases:
        step = build_step(config_of(*case), rank, world_size)
        for n in range(num_steps):
            sent.clear()
            values = step(batch_at(n, BATCH, side=side_for(case[0]))).values
        assert len(sent) <= 2  # one gather, one scatter
        weights = weights_of(step)
        stated = step.exchange.bytes_per_step(BATCH)
        results.append((weights, {name: float(value) for name, value in values.items()}, sum(sent), stated))
    dist.batch_isend_irecv = original
    return results


@pytest.fixture(scope="module")
def alone():
    torch.set_default_dtype(torch.float64)
    results = dict(zip([*CASES, MIXED], train_on_rank(0, 1, [*CASES, MIXED]), strict=True))
    torch.set_default_dtype(torch.float32)
    return results


WITH_W = [
    (method, structure) for method, structure in CASES if method in ("dice", "ce_cr", "okddip_dice", "dibs", "ffl")
]
BRANCHES = [case for case in CASES if case[1] == "branch"]


# Members on ranks (0, 0, 1); one per rank, with the discriminator w next to the last; one per rank, with w alone. In
# double precision: ranks add in another order, and a ReLU can turn the last bit of a float32 into another gradient.
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("world_size", "cases"), [(2, CASES), (3, [*BRANCHES, ("afd", "net")]), (4, [*WITH_W, MIXED])])
def test_every_method_on_ranks_equals_one_process(alone, world_size, cases):
    by_rank = run_ranks(world_size, train_on_rank, world_size, cases)
    for nth, case in enumerate(cases):
        results = [rank_results[nth] for rank_results in by_rank]
        expected_weights, expected_values, _, nothing = alone[case]
        for weights, _, _, _ in results:
            for part, tensors in weights.items():
                for name, tensor in tensors.items():
                    torch.testing.assert_close(
                        tensor, expected_weights[part][name], atol=1e-7, rtol=1e-7,
                        msg=lambda m, where=(*case, part, name): f"{where}: {m}",
                    )  # fmt: skip
        values = {name: value for _, own, _, _ in results for name, value in own.items()}
        for name, value in expected_values.items():
            assert values[name] == pytest.approx(value, rel=1e-7, abs=1e-7), (case, name)
        assert {part for weights, *_ in results for part in weights} == expected_weights.keys()
        assert nothing == {}
        assert sum(sent for _, _, sent, _ in results) == sum(results[0][3].values()), case


def digest_on_rank(rank, world_size, cases, num_steps):
    """The parts that members share, as bytes, after `num_steps` steps."""
    digests = []
    for case in cases:
        step = build_step(config_of(*case), rank, world_size)
        for n in range(num_steps):
            step(batch_at(n, BATCH))
        common = {part.name: part.module.state_dict() for part in step.hosted.common}
        digests.append({name: b"".join(t.numpy().tobytes() for t in state.values()) for name, state in common.items()})
    return digests


def test_replicas_stay_bitwise_equal_over_fifty_steps():
    cases = [("dice", "branch"), ("one", "branch"), ("okddip", "net")]
    by_rank = run_ranks(3, digest_on_rank, 3, cases, 50)
    assert [sorted(digest) for digest in by_rank[0]] == [["trunk"], ["shared", "trunk"], ["shared"]]
    assert by_rank[0] == by_rank[1] == by_rank[2]


def test_members_of_one_rank_share_one_trunk():
    step = build_step(configured(SIZE, "method=ceb", "structure=branch"))
    forwards = []
    step.hosted.trunk.module.register_forward_hook(lambda *_: forwards.append(1))
    step(batch_at(0, BATCH))
    assert len(forwards) == 1
    assert step.exchange.bytes_per_step(BATCH) == {}


def test_shared_gradients_are_counted_as_a_ring_moves_them():
    step = build_step(configured(SIZE, "method=ceb", "structure=branch"))
    num_common = sum(parameter.numel() for parameter in step.hosted.common_parameters)
    assert num_common > 0
    step.exchange.placement = type(step.exchange.placement)(3, ((0,), (1,), (2,)))
    assert step.exchange.bytes_per_step(BATCH, num_common) == {"shared gradients": 4 * 2 * 2 * num_common}


def test_half_precision_survives_an_overflow_in_the_first_step():
    step = build_step(configured(SIZE, *STRONG, "method=okddip_ceb", "structure=branch", "precision=fp16"))
    start = step.hosted.precision.scaler.get_scale()
    for n in range(3):
        values = step(batch_at(n, BATCH)).values
    assert step.hosted.precision.scaler.get_scale() < start  # the first gradients of the trunk were not finite
    assert all(value.isfinite() for value in values.values())
    assert all(p.isfinite().all() for part in step.hosted.learners for p in part.module.parameters())

"""The step equals Algorithm 1, and every placement equals one process."""

import copy
import math
import shutil
from dataclasses import replace

import pytest
import torch
from algorithm1 import Algorithm1
from ranks import run_ranks
from test_discriminator import literal_of
from torch._dynamo.utils import counters

from dicedist.config import compose_config
from dicedist.data import sources
from dicedist.data.pipeline import Batch
from dicedist.inference import read
from dicedist.objectives import Method
from dicedist.placement import place
from dicedist.randomness import generator
from dicedist.step import Step
from dicedist.world import World

K, B, STEPS_PER_EPOCH = 10, 24, 4
CPU = torch.device("cpu")


def configured(size, *overrides):
    return compose_config(["data=shapes", "network=resnet8", "epochs=2", f"ensemble.size={size}", *overrides])


def batch_at(step, size=B):
    draws = generator(CPU, 0, "test batch", step)
    images = torch.randn(size, 3, 16, 16, generator=draws).to(memory_format=torch.channels_last)
    labels = torch.randint(K, (size,), generator=draws)
    epoch, step_in_epoch = divmod(step, STEPS_PER_EPOCH)
    return Batch(epoch, step_in_epoch, size, slice(None), torch.arange(size), labels, 1000 + step, [images])


def build_step(config, rank=0, world_size=1, num_classes=K):
    needs_w = Method(config.method).redundancy is not None
    placement = place(world_size, config.ensemble.size, needs_w, config.ensemble.replicas)
    return Step.build(config, placement, World(rank, world_size, CPU), num_classes, STEPS_PER_EPOCH)


def reference_for(step, config):
    members = [copy.deepcopy(step.hosted.member(i)) for i in step.hosted.members]
    w = step.hosted.w
    reference = Algorithm1(members, literal_of(w.network), K, w.delta, negatives=config.redundancy.negatives)
    reference.w_optimizer.param_groups[0]["lr"] = config.redundancy.lr
    return reference


def reference_step(reference, config, batch):
    where = (batch.epoch, batch.step_in_epoch)
    now = config.schedule().at(batch.epoch + batch.step_in_epoch / STEPS_PER_EPOCH)
    return reference.step(
        batch.views[0], batch.labels_B, math.exp(now.log_beta), now.learning_rate, now.ramp_up, now.covariance,
        [generator(CPU, config.seed, "z", *where, member) for member in range(len(reference.members))],
        generator(CPU, config.seed, "redundancy", *where),
        [generator(CPU, config.seed, "discriminator", *where, k) for k in range(config.redundancy.num_steps)],
    )  # fmt: skip


# Late in training beta is small, the ramp-up over and the scale half annealed: every term counts.
LATE = "schedules.scale=false", "schedules.ramp_up=1", "schedules.covariance=[0,2]", "bottleneck.log_beta=[[0,1]]"


@pytest.fixture
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_one_step_equals_algorithm_1(members):
    config = configured(members, *LATE, "redundancy.delta=0.5")
    step = build_step(config)
    reference = reference_for(step, config)
    for one in (step, lambda batch: reference_step(reference, config, batch)):
        one(batch_at(3))  # fills the memory, moves every weight
    seen = []
    for part in step.hosted.learners:
        part.optimizer.register_step_pre_hook(lambda *_, p=part: seen.append(gradients_of(p.module)))
    values = step(batch_at(5, size=17))
    losses, redundancy, w_loss, gradients = reference_step(reference, config, batch_at(5, size=17))
    for member in range(members):
        assert float(values[f"member_{member}/loss"]) == pytest.approx(losses[member], rel=1e-6, abs=1e-6)
        assert gradients[member].keys() == seen[member].keys()
        for name, gradient in gradients[member].items():
            torch.testing.assert_close(
                seen[member][name], gradient, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert float(values["redundancy"]) == pytest.approx(redundancy, rel=1e-6)
    assert float(values["discriminator/loss"]) == pytest.approx(w_loss, rel=1e-6)


def gradients_of(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@pytest.mark.usefixtures("double_precision")  # in single precision RMSProp's first steps blow rounding up to 1e-3
def test_twenty_steps_stay_equal():
    config = configured(3, *LATE, "redundancy.delta=0.2")
    step = build_step(config)
    reference = reference_for(step, config)
    for n in range(20):
        batch = batch_at(n, size=6)
        values = step(batch)
        losses, redundancy, w_loss, _ = reference_step(reference, config, batch)
        for member, loss in enumerate(losses):
            assert float(values[f"member_{member}/loss"]) == pytest.approx(loss, abs=1e-4, rel=1e-4), n
        assert float(values["redundancy"]) == pytest.approx(redundancy, abs=1e-4), n
        assert float(values["discriminator/loss"]) == pytest.approx(w_loss, abs=1e-4), n


def train_on_rank(rank, world_size, overrides, num_steps):
    """On a rank: some steps, then its parts' weights and the last values."""
    step = build_step(configured(*overrides), rank, world_size)
    for n in range(num_steps):
        values = step(batch_at(n, size=B if n != 1 else 7))
    weights = {part.name: {k: v.clone() for k, v in part.module.state_dict().items()} for part in step.hosted.parts}
    return weights, {name: float(value) for name, value in values.items()}


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


def count_messages(rank, world_size, size):
    import torch.distributed as dist

    step = build_step(configured(size), rank, world_size)
    sent = []
    original = dist.batch_isend_irecv

    def counting(operations):
        sent.append([op.tensor.numel() * 4 for op in operations if op.op is dist.isend])
        return original(operations)

    dist.batch_isend_irecv = counting
    try:
        step(batch_at(0))
    finally:
        dist.batch_isend_irecv = original
    return sent, step.exchange.bytes_per_step(B)


def test_a_step_is_one_gather_and_one_scatter_of_the_stated_size():
    size, dims = 4, 64
    results = run_ranks(5, count_messages, 5, size)
    sent = [group for groups, _ in results for group in groups]
    assert len(sent) == 5 * 2  # every rank takes part in each of the two once
    features, gradients, checksums = 2 * size * B * dims * 4, size * B * dims * 4, size * 8
    assert sum(map(sum, sent)) == features + gradients + checksums
    assert results[0][1] == {"features": features, "gradients": gradients, "checksums": checksums}


def step_with_a_wrong_batch(rank, world_size):
    step = build_step(configured(2), rank, world_size)
    batch = replace(batch_at(0), checksum=7 if rank == 1 else 6)
    return {name: float(value) for name, value in step(batch).items()}


def test_a_member_out_of_step_is_named():
    late = run_ranks(3, step_with_a_wrong_batch, 3)[2]
    assert late["out_of_step/member_0"] == 0
    assert late["out_of_step/member_1"] == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_compiled_members_equal_plain_ones_in_training_and_are_plain_in_evaluation():
    config = configured(1, "method=ceb", "data.train_limit=16", "compile=graphs")  # on a CPU no graph is recorded
    expected, _ = train_on_rank(0, 1, (1, "method=ceb"), 1)
    step = build_step(config)
    step(batch_at(0))
    member = step.hosted.member(0)
    assert member.state_dict().keys() == expected["member-0"].keys()
    torch.testing.assert_close(dict(member.state_dict()), expected["member-0"], atol=1e-5, rtol=1e-4)

    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    source = sources.load(config.data)
    assert read(step.hosted, source.train, source, 8, CPU)[0].means_ND.shape == (16, 64)
    assert counters["stats"]["unique_graphs"] == compiled

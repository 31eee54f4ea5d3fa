"""The step equals Algorithm 1, and every placement equals one process."""

import copy
import math
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from dicedist.algorithm.randomness import generator
from dicedist.algorithm.schedules import Schedules
from dicedist.data import sources
from dicedist.evaluation.about import described
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.loading import describe
from dicedist.evaluation.readings import MEANS, Reader
from tests.algorithm1 import Algorithm1
from tests.support.literal import literal_of
from tests.support.steps import (
    CPU,
    LATE,
    STEPS_PER_EPOCH,
    K,
    batch_at,
    build_step,
    configured,
    gradients_of,
    plan_of,
    weights_of,
)


def reference_for(step, config):
    members = [copy.deepcopy(step.hosted.member(i)) for i in step.hosted.members]
    w = step.hosted.w
    reference = Algorithm1(members, literal_of(w.network), K, w.delta, negatives=config.redundancy.negatives)
    reference.w_optimizer.param_groups[0]["lr"] = config.redundancy.lr
    return reference


def reference_step(reference, config, batch):
    where = (batch.epoch, batch.step_in_epoch)
    now = Schedules(config).at(batch.epoch + batch.step_in_epoch / STEPS_PER_EPOCH)
    return reference.step(
        batch.images[0], batch.labels_B, math.exp(now.log_beta), now.learning_rate, now.ramp_up, now.covariance,
        [generator(CPU, config.seed, "z", *where, member) for member in range(len(reference.members))],
        generator(CPU, config.seed, "redundancy", *where),
        [generator(CPU, config.seed, "discriminator", *where, k) for k in range(config.redundancy.num_steps)],
    )  # fmt: skip


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
    values = step(batch_at(5, size=17)).values
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


@pytest.mark.usefixtures("double_precision")  # in single precision RMSProp's first steps blow rounding up to 1e-3
def test_twenty_steps_stay_equal():
    config = configured(3, *LATE, "redundancy.delta=0.2")
    step = build_step(config)
    reference = reference_for(step, config)
    for n in range(20):
        batch = batch_at(n, size=6)
        values = step(batch).values
        losses, redundancy, w_loss, _ = reference_step(reference, config, batch)
        for member, loss in enumerate(losses):
            assert float(values[f"member_{member}/loss"]) == pytest.approx(loss, abs=1e-4, rel=1e-4), n
        assert float(values["redundancy"]) == pytest.approx(redundancy, abs=1e-4), n
        assert float(values["discriminator/loss"]) == pytest.approx(w_loss, abs=1e-4), n


def refuse_symbols(graph, inputs):
    """A backend that compiles nothing, and fails where a shape is no number."""
    sizes = [size for given in inputs for size in (given.shape if isinstance(given, torch.Tensor) else [given])]
    assert all(type(size) is int for size in sizes), f"dynamic shapes: {sizes}"
    return graph.forward


def test_every_compiled_stage_has_shapes_and_a_limit_of_its_own(monkeypatch):
    """Five members of one process, and the smaller last batch of an epoch."""
    compile_module = torch.nn.Module.compile

    def compiled(module, mode=None, **options):
        compile_module(module, backend=refuse_symbols, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    torch._dynamo.reset()
    step = build_step(configured(5, "method=ind", "network=mlp", "compile=true"))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for n, size in enumerate((4, 3)):
            step.encoders.encode(batch_at(n, size, side=32))
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_compiled_members_equal_plain_ones_in_training_and_are_plain_in_evaluation():
    config = configured(1, "method=ceb", "data.train_limit=16", "compile=graphs")  # on a CPU no graph is recorded
    plain = build_step(configured(1, "method=ceb"))
    plain(batch_at(0))
    expected = weights_of(plain)
    step = build_step(config)
    step(batch_at(0))
    member = step.hosted.member(0)
    assert member.state_dict().keys() == expected["member-0"].keys()
    torch.testing.assert_close(dict(member.state_dict()), expected["member-0"], atol=1e-5, rtol=1e-4)

    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    source = sources.load(config.data)
    shard = Ensemble.shard(describe(config, step.method, plan_of(config), "", 1, described(source)), step.hosted)
    (readings,) = Reader(shard, source).read(source.train, "images", [MEANS])
    assert readings[0][MEANS].shape == (16, 64)
    assert all(module.training for module in member.modules())
    assert counters["stats"]["unique_graphs"] == compiled

"""The step of every rank on a GPU that does not exist: devices, waits of the host, streams, NCCL's queues, values."""

import functools
import math
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.encoders import Encoders
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.precision import AUTOCAST
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.algorithm.step import Step
from dicedist.algorithm.streams import SideStream
from dicedist.algorithm.trajectories import Trajectories
from dicedist.config import compose_config, names
from dicedist.config.schema import AUGMENTS, RedundancyConfig
from dicedist.data import pipeline, sources
from dicedist.data.pipeline import Loader
from dicedist.evaluation import evaluator
from dicedist.evaluation.redundancy import estimate
from tests.support import tiny
from tests.support.pretend import (
    CUDA,
    Graph,
    Hazard,
    HostWaits,
    Message,
    MixedDevices,
    PretendGpu,
    PretendNccl,
    what_waits_for_ever,
)
from tests.support.processes import run_ranks
from tests.support.steps import CASES, CPU, LATE, TRAJECTORIES, batch_at, build_step, configured, share_of, side_for

SIZE, STEPS, B = 3, 2, 9
NATS = names.validation(names.REDUNDANCY_NATS)


def config_of(method, structure, *overrides):
    settings = (*LATE, "redundancy.delta=0.5", "redundancy.num_samples=2", *overrides)
    return configured(SIZE, f"method={method}", f"structure={structure}", *settings)


def train(config, rank, world_size, device, hot=nullcontext, before_reading=lambda: None):
    """The last values that a rank records, in a loop in which the host must not wait for the device."""
    step = build_step(config, rank, world_size, device=device)
    for n in range(STEPS):
        batch = share_of(batch_at(n, B, side=side_for(config.method.name)), step)
        labels_B, *images = (to_device(tensor, device) for tensor in (batch.labels_B, *batch.images))
        with hot():
            outcome = step(replace(batch, labels_B=labels_B, images=images))
    before_reading()
    return {name: float(value) for name, value in outcome.values.items()}


def to_device(tensor, device):
    return tensor if device == CPU else tensor.pin_memory().to(device, non_blocking=True)


def train_on_pretended_gpus(rank, world_size, cases):
    """On a rank, per case: the last values, and what was posted to NCCL."""
    results = []
    for config in (config_of(*case) for case in cases):
        with PretendGpu() as gpu, PretendNccl(gpu) as nccl:
            values = train(config, rank, world_size, CUDA, gpu.hot)
            assert gpu.leaked == []
            double = {torch.float64} if config.method.name == "adp" else set()  # the determinant of nearly equal rows
            assert gpu.dtypes == {torch.float32, AUTOCAST[config.precision]} | double, config.method.name
        results.append((values, nccl.posted))
    return results


@functools.cache
def on_the_cpu(*case):
    return train(config_of(*case), 0, 1, CPU)


def compare(world_size, cases, tolerance=1e-4, alone=(), of=""):
    """Every case on pretended GPUs equals one process on the CPU, and no rank waits for ever.

    alone: what one process needs to be the same. of: the beginning of the values that are the same.
    """
    by_rank = run_ranks(world_size, train_on_pretended_gpus, world_size, cases)
    for nth, case in enumerate(cases):
        expected = on_the_cpu(*case, *alone)
        found = {name: fmean(r[nth][0][name] for r in by_rank if name in r[nth][0]) for name in expected}
        assert {name for results in by_rank for name in results[nth][0]} == expected.keys(), case
        for name, value in ((name, value) for name, value in expected.items() if name.startswith(of)):
            assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), (case, name)
        assert what_waits_for_ever([results[nth][1] for results in by_rank]) == [], case


ADVERSARIAL = [case for case in CASES if Method(config_of(*case).method).counterpart is not None]
ONCE = [*{method: (method, structure) for method, structure in CASES}.values()]  # branches, where a method has both
TOGETHER = [("dice", "net"), ("dice", "branch"), ("okddip_dice", "branch"), ("ind", "branch"), ("ffl", "branch")]


@pytest.mark.parametrize(
    ("world_size", "cases"), [(1, TOGETHER), (2, ONCE), (SIZE, ADVERSARIAL[::2]), (SIZE + 1, ADVERSARIAL[1::2])]
)
def test_every_method_and_every_placement(world_size, cases):
    """All methods on two ranks; those with a counterpart take turns with one member per rank, without and with a rank
    of its own for the counterpart."""
    compare(world_size, cases)


def test_replicas():
    keys = "ensemble.replicas=2", "ensemble.sync_batch_norm=true"
    cases = [("dice", "net", *keys), ("dice", "branch", *keys), ("ffl", "net", *keys)]
    # Each replica records the losses of its share; w and a fusion see the whole batch.
    compare(2 * SIZE + 1, cases, alone=("ensemble.replicas=1",), of=("discriminator", "fusion"))


@pytest.mark.parametrize(("world_size", "ranks"), [(SIZE, "members"), (SIZE + 2, "2")])
def test_a_divided_discriminator(world_size, ranks):
    compare(world_size, [("dice", "net", f"redundancy.ranks={ranks}"), ("cebr", "branch", f"redundancy.ranks={ranks}")])


def test_bf16():
    """On a GPU w computes in bf16 too, on a CPU it does not: only what members do is the same."""
    compare(2, [(*case, "precision=bf16") for case in TOGETHER], tolerance=0.05, of="member")


@pytest.mark.parametrize("world_size", [1, 2])
def test_members_of_a_device_as_one_network(world_size):
    cases = [("dice", "net"), ("okddip_dice", "branch")]
    batched = [(*case, "ensemble.batched=true") for case in cases]
    compare(world_size, batched, alone=("ensemble.batched=false",))


def test_fp16_waits_once_for_each_optimizer():
    """torch's loss scaling asks the host whether gradients overflowed, and nothing else does."""
    case = ("dice", "net", "precision=fp16")
    with PretendGpu() as gpu:
        with pytest.raises(HostWaits, match="_local_scalar_dense"):
            train(config_of(*case), 0, 1, CUDA, gpu.hot)
        values = train(config_of(*case), 0, 1, CUDA)
    assert values == pytest.approx(on_the_cpu(*case), rel=0.05, abs=0.05)


def learn_batches(graph):
    """The values and the weights of w after four batches, one of them smaller, with a schedule that moves."""
    settings = RedundancyConfig(
        delta=0.1, delta_by_size=[], tau=10, num_samples=2, num_steps=2, negatives=2, max_pairs=None, memory=2,
        lr=0.005, scale="predicted", terms="lhs", graph=graph,
    )  # fmt: skip
    torch.manual_seed(0)
    w, found = Discriminator(settings, 3, 8, 5, True, seed=0).to(CUDA), []
    optimizer = w.build_optimizer()
    for nth, size in enumerate((12, 12, 7, 12)):
        means, scales, labels = torch.randn(3, size, 8), torch.rand(3, size, 8), torch.randint(5, (size,))
        features = Features(*(tensor.to(CUDA) for tensor in (means, scales)))
        now = ScheduleValues(0.1, 0.0, 1.0, covariance=0.25 * nth)
        found.append(w.learn(optimizer, features, labels.to(CUDA), now, (0, nth)))
    weights = {name: value.cpu() for name, value in w.state_dict().items()}
    return [{name: float(value) for name, value in values.items()} for values in found], weights, w.recorded


@pytest.fixture
def recorded_soon(monkeypatch):
    monkeypatch.setattr("dicedist.algorithm.recorded.WARM_UP", 1)


@pytest.mark.usefixtures("recorded_soon")
def test_the_learning_of_w_as_one_graph(gpu):
    """A replay computes what the kernels one by one do, with the draws and the schedule of its own step."""
    values, weights, _ = learn_batches(graph=False)
    recorded_values, recorded_weights, recorded = learn_batches(graph=True)
    assert recorded_values == values and len(recorded.graph.calls) > 100
    assert all(torch.equal(recorded_weights[name], value) for name, value in weights.items())


@pytest.mark.usefixtures("recorded_soon")
def test_a_step_with_a_recorded_w(gpu):
    """The graph is replayed on the second stream, while the members run backward."""
    values = train(config_of("dice", "net", "redundancy.graph=true"), 0, 1, CUDA)
    assert values == pytest.approx(on_the_cpu("dice", "net"), rel=1e-4, abs=1e-4)
    assert gpu.leaked == []


@pytest.mark.usefixtures("recorded_soon")
def test_a_graph_that_keeps_a_number_or_does_not_know_a_generator_is_caught(gpu, monkeypatch):
    """The schedule as it was when the graph was recorded; draws that would be the same in every replay."""
    values, _, _ = learn_batches(graph=False)
    monkeypatch.setattr("dicedist.algorithm.recorded.cast", lambda kind, covariance: 0.25)
    assert learn_batches(graph=True)[0] != values
    monkeypatch.setattr(Graph, "register_generator_state", lambda graph, draws: None)
    with pytest.raises(AssertionError, match="an unknown generator"):
        learn_batches(graph=True)


@pytest.fixture
def gpu():
    with PretendGpu() as pretended:
        yield pretended


def test_a_tensor_left_on_the_host_is_caught(gpu):
    with pytest.raises(MixedDevices):
        torch.empty(2, device=CUDA) + torch.empty(2)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.zeros(2).to(CUDA, non_blocking=True),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: torch.tensor([1.0, 2.0], device=CUDA),
        lambda x: torch.as_tensor([1.0, 2.0], device="cuda"),
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: torch.zeros(2).cuda(),
    ],
)
def test_a_wait_of_the_host_is_caught(gpu, wait):
    x = torch.ones(3, device=CUDA)
    wait(x)
    with gpu.hot(), pytest.raises(HostWaits):
        wait(x)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("augment", ["basic", "cutout", "jitter", "trivial", "erase"])
def test_a_loader_keeps_the_host_waiting_nowhere(gpu, monkeypatch, augment, resident):
    """Images that stay on the GPU, and those that are copied for every batch."""
    monkeypatch.setattr(pipeline, "RESIDENT", 2**30 if resident else 0)
    named = augment if augment in AUGMENTS else f"[{augment}]"
    config = compose_config(["data=shapes", f"data.augment={named}", "data.pipeline=torch"]).data
    source = sources.load(config)
    expected, found = (Loader(source.train, config, source, 64, 0, device, [0]) for device in (CPU, CUDA))
    assert found.pipeline.holds_images == resident
    expected, found = expected.epoch(0), found.epoch(0)
    for _ in range(2):
        plain = next(expected)
        with gpu.hot():
            ours = next(found)
        torch.testing.assert_close(ours.images[0].cpu(), plain.images[0], rtol=0, atol=1e-6)
        assert ours.labels_B.cpu().equal(plain.labels_B)


def test_a_step_that_does_not_wait_for_the_second_stream_is_caught(gpu, monkeypatch):
    monkeypatch.setattr(SideStream, "join", lambda side: None)
    with pytest.raises(Hazard, match="another stream"):
        train(config_of("dice", "net"), 0, 1, CUDA)


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_another_stream_still_reads_is_caught(gpu, waits):
    side, x = torch.cuda.Stream(), torch.ones(3, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    del x
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    z = torch.ones(3, device=CUDA) * 2
    assert len(gpu.leaked) == (0 if waits else 1)
    assert y.shape == z.shape


@pytest.fixture
def hot_steps(monkeypatch):
    """Except at the end of an epoch, the host must not wait for the pretended GPU, in steps and between them."""

    def heat(owner, name, is_hot):
        cold = getattr(owner, name)

        def hot(self, given):
            gpu = getattr(PretendGpu, "present", None)
            with gpu.hot() if gpu and gpu.is_on and is_hot(self, given) else nullcontext():
                return cold(self, given)

        monkeypatch.setattr(owner, name, hot)

    heat(Step, "__call__", lambda step, batch: True)
    heat(Trajectories, "before_step", lambda trajectories, done: True)
    heat(Trajectories, "after_step", lambda trajectories, done: done % trajectories.clock.steps_per_epoch > 0)


def assert_same_run(found, expected, step):
    found, expected = tiny.tensors_of(found, step), tiny.tensors_of(expected, step)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.usefixtures("hot_steps")
def test_a_whole_training_that_moves_from_the_cpu_to_the_gpu(tmp_path, monkeypatch):
    """Loading, validation, checkpoints, the final evaluation and the report too."""
    devices = []

    def estimated(w, features, labels_N, *given):
        devices.append((w.network.first_bias.device, labels_N.device))
        return estimate(w, features, labels_N, *given)

    monkeypatch.setattr(evaluator, "estimate", estimated)
    in_turn = "ensemble.batched=false"  # as on the CPU: twelve steps make rounding visible
    assert tiny.build(tmp_path / "cpu").train_and_evaluate() == []  # nothing is left unsent
    tiny.train(tmp_path / "both", "max_steps=5")
    with PretendGpu() as gpu:
        devices.clear()
        assert tiny.build(tmp_path / "both", in_turn, device=CUDA).train_and_evaluate() == []
        assert gpu.leaked == []
    assert len(devices) > 1 and set(devices) == {(CUDA, CUDA)}, "redundancy is estimated on the GPU"
    found, expected = (
        {record["step"]: value for record in tiny.records_of(tmp_path / name / "tiny") if (value := record.get(NATS))}
        for name in ("both", "cpu")
    )
    assert {step: found[step] for step in expected} == pytest.approx(expected, abs=2e-3) and expected
    assert_same_run(tmp_path / "both" / "tiny", tmp_path / "cpu" / "tiny", tiny.STEPS)


# In two epochs of three steps: samples are kept on the way, or drawn after the last step.
SHORT = {
    "sse": ("trajectory.samples=2", "trajectory.cycle_epochs=1"),
    "csgld": ("trajectory.samples=2", "trajectory.cycle_epochs=1", "trajectory.noise_epochs=1"),
    "fge": ("trajectory.samples=1", "trajectory.start=1", "trajectory.cycle_epochs=1"),
    "swag": ("trajectory.samples=1", "trajectory.start=0"),
    "vi": ("trajectory.samples=1", "trajectory.start=1"),
    "kfac_laplace": ("trajectory.samples=1", "trajectory.scale=0.5"),
}


@pytest.mark.usefixtures("hot_steps")
@pytest.mark.parametrize("kind", TRAJECTORIES)
def test_a_trajectory(tmp_path, kind):
    """Its samples too, and at the end of an epoch alone the host may wait."""
    keys = (f"method={kind}", *SHORT[kind], "epochs=2", "schedules.reference_epochs=2", "ensemble.size=1")
    tiny.build(tmp_path / "cpu", *keys).train()
    with PretendGpu() as gpu:
        tiny.build(tmp_path / "gpu", *keys, device=CUDA).train()
        assert gpu.leaked == []
    assert any("sample" in name for name in tiny.tensors_of(tmp_path / "gpu" / "tiny", 6))
    assert_same_run(tmp_path / "gpu" / "tiny", tmp_path / "cpu" / "tiny", 6)


def train_with_overwritten_outputs(rank, world_size, cases, too_early=False):
    """CUDA graphs may overwrite what compiled stages returned once the next step encodes: here they do."""
    outputs, encode, receive = [], Encoders.encode, Step.receive

    def overwrite():
        while outputs:
            outputs.pop().fill_(torch.nan)

    def encode_again(encoders, batch):
        overwrite()
        encodings = encode(encoders, batch)
        returned = [(own.mean_BD, *own.probed.values()) for own in encodings.values()]
        outputs.extend(tensor.data for own in returned for tensor in own)  # autograd does not see
        return encodings

    def receive_too_early(step, *given):
        overwrite()
        return receive(step, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoders, "encode", encode_again)
        patch.setattr(Step, "receive", receive_too_early if too_early else receive)
        return [train(config_of(*case), rank, world_size, CPU, before_reading=overwrite) for case in cases]


def test_what_graphs_overwrite_is_not_read_any_more():
    cases = [*TOGETHER[:3], ("ffl", "branch")]
    by_rank = run_ranks(2, train_with_overwritten_outputs, 2, cases)
    for nth, case in enumerate(cases):
        for name, value in on_the_cpu(*case).items():
            for found in [results[nth][name] for results in by_rank if name in results[nth]]:
                assert found == pytest.approx(value, rel=1e-4, abs=1e-4), (case, name)


def test_outputs_that_are_overwritten_too_early_are_caught():
    (found,) = train_with_overwritten_outputs(0, 1, [("dice", "net")], too_early=True)
    assert any(math.isnan(value) for value in found.values())


def test_messages_that_cross_are_caught():
    def send(peer, size=8):
        return Message(True, peer, size)

    def receive(peer, size=8):
        return Message(False, peer, size)

    ring = [[[send(1), receive(2)]], [[send(2), receive(0)]], [[send(0), receive(1)]]]
    assert what_waits_for_ever(ring) == []
    assert what_waits_for_ever([[[send(1)], [receive(1)]], [[send(0)], [receive(0)]]]) != []  # each sends first
    assert what_waits_for_ever([[[send(1)], [receive(1)]], [[receive(0)], [send(0)]]]) == []
    assert what_waits_for_ever([[[send(1)]], []]) == [(0, [send(1)])]
    assert what_waits_for_ever([[((0, 1), 4), [send(1)]], [[receive(0)], ((0, 1), 4)]]) != []
    with pytest.raises(AssertionError, match="8 and 16 bytes"):
        what_waits_for_ever([[[send(1)]], [[receive(0, 16)]]])

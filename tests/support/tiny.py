"""Tiny runs, trained in this process or by ranks and interrupted where a test needs it, and what they leave behind."""

import json

import torch
from safetensors.torch import load_file

from dicedist.algorithm.objectives import Method
from dicedist.cluster import process, signals
from dicedist.cluster.placement import place
from dicedist.cluster.transfer import FileTransfer
from dicedist.cluster.world import World
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.data import sources
from dicedist.runs import checkpoint, resume
from dicedist.runs.run import Run
from dicedist.trainer import Trainer
from dicedist.training.job import Job
from dicedist.training.listeners import Listener

# 12 steps in 4 epochs; records, checkpoints and validations fall on different steps.
TINY = [
    "data=shapes", "data.train_limit=48", "data.test_limit=250", "data.pipeline=torch", "batch_size=16",
    "network=resnet8", "ensemble.size=2",
    "epochs=4", "log.every_steps=4", "checkpoint.every_steps=5", "evaluate.every_epochs=2", "run.name=tiny",
    "tracking=none",
]  # fmt: skip
STEPS = 12
CPU = torch.device("cpu")


def build(run_dir, *overrides, rank=0, world_size=1, device=CPU):
    config = compose_config([*TINY, f"run.dir={run_dir}", *overrides])
    method = Method(config.method)
    needs_w = method.counterpart is not None
    size, replicas = resume.ensemble_size(config), config.ensemble.replicas
    placement = place(world_size, size, needs_w, replicas, ranks_of_w=config.redundancy.ranks)
    source = sources.load(config.data, labels_only=not placement.members_on(rank))
    plan = Plan.of(config, placement.num_members, tuple(source.shape), placement.parts)
    (run_dir / "tiny").mkdir(parents=True, exist_ok=True)
    transfer = FileTransfer(process.group.store.clone()) if process.group else None
    return Trainer(Job(config, method, plan, placement, source), World(rank, world_size, device, transfer))


def train(run_dir, *overrides, after_step=None, rank=0, world_size=1):
    """Trains to the end; True if the run was stopped. after_step is called with the trainer and the steps done."""
    signals._asked = False
    trainer = build(run_dir, *overrides, rank=rank, world_size=world_size)
    if after_step is not None:
        trainer.listeners.append(Calling(trainer, after_step))
    try:
        trainer.train()
    except signals.Stopped:
        return True
    finally:
        signals._asked = False
    return False


class Calling(Listener):
    def __init__(self, trainer, function):
        self.trainer, self.function = trainer, function

    def after_step(self, done, outcome):
        self.function(self.trainer, done)


def asked_after(step):
    return lambda trainer, done: signals.ask() if done == step else None


def failing_after(step):
    def fail(trainer, done):
        if done == step:
            raise RuntimeError("as if a rank had died")

    return fail


def tensors_of(run, step=STEPS):
    path = checkpoint.path_of(Run(run).checkpoints, step)
    return {
        f"{file.stem}/{name}": value
        for file in sorted(path.glob("*.safetensors"))
        if file.stem != checkpoint.RECORDS  # metrics.jsonl up to this step, which may be saved before or after a record
        for name, value in load_file(file).items()
    }


def records_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(run, reference, step=STEPS):
    """Bit for bit: weights, optimizers, memory, and every line of the records."""
    assert_same_tensors(run, reference, step)
    assert (run / "metrics.jsonl").read_text() == (reference / "metrics.jsonl").read_text()


def assert_same_tensors(run, reference, step):
    tensors, expected = tensors_of(run, step), tensors_of(reference, step)
    assert expected and tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []

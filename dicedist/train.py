"""Train an ensemble.

torchrun --nproc_per_node=5 -m dicedist.train                 the paper's main job: CIFAR-100, 4 x ResNet-32, DICE
torchrun --nproc_per_node=5 -m dicedist.train data=shapes     no files needed
python -m dicedist.train ensemble.size=3 method=ceb data=cifar10    everything in one process
"""

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from dicedist import checkpoint, metrics
from dicedist.assessment import BATCH, Assessor
from dicedist.config import Config, compose_config, differences, load_config, save_config, show_help
from dicedist.data import sources
from dicedist.data.order import num_batches
from dicedist.data.pipeline import Loader
from dicedist.evaluate import load_discriminator
from dicedist.exchange import build_exchange
from dicedist.inference import read
from dicedist.objectives import Method
from dicedist.parts import build_hosted, feature_dims
from dicedist.placement import Placement, place
from dicedist.step import Step
from dicedist.tables import table
from dicedist.tracking import Ledger, SilentTracker, Tracker, duration
from dicedist.world import EndedElsewhere, World, command, joined, this_rank, world_size

REPORTER = 0  # the rank that keeps the records and speaks
GO_ON, SAVE, FAULT = 0, 1, 2  # what the ranks agree on at log time; the largest wins


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "train")
        return
    config = compose_config(arguments)
    method = Method(config.method)
    saved = run_folder(config) / "config.yaml"
    if config.ensemble.size == "auto" and config.resume != "never" and saved.exists():
        config.ensemble.size = load_config(saved).ensemble.size  # a run continues on any number of ranks
    placement = place(world_size(), config.ensemble.size, method.redundancy is not None)
    config.ensemble.size = placement.num_members
    source = sources.load(config.data, labels_only=not placement.members_on(this_rank()))
    with joined(config.distributed.timeout) as world:
        Trainer(config, method, placement, source, world).run()


class Trainer:
    def __init__(self, config: Config, method: Method, placement: Placement, source: sources.Source, world: World):
        self.config, self.source, self.world, self.placement = config, source, world, placement
        members = placement.members_on(world.rank)
        self.hosted = build_hosted(
            config, method, members, world.rank == placement.discriminator, placement.num_members,
            source.num_classes, world.device,
        )  # fmt: skip
        self.method, self.feature_dims = method, feature_dims(config, placement.num_members)
        self.exchange = build_exchange(placement, world, method, self.feature_dims, source.num_classes)
        self.loader = Loader(source.train, config.data, source, config.batch_size, config.seed, world.device, members)
        self.steps_per_epoch = num_batches(len(source.train.labels_N), config.batch_size)
        self.total_steps = min(config.epochs * self.steps_per_epoch, config.max_steps or 10**12)
        self.step = Step(config, method, self.hosted, self.exchange, self.steps_per_epoch)
        self.ledger = Ledger()
        self.directory = run_folder(config)
        self.done = self.continue_run()
        self.tracker = (
            Tracker(self.directory, self.total_steps, self.done) if world.rank == REPORTER else SilentTracker()
        )
        self.saved_at, self.saved_step = time.monotonic(), self.done

    def run(self) -> None:
        self.announce()
        while self.done < self.total_steps:
            epoch, start = divmod(self.done, self.steps_per_epoch)
            for batch in self.loader.epoch(epoch, start):
                self.ledger.add(self.done, self.step(batch))
                self.done += 1
                if self.done % self.config.log.every_steps == 0 or self.done == self.total_steps:
                    self.log()
                if self.done == self.total_steps:
                    break
            if (
                self.done == self.total_steps
                or self.done // self.steps_per_epoch % self.config.evaluate.every_epochs == 0
            ):
                self.validate()
        self.save()
        self.loader.close()
        self.assess()
        self.tracker.close()

    def continue_run(self) -> int:
        """The steps already done by a run found in the folder; its parts are restored."""
        found = checkpoint.newest(self.directory) if self.config.resume != "never" else None
        if found is None and self.config.resume == "must":
            raise ValueError(f"resume=must, but {self.directory} has no checkpoint: leave it out to start anew")
        self.exchange.barrier()
        if self.world.rank == REPORTER:
            prepare_folder(self.directory, self.config, found is not None)
        self.exchange.barrier()
        if found is None:
            return 0
        checkpoint.restore(found, self.hosted.parts)
        return found.step

    def log(self) -> None:
        """All ranks: one host synchronisation, the records to rank 0, and an agreement on what comes next."""
        values, fault = self.ledger.drain()
        records = self.exchange.report({"values": values, "fault": fault})
        minutes, steps = self.config.checkpoint.every_minutes, self.config.checkpoint.every_steps
        due = minutes is not None and time.monotonic() - self.saved_at > 60 * minutes
        due |= steps is not None and self.done - self.saved_step >= steps
        wish = FAULT if fault else SAVE if due and self.world.rank == REPORTER else GO_ON
        agreed = self.exchange.any_rank(wish)
        if agreed == FAULT:
            raise_first([record["fault"] for record in records])
        merged = {f"train/{name}": value for record in records for name, value in record["values"].items()}
        if merged:
            losses = [value for name, value in merged.items() if name.endswith("/loss") and "/member_" in name]
            merged["train/members/loss"] = sum(losses) / len(losses)
            self.tracker.log(self.done, self.done / self.steps_per_epoch, merged)
        if agreed == SAVE:
            self.save()

    def validate(self) -> None:
        split = self.source.val
        if len(split.labels_N) == 0:
            return
        readings = read(self.hosted, split, self.source, BATCH, self.world.device)
        shape = (len(split.labels_N), self.source.num_classes)
        logits = self.exchange.collect(
            {member: reading.logits_NK for member, reading in readings.items()}, [shape] * self.placement.num_members
        )
        if logits is not None:
            measures = metrics.validation_measures(torch.stack(logits), split.labels_N)
            named = {f"val/{name}": value for name, value in measures.items()}
            self.tracker.log(self.done, self.done / self.steps_per_epoch, named)

    def assess(self) -> None:
        """The last weights, never the best on test (METHOD decision 20)."""
        config, members = self.config, range(self.placement.num_members)
        found = checkpoint.newest(self.directory)
        assert found is not None
        w = None
        if self.world.rank == REPORTER:
            w = load_discriminator(config, self.method, len(members), self.source.num_classes, found)
        assessor = Assessor(self.hosted, members, self.exchange, self.source, w, self.feature_dims)
        assessor.assess(config.evaluate, config.ood, config.data.root, self.directory, self.tracker.say)

    def save(self) -> None:
        parts = [part for part in self.hosted.parts if part.name != "trunk" or self.answers_for_trunk]
        if self.done != self.saved_step:
            checkpoint.save(self.directory, self.done, parts, self.exchange, self.config.checkpoint.keep)
        self.saved_at, self.saved_step = time.monotonic(), self.done

    @property
    def answers_for_trunk(self) -> bool:
        return self.world.rank == self.placement.member_ranks[0]

    def announce(self) -> None:
        """Who hosts what, what a step sends, and on a CPU how long it will take."""
        mine = {"device": str(self.world.device), "host": self.world.host}
        rows = [
            [rank, record["device"], record["host"], ", ".join(self.placement.parts_on(rank))]
            for rank, record in enumerate(self.exchange.report(mine))
        ]
        self.tracker.say(table(["rank", "device", "host", "parts"], rows))
        sent = self.exchange.bytes_per_step(self.config.batch_size)
        named = " + ".join(f"{name} {size:,}" for name, size in sent.items()) or "nothing"
        self.tracker.say(f"a step sends {named} = {sum(sent.values()):,} bytes")
        config, left = self.config, self.total_steps - self.done
        ensemble = f"{self.placement.num_members} x {config.network.name} ({config.structure})"
        self.tracker.say(
            f"{config.method.name} on {config.data.name}: {ensemble}, {len(self.source.train):,} images, "
            f"{left:,} steps to go -> {self.directory}"
        )
        if self.world.device.type == "cpu":
            seconds = self.estimate() * left
            self.tracker.say(f"on this CPU that takes about {duration(seconds)}")

    def estimate(self) -> float:
        """Seconds a step, from one forward and backward pass of a copy, on all ranks at once as in training."""
        size = self.source.size
        images = torch.zeros(self.config.batch_size, 3, size, size).to(memory_format=torch.channels_last)
        copies = [copy.deepcopy(part.module) for part in [*self.hosted.members.values()][:1]]
        trunk = copy.deepcopy(self.hosted.trunk.module) if self.hosted.trunk else torch.nn.Identity()
        self.exchange.barrier()
        started = time.monotonic()
        for member in copies:
            member(trunk(images)).sum().backward()
        seconds = (time.monotonic() - started) * max(1, len(self.hosted.members))
        return self.exchange.any_rank(round(1000 * seconds)) / 1000


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def prepare_folder(directory: Path, config: Config, continues: bool) -> None:
    """Rank 0: a run is only ever continued by its own config, and never overwritten."""
    directory.mkdir(parents=True, exist_ok=True)
    saved = directory / "config.yaml"
    if continues and (changed := differences(load_config(saved), config)):
        raise ValueError(f"{directory} was trained with another config ({'; '.join(changed)}): choose another run.name")
    if config.resume == "never" and (directory / "metrics.jsonl").exists():
        raise ValueError(
            f"{directory} holds a run already: choose another run.name, or leave out resume=never to continue it"
        )
    save_config(config, saved)


def raise_first(faults: list[str | None]) -> NoReturn:
    """On rank 0 the fault of whoever had one; the others received no records and just end."""
    told = [fault for fault in faults if fault]
    raise ValueError(told[0]) if told else EndedElsewhere


if __name__ == "__main__":
    command(run)

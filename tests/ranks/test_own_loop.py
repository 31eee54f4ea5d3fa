"""The distributed loops of the documentation, in plain process groups and inside Fabric, equal those of one process."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric

from dicedist import DistributedRedundancy
from dicedist.benchmarks import processes
from tests.support.pages import code_of, names_of
from tests.support.processes import detached

STEPS = 3


def trained(parts):
    """The weights after the loop: of this rank's members, and of w where it lives."""
    redundancy, members, _ = parts
    weights = {f"{number}.{name}": v for number, member in members.items() for name, v in member.state_dict().items()}
    if redundancy.own is not None:
        weights |= {f"w.{name}": value for name, value in redundancy.own.discriminator.state_dict().items()}
    return {name: value.detach().clone() for name, value in weights.items()}


def in_plain_group(rank, world_size):
    torch.set_num_threads(1)
    page = names_of("own-loop.md", blocks=2)
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parts = page.build()
    for n in range(STEPS):
        torch.manual_seed(n)
        page.distributed_step(n, *parts, torch.randn(32, 3, 16, 16), torch.randint(page.K, (32,)), beta=3.0)
    parts[0].check()
    return detached(trained(parts)) if world_size > 1 else trained(parts)


def inside_fabric(rank, world_size):
    torch.set_num_threads(1)
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size)}
    page = names_of("own-loop.md", blocks=3)
    return detached(trained(page.train_with(Fabric(accelerator="cpu", devices=world_size, strategy="ddp"), STEPS)))


@pytest.fixture(scope="module")
def alone():
    return in_plain_group(0, 1)


@pytest.mark.parametrize(
    ("loop", "ranks"), [(in_plain_group, 2), (in_plain_group, 3), (in_plain_group, 4), (inside_fabric, 2)]
)
def test_ranks_train_what_one_process_trains(alone, loop, ranks):
    found = processes.run_ranks(ranks, loop, ranks)
    merged = {name: value for weights in found for name, value in weights.items()}
    assert sum(map(len, found)) == len(merged) == len(alone)
    assert [name for name, value in alone.items() if not torch.equal(value, merged[name])] == []


def test_it_is_the_loop_of_one_process(alone):
    """The same members and noise, with `ConditionalRedundancy` in the one-process loop of the page."""
    page = names_of("own-loop.md")
    for number, member in enumerate(page.members):
        torch.manual_seed(number)
        member.load_state_dict(page.Member().state_dict())
        member.forward = keyed(member, number)
    page.optimizer.param_groups[0]["weight_decay"] = 0
    for n in range(STEPS):
        torch.manual_seed(n)
        images, labels = torch.randn(32, 3, 16, 16), torch.randint(page.K, (32,))
        keyed.step = n
        page.step(images, labels, beta=3.0)
    for number, member in enumerate(page.members):
        for name, value in member.state_dict().items():
            assert value.equal(alone[f"{number}.{name}"]), name
    for name, value in page.redundancy.discriminator.state_dict().items():
        assert value.equal(alone[f"w.{name}"]), name


def keyed(member, number):
    plain = member.forward

    def forward(images):
        torch.manual_seed(1000 * keyed.step + number)
        return plain(images)

    return forward


def out_of_step(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    redundancy = DistributedRedundancy(2, 4, 3, 0.1)
    labels = torch.arange(6) % 3
    means = {number: torch.randn(6, 4, requires_grad=True) for number in redundancy.members}
    redundancy(means, means, labels if rank else labels.roll(1))
    try:
        redundancy.check()
    except ValueError as error:
        return str(error)


def test_a_member_with_another_batch_is_named():
    first, second = processes.run_ranks(2, out_of_step)
    assert first is None
    assert second == "members [0] saw other batches than the discriminator: give all ranks the same ones"


def test_the_page_runs_as_it_stands():
    """In four processes, which torchrun would start: the script makes its group, trains and leaves."""
    processes.run_ranks(4, run_page)


def run_page(rank):
    torch.set_num_threads(1)
    names_of("own-loop.md", blocks=2, name="__main__")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_fabric_starts_the_processes(tmp_path):
    first, second, third = code_of("own-loop.md")
    script = "\n".join([first, second.partition("if __name__")[0], third])
    (tmp_path / "loop.py").write_text(f"{script}    print('trained')\n")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("trained") == 4, done.stderr


def too_many(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with pytest.raises(ValueError, match="4 ranks are too many for 2 members and a discriminator: start 3"):
        DistributedRedundancy(2, 4, 3, 0.1)
    dist.barrier()  # the first rank keeps the store until all have joined
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("means", "scales", "line"),
    [
        ({0: (6, 4)}, {0: (6, 4), 1: (6, 4)}, r"the means of member 1 are missing: give \[6, 4\] on this rank"),
        ({0: (6, 4), 1: (6, 5)}, None, r"the means of member 1 are \[6, 5\]: give \[6, 4\]|the scales of member 0"),
        ({0: (6, 4), 1: (6, 4)}, None, r"the scales of member 0 are missing"),
    ],
)
def test_refusals(means, scales, line):
    given = [None if shapes is None else {k: torch.ones(*v) for k, v in shapes.items()} for shapes in (means, scales)]
    with pytest.raises(ValueError, match=line):
        DistributedRedundancy(2, 4, 3, 0.1)(*given, torch.arange(6) % 3)


def test_more_ranks_than_parts():
    processes.run_ranks(4, too_many)


def test_deterministic_members_send_no_scales():
    redundancy = DistributedRedundancy(2, 4, 3, 0.1, scales=False, scale="one")
    means = {number: torch.randn(6, 4, requires_grad=True) for number in range(2)}
    redundancy(means, None, torch.arange(6) % 3).backward()
    assert means[0].grad.abs().sum() > 0 and redundancy.exchange.features == ("mean",)

"""Every source of the user's own data: stopped anywhere a run equals one that was not, and so do 1, 2 and 3 ranks."""

import random

import numpy as np
import pytest
import torch

from dicedist.data import __main__ as command
from tests.support.photographs import CLASSES, photograph
from tests.support.processes import run_ranks
from tests.support.tiny import asked_after, assert_same_run, tensors_of, train

STEPS = 4
SOURCES = {
    "files": ["data=files", "data.root={images}", "data.size=16", "network=resnet8"],
    "list": ["data=files", "data.root={images}/list.csv", "data.size=16", "network=resnet8", "data.balance=true"],
    "shards": ["data=shards", "data.root={images}/packed", "data.size=16", "network=resnet8"],
    "vectors": ["data=vectors", "data.root={images}/table.npz", "network=mlp", "network.width=16", "network.inputs=5"],
    "own": [
        "data=own",
        "data._target_=tests.support.leaves.Leaves",
        "data.trusted=true",
        "data.root=40",
        "data.size=16",
    ],
}
SMALL = [
    "data.num_threads=2", "data.per_member=true", "epochs=2", f"max_steps={STEPS}", "evaluate.train_images=8",
    "redundancy.num_steps=1", "redundancy.num_samples=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    rows = ["path,label,split"]
    for split, each in (("train", 14), ("test", 3)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for place in range(each):
                photograph(rng, root / split / name / f"{place}.jpg", *rng.integers(20, 40, 2).tolist())
                rows.append(f"{split}/{name}/{place}.jpg,{name},{split}")
    (root / "list.csv").write_text("\n".join(rows))
    command.run(["pack", str(root), str(root / "packed"), "images=20"])
    np.savez(root / "table.npz", x=rng.normal(size=(60, 5)), y=np.arange(60) % 3)
    return root


def train_on_rank(rank, world_size, run_dir, overrides):
    train(run_dir, *overrides, rank=rank, world_size=world_size)


@pytest.mark.parametrize("kind", SOURCES)
def test_stops_and_ranks_change_nothing(tmp_path, images, kind):
    given = [*(word.format(images=images) for word in SOURCES[kind]), *SMALL]
    stop = random.SystemRandom().randrange(1, STEPS)
    train(tmp_path / "one", *given)
    assert train(tmp_path / "parts", *given, after_step=asked_after(stop)), stop
    train(tmp_path / "parts", *given)
    assert_same_run(tmp_path / "parts" / "tiny", tmp_path / "one" / "tiny", STEPS)
    expected = tensors_of(tmp_path / "one" / "tiny", STEPS)
    for ranks in (2, 3):
        run_ranks(ranks, train_on_rank, ranks, tmp_path / str(ranks), given)
        found = tensors_of(tmp_path / str(ranks) / "tiny", STEPS)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")

"""`bench files`: the other side sees the very crops that ours does, and the figures of a small one can be had."""

import dataclasses

import pytest
import torch

from dicedist.benchmarks import files
from dicedist.data.pipeline import Loader
from dicedist.data.sources import load

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path, data_config, fresh_home):
    files.generate(tmp_path / "photographs", 60)
    return data_config("files", root=str(tmp_path / "photographs"), size=64, split="full", pipeline="torch")


def test_both_sides_decode_the_same_crops(config):
    source = load(config)
    theirs = files.image_folder(source, config, 16)
    ours = Loader(source.train, config, source, 16, 0, CPU, [0])
    levels = 255 * torch.tensor(source.std).view(3, 1, 1)
    for epoch in range(2):
        for batch, (images_BCHW, labels_B) in zip(ours.epoch(epoch), theirs, strict=True):
            assert labels_B.equal(batch.labels_B)
            assert ((images_BCHW - batch.images[0]).abs() * levels).max() < 1.01  # levels of 255
    sizes = {size for side in source.train.inputs_R.sizes_R2.tolist() for size in side}
    assert len(sizes) > 40 and min(sizes) >= files.SIDES[0] and max(sizes) < files.SIDES[1]


class Asked:
    """The near end of a pipe: what a process of the benchmark is asked, and what it answers."""

    def __init__(self, *questions):
        self.questions, self.answers = list(questions), []

    def recv(self):
        if not self.questions:
            raise EOFError
        return self.questions.pop(0)

    def send(self, answer):
        self.answers.append(answer)


@pytest.mark.parametrize("theirs", [True, False])
def test_a_process_answers(config, monkeypatch, theirs):
    monkeypatch.setattr(files, "SPELL", 0.01)
    end = Asked("images/s", *([] if theirs else [files.PEAK]))
    files.serve(theirs, dataclasses.replace(config, num_threads=1), 8, end)
    speed, *peak = end.answers
    assert speed > 0 and (theirs or peak[0] > 50)
    assert len(files.paths_of(load(config))) == 48

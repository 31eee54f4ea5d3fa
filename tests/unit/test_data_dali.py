"""DALI's pipelines for a GPU, as far as they can be built without one: DALI takes and serializes their graphs.

DALI opens no pipeline of a GPU without a driver. It does take operators for a GPU into a pipeline without a device: it
looks up each of them, its arguments and where its inputs lie, and refuses to serialize what does not fit together.
"""

import re

import pytest
import torch

from dicedist.data import sources

dali = pytest.importorskip("dicedist.data.dali", reason="DALI has wheels for Linux only")
GPU, MIXED = b"\x03gpu", b"\x05mixed"  # words of a serialized graph, behind their lengths
OPERATOR = re.compile(rb"__([A-Za-z]+(?:__[A-Za-z]+)*)_\d+")


class Unopened(dali.Pipeline):
    """For the device that it was asked for, serialized in place of built."""

    def __init__(self, batch_size, num_threads, device_id, **options):
        super().__init__(batch_size, num_threads, None, **options)
        self.asked_for, self.serialized = device_id, b""

    def build(self):
        self.serialized = self.serialize()


@pytest.fixture
def built(monkeypatch, data_config):
    monkeypatch.setattr(dali, "Pipeline", Unopened)

    def make(kind, device):
        config = data_config("shapes", train_limit=16)
        return kind(config, sources.load(config), 4, torch.device(device)).pipe

    return make


def test_the_graph_of_a_gpu_is_that_of_the_cpu(built):
    gpu, cpu = built(dali.DaliPipeline, "cuda:3"), built(dali.DaliPipeline, "cpu")
    assert gpu.asked_for == 3 and cpu.asked_for is None
    names = [set(OPERATOR.findall(pipe.serialized)) for pipe in (gpu, cpu)]
    assert names[0] == names[1] and any(b"CropMirrorNormalize" in name for name in names[0])
    assert GPU in gpu.serialized and GPU not in cpu.serialized and MIXED not in gpu.serialized


def test_boxes_of_images_are_decoded_and_resized_on_the_gpu(built):
    """On a CPU only decoded: torch does the rest there."""
    gpu, cpu = built(dali.DaliDecoder, "cuda:3"), built(dali.DaliBoxes, "cpu")
    assert gpu.asked_for == 3 and cpu.asked_for is None
    assert GPU in gpu.serialized and MIXED in gpu.serialized and b"CropMirrorNormalize" in gpu.serialized
    assert GPU not in cpu.serialized and MIXED not in cpu.serialized and b"Resize" not in cpu.serialized


def test_a_folder_is_decoded_on_the_gpu_of_the_rank(monkeypatch):
    monkeypatch.setattr(dali, "Pipeline", Unopened)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    pipe = dali._decoder(iter(()), 4, 32, 1)
    assert pipe.asked_for == 2 and MIXED in pipe.serialized


def test_a_graph_that_a_gpu_cannot_run_is_refused(built, monkeypatch):
    """An operator's input on the GPU for which it wants the host: DALI says so when the graph is serialized."""
    normalized = dali.DaliPipeline.normalized

    def flips_on_the_gpu(self, images, flips, **crop):
        return normalized(self, images, flips.gpu(), **crop)

    monkeypatch.setattr(dali.DaliPipeline, "normalized", flips_on_the_gpu)
    with pytest.raises((RuntimeError, TypeError, ValueError), match="(?i)gpu"):
        built(dali.DaliPipeline, "cuda:0")

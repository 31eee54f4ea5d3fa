"""The forward pass of the step on a CUDA device that does not exist: fake tensors refuse to mix devices."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dicedist.algorithm import build, discriminator, step
from dicedist.algorithm.batch import Batch
from dicedist.benchmarks.step import bench_step
from dicedist.cluster.world import World
from tests.support.steps import configured

CUDA = torch.device("cuda", 0)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Tensors without values on a device without a driver; draws from its generators become plain draws."""
    # Autograd counts devices at its first use: with a fake one among them, tests could no longer fork ranks.
    torch.ones(1, requires_grad=True).sum().backward()

    def draws_from_none(function):
        return lambda *arguments, generator=None, **named: function(*arguments, **named)

    networks = build.weightless(configured(3), 3)  # on the meta device, which cannot be mixed with a fake mode
    for module in (discriminator, step):
        monkeypatch.setattr(module, "generator", lambda device, *key: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    for name in ("rand", "randn", "randint", "randperm"):
        monkeypatch.setattr(torch, name, draws_from_none(getattr(torch, name)))
    monkeypatch.setattr(build, "weightless", lambda *_: networks)
    with FakeTensorMode():
        yield


@pytest.mark.parametrize("overrides", [(), ("redundancy.terms=both",), ("redundancy.max_pairs=2",), ("method=cebr",)])
def test_members_and_discriminator_stay_on_their_device(fake_cuda, overrides):
    with CUDA:  # weights are made there, because fake ones cannot be moved
        one = bench_step(configured(3, *overrides), World(0, 1, CUDA), 10)
    labels = torch.randint(10, (8,), device=CUDA)
    batch = Batch(0, 0, 8, slice(None), labels, labels, 0, [torch.empty(8, 3, 16, 16, device=CUDA)])
    encodings = one.encode(batch)
    gathered = one.exchange.gather(one.fields(encodings), 8, torch.zeros(1, dtype=torch.int64, device=CUDA))
    features = one.features(gathered)
    now, w = one.schedules.at(0.5), one.hosted.w
    draws = SimpleNamespace(device=CUDA)
    classes = w.classes(labels)
    terms = w.redundancy(features.means_MBD, features.scales_MBD, classes, w.pairs_P2, now, draws)
    assert all(term.device == CUDA for term in terms.values())
    compared = w.compare(features.means_MBD, features.scales_MBD, classes, w.pairs_P2, 4, now, draws)
    assert w.cross_entropy(w.logits(compared), *compared.targets()).device == CUDA
    w.memory.write(features.means_MBD.detach(), features.scales_MBD.detach(), classes)
    for view in one.views(encodings, one.fields(encodings), gathered, labels):
        assert all(part.device == CUDA for part in one.method.losses(view, now).values())


def test_a_tensor_left_on_the_cpu_is_caught(fake_cuda):
    with pytest.raises(RuntimeError, match="same device"):
        torch.empty(2, device=CUDA) + torch.empty(2)

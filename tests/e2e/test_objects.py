"""Training from Python objects: networks, datasets and methods that the caller already has."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import dicedist
from dicedist.algorithm.objectives import Method
from dicedist.config import compose_config, targets
from dicedist.data.given import Given
from dicedist.data.sources import load
from tests.support.own import Apart, Bottled, Features, Squares
from tests.support.tiny import TINY

SHORT = {"batch_size": 24, "tracking": "none", "max_steps": 4, "log.every_steps": 1}


@pytest.fixture
def settings(tmp_path):
    return {**SHORT, "run.dir": str(tmp_path)}


def records(run):
    return [{name: value for name, value in record.items() if name != "time"} for record in run.records()]


def test_a_network_a_dataset_and_a_method(settings):
    settings |= {"max_steps": 12, "checkpoint.best": "val/accuracy"}
    call = dict(model=Features, train=Squares(), val=Squares(48, 1), test=Squares(48, 2), size=2, **settings)
    run = dicedist.fit(method=Apart(0.2), **call)
    assert {"train/member_0/apart", "train/member_1/apart"} <= run.records()[0].keys()
    assert run.results["ensemble"]["accuracy"] >= 0 and run.config().data.split == "given"
    assert run.ensemble().predict(torch.rand(2, 3, 16, 16)).names[0] in Squares.classes
    assert dicedist.fit(method=Apart(0.2), **call).records() == run.records()  # it is finished
    ranks = dicedist.fit(method=Apart(0.2), nproc=2, **call, **{"run.name": "ranks"})
    assert ranks.results["step"] == run.results["step"] == run.checkpoint(which="best").step
    for one, other in zip(records(run), records(ranks), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_network_of_a_notebook_is_asked_for_again(settings):
    class Local(Features):
        pass

    run = dicedist.fit(model=Local, train=Squares(), val=0.25, size=2, method="ceb", **settings)
    assert run.config().network._target_.startswith("python:")
    targets._handed_over.clear()  # a new session
    with pytest.raises(ValueError, match="was handed over in Python: hand it over again"):
        run.ensemble()
    assert len(dicedist.Ensemble.load(run.directory, model=Local)) == len(run.ensemble(model=Local)) == 2
    with pytest.raises(ValueError, match="other processes can import"):
        dicedist.fit(model=Local, train=Squares(), nproc=2, **settings, **{"run.name": "other"})


@pytest.mark.filterwarnings("error:.*meta parameter")
def test_heads_on_a_backbone_of_ones_own_keep_its_weights(settings):
    trained = Features().state_dict()

    def backbone():
        network = Features()
        network.load_state_dict(trained)
        return network

    settings |= {"data.size": 16, "optimizer.warmup_epochs": 0, "data.val_limit": None}
    run = dicedist.fit("recipe=heads", model=backbone, train=Squares(), val=0.25, method="ind", size=2, **settings)
    kept = run.ensemble(model=backbone).state_dict()
    for name, tensor in trained.items():
        assert sum(key.endswith(name) and torch.equal(tensor, found) for key, found in kept.items()) == 1
    assert run.config().network.pretrained is None is run.config().data.val_limit


@pytest.mark.parametrize("form", ["dataset", "loader", "subset", "arrays", "tensors", "uint8"])
def test_forms_of_data_are_the_same_data(form):
    data = Squares()
    forms = {
        "dataset": data,
        "loader": DataLoader(data, batch_size=5),
        "subset": Subset(data, range(len(data))),
        "arrays": (data.images, np.array(data.targets)),
        "tensors": (torch.from_numpy(data.images), torch.tensor(data.targets)),
        "uint8": (np.round(data.images * 255).astype(np.uint8).transpose(0, 2, 3, 1), data.targets),
    }
    given = Given(forms[form], None, None)
    targets.hand_over(given, f"python:{form}")
    words = ["data=own", f"data._target_=python:{form}", f"data.size={given.side()}", "data.val_fraction=0.25"]
    source = load(compose_config(words).data)
    expected = torch.from_numpy(np.round(data.images * 255)).to(torch.uint8).permute(0, 2, 3, 1)
    seen = torch.cat([split.images_NHWC for split in (source.train, source.val, source.test)])
    assert len(seen) == len(data) and sorted(map(bytes, seen.numpy())) == sorted(map(bytes, expected.numpy()))
    counts = torch.tensor(data.targets).bincount()
    assert (source.test.labels_N.bincount() == (counts * 0.2).round()).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": (np.zeros((8, 3, 16, 16)) - 1, [0, 1] * 4)}, "values outside 0..1"),
        ({"train": np.zeros((8, 16))}, "train=ndarray: give a Dataset"),
        ({"train": (np.zeros((8, 16)), [0, 1])}, "8 inputs and classes \\[2\\]: give one for each"),
        ({"val": Squares()}, "give the training set, too"),
        ({"model": lambda: nn.Conv2d(3, 4, 3)}, "returns \\[2, 4, 14, 14\\] for 2 inputs: return features"),
        ({"model": lambda: nn.Linear(3, 4)}, "does not take inputs of shape \\[3, 16, 16\\]"),
        ({"model": lambda: 3}, "returns int: return a torch.nn.Module"),
        ({"model": Features()}, "model is a Features: give a name, or a function that builds a new network"),
        ({"model": 3}, "model is a int: give a name, or a function"),
        ({"train": (np.zeros((8, 3, 16, 16)), [0] * 8)}, "all training inputs are of the class 0: give at least two"),
        ({"train": (np.zeros((8, 3, 16, 16)), [0.5] * 8)}, "train\\[0\\] has the class '0.5'|train.labels are float64"),
        (
            {"train": (np.zeros((8, 3, 16, 16)), [-1, 0] * 4)},
            "train.labels are int64 \\[8\\]: give a whole number from 0",
        ),
        ({"train": [(np.zeros(4),)] * 8}, "train\\[0\\] is a group of 1, no pair"),
        ({"nproc": 0}, "nproc 0: write a number above 0"),
        ({"method": Bottled()}, "defines prior_rows"),
        ({"method": Features}, "is not a term: derive it from dicedist.Objective"),
    ],
)
def test_what_cannot_be_used_is_one_line(given, words, settings):
    call = {"train": Squares(), "model": Features, "size": 2} | given
    if "val" in given:
        call.pop("train")
    with pytest.raises(ValueError, match=words) as raised:
        dicedist.fit(**call, **settings)
    assert "\n" not in str(raised.value)


def test_objects_have_names():
    with pytest.raises(ValueError, match="fit was given a Squares without a name: write fit\\(model="):
        dicedist.fit(Squares())


def test_a_network_that_returns_nan_is_one_line(settings):
    class Broken(Features):
        def forward(self, images):
            return super().forward(images) * float("nan")

    with pytest.raises(ValueError, match="became nan at step 0") as raised:
        dicedist.fit(model=Broken, train=Squares(), size=2, **settings)
    assert "\n" not in str(raised.value)


def test_a_method_of_ones_own_over_ranks(tmp_path):
    words = [
        *TINY,
        "network=resnet8",
        "method=ind",
        "method._target_=tests.support.own.Apart",
        "method.options={weight: 0.5}",
    ]
    with pytest.raises(ValueError, match="method._target_=tests.support.own.Apart runs its code: add method.trusted"):
        Method.to_train(compose_config(words).method)
    run = dicedist.fit(*words, "method.trusted=true", "max_steps=2", f"run.dir={tmp_path}", nproc=2)
    assert run.records()[0]["train/member_1/apart"] > 0
    assert len(run.ensemble()) == 2, "prediction needs no code of the method"
    assert run.config().method.label == "Ind. + Apart" and not run.config().method.trusted


def test_the_own_split_is_of_own_data_only():
    with pytest.raises(ValueError, match="data.split=given: only data=own has"):
        compose_config(["data=shapes", "data.split=given"])

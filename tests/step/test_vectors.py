"""Vectors through every command: training that resumes bit for bit, evaluation, report, prediction and export."""

import json
import re

import numpy as np
import pytest
import torch

from dicedist import evaluate, export, predict, report, train
from dicedist.algorithm import build
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.evaluation.ensemble import Ensemble
from dicedist.evaluation.loading import load_ensemble
from tests.support import CHECKOUT, tiny
from tests.support.steps import batch_at, build_step

VECTORS = [
    "data=digits", "data.train_limit=48", "network.width=16", "network.dropout=0.3", "data.noise=0.1",
    "redundancy.num_samples=1", "redundancy.num_steps=1",
]  # fmt: skip
TINY = [key for key in tiny.TINY if not key.startswith(("data", "network"))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    train.run([*TINY, *VECTORS, f"run.dir={folder}"])
    return folder / "tiny"


TRITON = {"TYPE_FP32": torch.float32, "TYPE_INT64": torch.int64, "TYPE_BOOL": torch.bool}
TENSOR = re.compile(r'name: "(\w+)" data_type: (\w+) dims: \[ ([\d, ]+) \]( reshape \{ shape: \[ \] \})?')


def test_the_page_on_serving_tells_triton_what_the_graph_is(run):
    """An export to ONNX names its input `images`, and its outputs as the ensemble does."""
    answers = load_ensemble(run)(torch.zeros(5, 64))
    (images, *outputs) = TENSOR.findall((CHECKOUT / "docs/serving.md").read_text())
    assert images == ("images", "TYPE_FP32", "64", "") and len(outputs) == 7
    for name, kind, dims, reshaped in outputs:
        shape = () if reshaped else tuple(map(int, dims.split(",")))
        assert (answers[name].dtype, tuple(answers[name].shape[1:])) == (TRITON[kind], shape), name


def test_resumed_equals_uninterrupted(tmp_path):
    """With dropout and noise, which are drawn by step and member."""
    overrides = [*VECTORS, "network=mlp", "network.inputs=64", "structure=branch"]
    tiny.train(tmp_path / "whole", *overrides)
    assert tiny.train(tmp_path / "parts", *overrides, after_step=tiny.asked_after(7))
    tiny.train(tmp_path / "parts", *overrides)
    tiny.assert_same_run(tmp_path / "parts" / "tiny", tmp_path / "whole" / "tiny")


def test_members_drop_other_values_and_the_same_at_the_same_step():
    config = compose_config(["method=ind", "ensemble.size=2", *VECTORS, "network.inputs=64"])
    step, batch = build_step(config), batch_at(1, width=64)
    for part in step.hosted.members.values():  # the same weights: only what is dropped differs
        part.module.load_state_dict(step.hosted.member(0).state_dict())
    first, again = step.encoders.encode(batch), step.encoders.encode(batch)
    assert first[0].mean_BD.equal(again[0].mean_BD) and first[1].mean_BD.equal(again[1].mean_BD)
    assert not first[0].mean_BD.equal(first[1].mean_BD)


def test_it_is_evaluated_and_drawn_without_images(run, tmp_path, capsys):
    result = json.loads((run / "evaluation.json").read_text())
    assert len(result["class_names"]) == 10 and result["num_inputs"] > 300
    assert not (run / "gallery.safetensors").exists()
    page = (run / "report.html").read_text()
    assert 'id="classes"' in page and 'id="gallery"' not in page
    outside = np.random.default_rng(0).normal(0, 30, (50, 64)).astype(np.float32)
    np.savez(tmp_path / "far.npz", x=outside)
    evaluate.run([f"run={run}", f"output={tmp_path / 'more'}", f"ood.sets.far={tmp_path / 'far.npz'}", "estimator=own"])
    found = json.loads((tmp_path / "more" / "evaluation.json").read_text())
    assert found["ensemble"] == pytest.approx(result["ensemble"]) and "far" in found["ood"]
    report.run([str(run), f"output={tmp_path / 'page.html'}"])
    np.savez(tmp_path / "narrow.npz", x=outside[:, :9])
    with pytest.raises(ValueError, match="vectors of 9 values, the training data of 64"):
        evaluate.run([f"run={run}", f"ood.sets.narrow={tmp_path / 'narrow.npz'}"])


def test_predictions_are_those_of_the_evaluation(run, tmp_path):
    from safetensors.torch import load_file

    from dicedist.data import sources
    from dicedist.runs.run import Run

    test = sources.load(Run.open(run).config().data).test
    x = test.take(torch.arange(len(test))).numpy()
    np.savez(tmp_path / "some.npz", x=x[:30])
    header = ",".join(f"p{place}" for place in range(64))
    np.savetxt(tmp_path / "more.csv", x[30:40], delimiter=",", header=header, comments="")
    files = [str(tmp_path / "some.npz"), str(tmp_path / "more.csv")]
    predict.run([f"run={run}", *files, "format=jsonl", f"output={tmp_path / 'said.jsonl'}", "batch_size=7"])
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    expected = load_file(run / "logits.safetensors")["logits"][:, :40].mean(0).argmax(1)
    assert [int(row["label"]) for row in said] == expected.tolist()
    assert said[35]["path"] == f"{files[1]}:5"
    predict.run([f"run={run}", files[0], f"output={tmp_path / 'table.txt'}"])
    assert (tmp_path / "table.txt").read_text().count("\n") == 31
    np.savez(tmp_path / "narrow.npz", x=x[:, :9])
    with pytest.raises(ValueError, match=r"takes float \[N, 64\]"):
        predict.run([f"run={run}", str(tmp_path / "narrow.npz")])


def test_columns_of_a_table_are_found_by_name(tmp_path, capsys):
    """In training, prediction, exports and OOD sets; what lacks one is refused before any work."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (60, 3))
    rows = {"a": x[:, 0], "b": 10 * x[:, 1], "c": x[:, 2] + 5, "kind": np.where(x[:, 0] > 0, "yes", "no")}

    def write(path, names):
        lines = [",".join(str(rows[name][row]) for name in names) for row in range(60)]
        path.write_text("\n".join([",".join(names), *lines]) + "\n")
        return str(path)

    keys = ["data=vectors", f"data.root={write(tmp_path / 'all.csv', ['a', 'b', 'c', 'kind'])}", "network.width=8"]
    keys += ["data.label_column=kind", "redundancy.num_steps=1", "data.val_fraction=0.2"]
    train.run([*TINY, *keys, f"run.dir={tmp_path}"])
    run, others = tmp_path / "tiny", write(tmp_path / "others.csv", ["c", "kind", "a", "b"])
    said = []
    for file in (tmp_path / "all.csv", others):
        predict.run([f"run={run}", str(file), "format=jsonl", f"output={tmp_path / 'said.jsonl'}"])
        lines = map(json.loads, (tmp_path / "said.jsonl").read_text().splitlines())
        said.append([(row["label"], row["confidence"]) for row in lines])
    assert said[0] == said[1]
    export.run([f"run={run}", "format=safetensors", f"output={tmp_path / 'it.safetensors'}"])
    exported = Ensemble.load(tmp_path / "it.safetensors")
    assert exported.about.columns == ["a", "b", "c"]
    bare = write(tmp_path / "bare.csv", ["c", "a", "b"])
    torch.testing.assert_close(exported.predict(bare).confidence, load_ensemble(run).predict(bare).confidence)
    narrow = write(tmp_path / "narrow.csv", ["c", "a", "kind"])
    with pytest.raises(ValueError, match="narrow.csv lacks the column b, which the training data"):
        predict.run([f"run={run}", narrow])
    with pytest.raises(ValueError, match="narrow.csv lacks the column b, which the training data"):
        evaluate.run([f"run={run}", f"ood.sets.narrow={narrow}"])
    with pytest.raises(ValueError, match="narrow.csv lacks the column b, which the training data"):
        train.run([*TINY, *keys, "run.name=b", f"run.dir={tmp_path}", f"ood.sets.narrow={narrow}"])


def test_images_as_rows_of_pixels(tmp_path):
    """The same network reads images: trained, evaluated, exported and asked as any network for images."""
    keys = ("network=mlp", "network.width=8", "structure=branch", "data.augment=none", "max_steps=2")
    train.run([*tiny.TINY, *keys, f"run.dir={tmp_path}"])
    ensemble = Ensemble.load(tmp_path / "tiny")
    assert ensemble.about.images != "vectors" and ensemble.about.size == 32
    export.run([f"run={tmp_path / 'tiny'}", "format=safetensors", f"output={tmp_path / 'tiny.safetensors'}"])
    images = torch.randint(256, (5, 32, 32, 3), dtype=torch.uint8)
    exported = Ensemble.load(tmp_path / "tiny.safetensors")
    torch.testing.assert_close(exported(images), ensemble(images))


@pytest.mark.parametrize("format", ["pt2", "safetensors"])
def test_export(run, tmp_path, capsys, format):
    export.run([f"run={run}", f"format={format}", f"output={tmp_path / 'ensemble'}.{format}"])
    assert "test vectors of digits" in capsys.readouterr().out
    ensemble = load_ensemble(run)
    assert (ensemble.about.images, len(ensemble.about.mean)) == ("vectors", 64)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data=digits", "network=resnet8"], "resnet8 reads images, and the data are vectors: write network=mlp"),
        (["data=digits", "network.per_member=[mlp,resnet8]", "ensemble.size=2"], "resnet8 reads images, and the data"),
    ],
)
def test_data_and_network_that_do_not_fit(tmp_path, overrides, line):
    with pytest.raises(ValueError, match=line):
        train.run([*overrides, f"run.dir={tmp_path}", "tracking=none"])


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["network.width=3"], "network.depth is not set: write network=mlp or recipe=heads, which set it"),
        (["network.dropout=0.5"], "network.dropout=0.5: only network=mlp and heads have it, and resnet32 has no head"),
        (["data=digits", "network.depth=1"], "network.depth=1: write a whole number from 2"),
        (["data=digits", "network.dropout=1"], "network.dropout=1.0: write a number from 0 and below 1"),
        (["data=digits", "network.norm=group"], "network.norm=group: write one of batch, layer, none"),
        (["data=digits", "data.noise=-1"], "data.noise=-1.0: write a number from 0"),
        (["data=digits", "data.test_fraction=1"], "data.test_fraction=1.0: write a number between 0 and 1"),
        (["data=vectors"], "data=vectors: write data.root=FILE"),
    ],
)
def test_keys_that_cannot_be(overrides, line):
    with pytest.raises(ValueError, match=line):
        compose_config(overrides)


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_the_halves_of_a_perceptron_are_its_whole(norm):
    config = compose_config(["data=digits", "network.inputs=5", "network.depth=5", f"network.norm={norm}"])
    (network,) = build.weightless(config, Plan.of(config, 1, (5,)))
    assert (len(network.trunk), len(network.tail), network.feature_dim, network.trunk_dim) == (2, 3, 64, 64)
    shapes = [tuple(p.shape) for name, p in network.named_parameters() if name.endswith("1.weight")]
    assert shapes == [(64, 5)] + [(64, 64)] * 4

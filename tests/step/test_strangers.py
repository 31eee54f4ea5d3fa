"""A run or an export that comes from somebody else: nothing of it is executed, called, or written elsewhere."""

import json
import random
import shutil
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dicedist import Ensemble, clean, distill, evaluate, export, trainer
from dicedist.config import compose_config
from dicedist.evaluation.formats import write_safetensors
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs import checkpoint
from dicedist.runs.run import Run
from dicedist.tracking.mlflow.store import files_of
from tests.step.test_results import SETTINGS


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer.train(compose_config([*SETTINGS, f"run.dir={folder}"]))
    return folder / "tiny"


@pytest.fixture
def run(trained, tmp_path):
    return Run(shutil.copytree(trained, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "it.safetensors"
    write_safetensors(load_ensemble(trained), path, None)
    return path


def forged(exported, path, **changes):
    """The same export with another description."""
    with safe_open(exported, "pt") as file:
        about = json.loads(file.metadata()["about"])
    save_file(load_file(exported), path, {"about": json.dumps(about | changes)})
    return path


OPENS_A_DOOR = """
import pathlib
pathlib.Path(__file__).with_name("executed").touch()
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"_target_": "door.Net", "trusted": True}},
        {"options": {"trusted": True}, "target": "door.Net"},
        {"target": "door.Net"},
        {"options": {"name": "timm/resnet18", "pretrained": True}},
        {"networks": ["door.Net", "door.Net"]},
    ],
)
def test_an_export_executes_nothing(exported, tmp_path, monkeypatch, changes):
    (tmp_path / "door.py").write_text(OPENS_A_DOOR)
    monkeypatch.syspath_prepend(tmp_path)
    path = forged(exported, tmp_path / "forged.safetensors", **changes)
    with pytest.raises(ValueError) as error:
        Ensemble.load(path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists() and "door" not in sys.modules


ODD = [None, True, 0, -1, 1.5, 10**30, float("nan"), "", "a", "../..", "\x1b[31m", [], [[]], ["a"], [-1], {}, {"a": 1}]


def test_an_export_with_any_description_loads_or_gives_one_line(exported, tmp_path):
    """Every key of the description, with values of every kind."""
    about, draws = asdict(Ensemble.load(exported).about), random.Random(0)
    places = [(key,) for key in about] + [(key, inner) for key in ("options", "calibration") for inner in about[key]]
    for place in places:
        for value in [*ODD, *draws.sample([10**5, "x" * 10**5, [0] * 10**5, {"_target_": "os.system"}], 2)]:
            changed = {**about, place[0]: value if len(place) == 1 else {**about[place[0]], place[1]: value}}
            try:
                loaded = Ensemble.load(forged(exported, tmp_path / "forged.safetensors", **changed))
                loaded.predict(np.zeros((2, 13), np.float32))
            except ValueError as error:
                assert "\n" not in str(error), (place, value)
            except Exception as error:
                raise AssertionError(f"{place} = {str(value)[:50]}: {type(error).__name__}: {error}") from error


def test_a_network_without_end_is_not_built(run, exported, tmp_path):
    config = run.config()
    for key in ("depth", "width", "feature_dim"):
        run.save_config(replace(config, network=replace(config.network, **{key: 2_000_000})))
        with pytest.raises(ValueError, match="is of another network, method or number of classes"):
            load_ensemble(run)
        with safe_open(exported, "pt") as file:
            options = json.loads(file.metadata()["about"])["options"] | {key: 2_000_000}
        with pytest.raises(ValueError, match="is of another network, method or number of classes"):
            Ensemble.load(forged(exported, tmp_path / "forged.safetensors", options=options))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **more):
        raise AssertionError("a stranger's run made us call")

    monkeypatch.setattr("dicedist.data.sets.shards.copy_remote", refuse)


def test_a_run_decides_neither_whom_we_call_nor_what_we_run(run, tmp_path, no_network, capsys):
    data = replace(run.config().data, name="shards", root="http://127.0.0.1:9/", download=True)
    run.save_config(replace(run.config(), data=data))
    with pytest.raises(
        ValueError, match="the run reads its data from http://127.0.0.1:9/: add data.root=http.* if you"
    ):
        evaluate.run([f"run={run}"])
    with pytest.raises(ValueError, match="add data.root=http"):
        distill.run([f"run={run}", "network=mlp", "max_steps=1", "tracking=none"])
    export.run([f"run={run}", "format=safetensors"])
    assert "random vectors, because shards is not available" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="made us call"):
        evaluate.run([f"run={run}", "data.root=http://127.0.0.1:9/"])  # the user says so


def test_folders_that_are_links_are_refused(run, tmp_path):
    precious = tmp_path / "precious"
    (precious / "step-00000001").mkdir(parents=True)
    shutil.move(run.checkpoints, tmp_path / "aside")
    (run.directory / "checkpoints").symlink_to(precious)
    line = "checkpoints is a link, and nothing is read or written through links in a run's folder"
    for act in (lambda: load_ensemble(run), lambda: evaluate.run([f"run={run}"]), lambda: resumed(run)):
        with pytest.raises(ValueError, match=line):
            act()
    clean.run(["--yes", "checkpoints", str(run.directory.parent)])
    assert [path.name for path in precious.rglob("*")] == ["step-00000001"]
    (run.directory / "checkpoints").unlink()
    shutil.move(tmp_path / "aside", run.directory / "checkpoints")
    for place in ("evaluations", "evaluations/members-0"):
        shutil.rmtree(run.directory / "evaluations", ignore_errors=True)
        (run.directory / place).parent.mkdir(exist_ok=True)
        (run.directory / place).symlink_to(precious)
        with pytest.raises(ValueError, match="evaluations.* is a link"):
            evaluate.run([f"run={run}", "members=[0]"])
        (run.directory / place).unlink()
    assert [path.name for path in precious.rglob("*")] == ["step-00000001"]


def resumed(run):
    trainer.train(compose_config([*SETTINGS, f"run.dir={run.directory.parent}", "max_steps=6"]))


def test_a_draft_that_is_a_link_is_removed(run, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    link = checkpoint.partial(run.checkpoints, 7)
    link.symlink_to(precious)
    checkpoint.discard(run.checkpoints)
    assert not link.is_symlink() and precious.is_dir()


@pytest.mark.parametrize("name", ["../../..", "..", ".", "", "a/../../b", "/etc", "a\0b", "x" * 500])
def test_artifacts_stay_in_the_folder_of_the_store(tmp_path, name):
    place = files_of(f"sqlite:///{tmp_path}/mlflow.db", name)
    assert place.startswith(f"{(tmp_path / 'mlruns').as_uri()}/") and ".." not in place
    assert files_of(f"sqlite:///{tmp_path}/mlflow.db", "dicedist").endswith("/mlruns/dicedist")

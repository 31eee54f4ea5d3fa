"""A student learns what an ensemble predicts: exactly, after a stop as before, and from the same teacher only."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from dicedist import Ensemble, distill, evaluate, export, train
from dicedist.algorithm.objectives.distill import Term, log_mean
from dicedist.config import compose_config
from dicedist.config.words import word, words_of
from dicedist.data import sources
from dicedist.evaluation.teacher import Teacher
from dicedist.runs.run import Run
from tests.support import tiny

VECTORS = ["data=digits", "data.train_limit=48", "data.noise=0.1", "network.width=16", "network.inputs=64"]
BASE = [key for key in tiny.TINY if not key.startswith(("data", "network", "run.name"))]
STUDENT = ["method=distill", "ensemble.size=1", *VECTORS]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    train.run([*BASE, *VECTORS, "method=ind", "ensemble.size=3", f"run.dir={folder}", "run.name=teacher"])
    return folder / "teacher"


def test_every_member_in_one_head_is_the_mean_and_a_constant():
    """Why `target=members` is a branch for each: a mixture over members moves one student as their mean does."""
    draws = torch.Generator().manual_seed(0)
    log_p, students = (torch.randn(*shape, generator=draws, dtype=torch.float64).log_softmax(-1)
                       for shape in ((7, 3, 5), (2, 7, 5)))  # fmt: skip
    mean = log_mean(log_p)
    torch.testing.assert_close(mean.exp(), log_p.exp().mean(1))
    mixture, of_mean = (
        [(p.exp() * (p - q)).sum(-1).view(7, -1).mean(1) for q in other]
        for p, other in ((log_p, students[:, :, None]), (mean, students))
    )
    information = -(mean.exp() * mean).sum(-1) + (log_p.exp() * log_p).sum(-1).mean(1)
    for whole, part in zip(mixture, of_mean, strict=True):
        torch.testing.assert_close(whole - part, information)


def test_the_teacher_predicts_what_its_ensemble_predicts(teacher):
    """Also for students whose inputs are normalized otherwise, as those of pretrained networks are."""
    ensemble = Ensemble.load(teacher)
    config = compose_config([*STUDENT, f"teacher.run={teacher}"])
    plain = sources.load(config.data)
    vectors = plain.test.take(torch.arange(20))
    expected = ensemble.predict(vectors).member_logits
    moved = replace(plain, mean=tuple(x + 1.5 for x in plain.mean), std=tuple(2 * x for x in plain.std))
    for source in (plain, moved):
        taught = Teacher.of(config, source, torch.device("cpu"))
        mean, std = (torch.tensor(values) for values in (source.mean, source.std))
        found = taught((vectors - mean) / std)
        torch.testing.assert_close(found.transpose(0, 1), expected, atol=1e-4, rtol=1e-4)
        assert taught.same == (source is plain) and len(set(taught.digests)) == 3


@pytest.mark.parametrize(
    "options", [(), ("structure=branch", "ensemble.size=3", "method.terms.distill.target=members")]
)
def test_resumed_equals_uninterrupted(tmp_path, teacher, options):
    keys = [*STUDENT, "network=mlp", f"teacher.run={teacher}", "method.terms.distill.labels=0.2", *options]
    tiny.train(tmp_path / "whole", *keys)
    assert tiny.train(tmp_path / "parts", *keys, after_step=tiny.asked_after(7))
    moved = tmp_path / "moved"
    shutil.copytree(teacher, moved)  # a teacher is known by its weights, not by its place
    tiny.train(tmp_path / "parts", *keys, f"teacher.run={moved}")
    tiny.assert_same_run(tmp_path / "parts" / "tiny", tmp_path / "whole" / "tiny")
    kept = Run.open(tmp_path / "parts" / "tiny").plan().teacher_sha256
    assert len(kept) == 3 and len(kept[0]) == 64


def test_another_teacher_is_refused(tmp_path, teacher):
    keys = [*BASE, *STUDENT, f"run.dir={tmp_path}", "run.name=student", "max_steps=2"]
    copy = tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    train.run([*keys, f"teacher.run={copy}"])
    shutil.rmtree(sorted((copy / "checkpoints").iterdir())[-1])  # it is now as it was some steps before
    with pytest.raises(ValueError, match="is not the one that .*student has learned from so far: bring back its check"):
        train.run([*keys, f"teacher.run={copy}", "max_steps=4"])


def test_the_command_leaves_a_run_that_needs_no_teacher(tmp_path, teacher, capsys):
    copy = tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    student = tmp_path / "teacher-distilled-mlp"
    distill.run([f"run={copy}", "network=mlp", "network.width=8", "tracking=none", "log.every_steps=4"])
    assert f"taught by the 3 members of {copy}" in capsys.readouterr().out
    run = Run.open(student)
    config, result = run.config(), run.result()
    assert (config.batch_size, config.epochs, config.data.noise, config.data.train_limit) == (16, 4, 0.1, 48)
    assert (config.ensemble.size, config.network.width, config.method.name) == (1, 8, "distill")
    assert result["member_ids"] == [0] and result["calibration"]["temperature"] > 0
    assert "<svg" in (student / "report.html").read_text()
    shutil.rmtree(copy)
    evaluate.run([f"run={student}", "folds=2"])
    export.run([f"run={student}", f"output={tmp_path / 'student.safetensors'}"])
    vectors = sources.load(config.data).test.take(torch.arange(5)).numpy()
    exported = Ensemble.load(tmp_path / "student.safetensors").predict(vectors)
    torch.testing.assert_close(exported.probabilities, Ensemble.load(student).predict(vectors).probabilities)
    with pytest.raises(ValueError, match="teacher is not a run: it has no config.yaml"):
        distill.run([f"run={copy}", "network=mlp"])


def test_branches_learn_one_member_each(tmp_path, teacher):
    keys = [f"run={teacher}", "network=mlp", "target=members", "tracking=none", f"run.dir={tmp_path}", "max_steps=2"]
    distill.run(keys)
    config = Run.open(tmp_path / "teacher-distilled-mlp-members").config()
    assert (config.structure, config.ensemble.size) == ("branch", 3)
    with pytest.raises(ValueError, match="the teacher has 3 members, so write ensemble.size=3"):
        distill.run([*keys, "ensemble.size=2", "run.name=two"])


def test_keys_as_words():
    config = compose_config(["data=folder", "data.root=/my fotos/[1]", "data.augment=[crop,flip]", "data.size=64",
                             "optimizer.clip_norm=2", "optimizer.betas=[0.8, 0.9]", "epochs=3"])  # fmt: skip
    words = words_of(config, ["data.", "optimizer.", "epochs"], ["data=folder"])
    again = compose_config(["data=folder", *words])
    assert (again.data, again.optimizer, again.epochs) == (config.data, config.optimizer, config.epochs)
    assert len(words) == 6 and word("a", "null") == "a='null'" and word("a", None) == "a=null"


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda t: distill.run([]), "write run=runs/NAME, the run of the teacher, and network=NAME for the student"),
        (lambda t: distill.run([f"run={t}"]), "write network=NAME, the network of the student"),
        (lambda t: distill.run([f"run={t}", "network=mlp", "target=all"]), "target=all: write one of mean, members"),
        (lambda t: train.run([*STUDENT, "tracking=none"]), "learns from the ensemble of a run: write teacher"),
        (lambda t: train.run([*VECTORS, f"teacher.run={t}", "tracking=none"]), "method=dice has no teacher"),
        (lambda t: Term(temperature=0), "distill.temperature=0: write a number above 0"),
        (lambda t: Term(labels=1), "distill.labels=1: write a number from 0 and below 1"),
        (lambda t: Term(target="votes"), "distill.target=votes: write one of mean, members"),
    ],
)  # fmt: skip
def test_refusals(call, line, teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=line):
        call(teacher)


def test_teachers_of_other_things(teacher, tmp_path):
    keys = ["tracking=none", f"run.dir={tmp_path}", "run.name=student", "method=distill", f"teacher.run={teacher}"]
    for other, line in (
        (["data=wine"], "has 10 classes, these data have 3, or the names differ"),
        (["data=shapes", "network=resnet8"], "has 10 classes, these data have 10, or the names differ"),
    ):
        with pytest.raises(ValueError, match=line):
            train.run([*keys, *other])
    np.savez(tmp_path / "wide.npz", x=np.random.default_rng(0).normal(size=(80, 9)), y=np.arange(80) % 10)
    with pytest.raises(ValueError, match=r"takes inputs of shape \[64\], and these data have \[9\]: choose other data"):
        train.run([*keys, "data=vectors", f"data.root={tmp_path / 'wide.npz'}"])


def test_no_code_of_a_teacher_is_run_unless_trusted(tmp_path):
    own = ["network._target_=tests.support.networks.Small", "network.trusted=true", "ensemble.size=2", "max_steps=2"]
    train.run([*tiny.TINY, *own, "method=ind", f"run.dir={tmp_path}", "run.name=own"])
    keys = [f"run={tmp_path / 'own'}", "network=resnet8", "max_steps=2", "tracking=none", "data.pipeline=torch"]
    with pytest.raises(ValueError, match="trusted=true"):
        distill.run(keys)
    distill.run([*keys, "teacher.trusted=true"])
    assert not Run.open(tmp_path / "own-distilled-resnet8").config().teacher.trusted, "no config trusts for another"

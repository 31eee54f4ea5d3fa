"""Protocols: their keys, the commit before the test set is read, and their page."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from torch.nn.functional import one_hot

from dicedist.config import compose_request
from dicedist.config.requests import EvaluateRequest
from dicedist.metrics.selective import aurc
from dicedist.reporting.columns import shift_reading
from dicedist.reporting.comparison import hits_only
from dicedist.reporting.evidence import Comparison, markdown, sections
from dicedist.reporting.page import document
from dicedist.reporting.records import Group, Recorded
from dicedist.reporting.tradeoff import Curve, equal_accuracy
from dicedist.runs.jobs import Job
from dicedist.runs.run import Run
from dicedist.studies import evidence
from dicedist.studies.evidence import Evidence
from dicedist.studies.protocol import commit_of, read_protocol
from tests.support.markup import EVERYTHING, HOSTILE, assert_only_our_markup

TEXT = """
title: Shapes
setting: {data: shapes, network: resnet8, ensemble.size: 2, epochs: 2}
baseline: ind
search: {trials: 3, objective: nll}
seeds: 4
methods:
  ind: {optimizer.lr: "interval(0.03,0.1,log)"}
  plain: {method: dice, optimizer.lr: "choice(0.03,0.1)", bottleneck.log_beta: [[0, 100], [300, 8]]}
curves: {plain: {redundancy.delta: [0, 0.5]}}
curve_seeds: 2
"""


def protocol_in(folder, text=TEXT):
    path = folder / "shapes.yaml"
    path.write_text(text)
    return read_protocol(str(path))


def test_every_method_has_the_same_budget_and_seeds(tmp_path):
    protocol = protocol_in(tmp_path)
    assert protocol.num_runs == {"ind": 3 + 4, "plain": 3 + 4 + 2 * 2}
    plans = [protocol.plan(method, tmp_path) for method in protocol.methods]
    assert {(plan.trials, plan.seed, plan.objectives) for plan in plans} == {(3, 1000, (protocol.objective,))}
    trial = plans[1].check().config
    assert (trial.method.name, trial.seed, trial.evaluate.test) == ("dice", 1000, False)
    assert trial.bottleneck.log_beta == [[0, 100], [300, 8]]
    best = {"ind": {"optimizer.lr": "0.05"}, "plain": {"optimizer.lr": "0.1"}}
    jobs = Evidence(protocol, tmp_path / "runs", 1).jobs(best)
    assert len(jobs) == 8 + 4 and len({job.name for job in jobs}) == 12
    assert [job.name for job in jobs[:3]] == ["ind-seed0", "plain-seed0", "ind-seed1"]
    last = jobs[-1].config
    assert (last.redundancy.delta, last.seed, last.optimizer.lr, last.evaluate.test) == (0.5, 1, 0.1, False)
    assert {trial.tracking.study, last.tracking.study} == {protocol.path.stem}, "one study in trackers"


def test_runs_of_seeds_are_measured_on_shifted_images_once(tmp_path, monkeypatch):
    shift = "seeds: 4\nshift: {shift: corruptions, shift_severities: [1, 3], shift_limit: 20}"
    protocol, queued = protocol_in(tmp_path, TEXT.replace("seeds: 4", shift)), []
    found = Evidence(protocol, tmp_path / "runs", 1)
    monkeypatch.setattr(evidence, "commit_of", lambda path: "0123")
    monkeypatch.setattr(found, "finish", queued.append)
    found.test({"ind": {}, "plain": {}})
    tests, shifted = queued
    assert len(tests) == 8 + 4 and all(job.config.evaluate.test for job in tests)
    assert [job.run.directory for job in shifted] == [job.run.directory for job in tests[:8]], "of the seeds, no curves"
    job = shifted[0]
    assert job.command[:2] == ["dicedist.evaluate", f"run={job.run.directory}"]
    request = compose_request("evaluate", job.command[1:], EvaluateRequest)
    assert (request.shift, request.shift_severities, request.shift_limit) == ("corruptions", [1, 3], 20)
    for result, ended in ((None, False), ({"ensemble": {}}, False), ({"shift": {"corruptions": {}}}, True)):
        monkeypatch.setattr(Job, "result", property(lambda job, result=result: result))
        assert job.finished == ended


def test_measures_of_shifted_images_are_means_over_severities():
    mean = {"0": {"ece": 0.9}, "1": {"ece": 0.1}, "3": {"ece": 0.3}}
    assert shift_reading("ece")({"shift": {"corruptions": {"mean": mean}}}) == pytest.approx(0.2)
    assert shift_reading("ece")({}) is None and shift_reading("nll")({"shift": {"a": {"mean": mean}}}) is None


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("baseline: ind", "baseline: none", "baseline=none is none of its methods"),
        ("seeds: 4", "", "lacks seeds"),
        ("seeds: 4", "seeds: 4\nsede: 1", "sede is no part of a protocol (did you mean seeds?)"),
        ("epochs: 2", "epocs: 2", "epocs: there is no such key (did you mean epochs?)"),
        ('{optimizer.lr: "interval(0.03,0.1,log)"}', "{optimizer.lr: 0.1}", "ind has nothing to search over"),
        ("trials: 3", "trials: 0", "ind names values to search over, and search.trials=0 allows none"),
        ("{plain: {redundancy.delta", "{dice: {redundancy.delta", "curves name dice, which is none of its methods"),
        ("seeds: 4", "seeds: 4\nshift: {shft: rotations}", "shft: there is no such key (did you mean shift?)"),
    ],
)
def test_mistakes_are_told_before_any_run(tmp_path, before, after, line):
    assert before in TEXT
    with pytest.raises(ValueError) as error:
        protocol_in(tmp_path, TEXT.replace(before, after))
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_misspelled_name_is_told_the_nearest():
    with pytest.raises(ValueError, match=r"no such protocol \(did you mean cifar10\?\)"):
        read_protocol("cifar1")


def test_every_protocol_of_the_project_can_be_read():
    from dicedist.config.compose import CONF

    found = sorted(path.stem for path in (CONF / "evidence").glob("*.yaml"))
    assert found and all(read_protocol(name).title for name in found)


def test_a_folder_keeps_the_protocol_that_it_was_begun_with(tmp_path):
    Evidence(protocol_in(tmp_path), tmp_path / "runs", 1)
    with pytest.raises(ValueError, match="begun with another version"):
        Evidence(protocol_in(tmp_path, TEXT.replace("seeds: 4", "seeds: 5")), tmp_path / "runs", 1)


def test_the_test_set_is_not_read_before_the_protocol_is_committed(tmp_path):
    protocol, refusal = protocol_in(tmp_path), "must be committed before the test set is read"
    with pytest.raises(ValueError, match=refusal):
        Evidence(protocol, tmp_path / "runs", 1).test({})
    git(tmp_path, "init", "-q")
    with pytest.raises(ValueError, match=refusal):
        commit_of(protocol.path)
    git(tmp_path, "add", protocol.path.name)
    git(tmp_path, "commit", "-qm", "as decided")
    assert commit_of(protocol.path) == git(tmp_path, "rev-parse", "HEAD")
    protocol.path.write_text(TEXT.replace("seeds: 4", "seeds: 5"))
    with pytest.raises(ValueError, match=refusal):
        commit_of(protocol.path)
    assert not (tmp_path / "runs" / "registration.json").exists()


def git(folder: Path, *words):
    command = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def evaluation(accuracy, ratio=0.5):
    measured = {"accuracy": accuracy, "nll": 1 - accuracy, "ece": 0.1, "brier": 0.3}
    return {
        "ensemble": measured,
        "ensemble_tempered": measured,
        "members": {"accuracy": accuracy - 0.02},
        "diversity": {"ratio_error": ratio},
    }


BASE, OTHER = [0.70, 0.72, 0.71], [0.73, 0.76, 0.73]


def group(label, style, evaluations, folder=None):
    """Return a group of runs with these evaluations, with seeds from 0 on."""
    runs = [Run(f"{folder or label}/{seed}") for seed in range(len(evaluations))]
    return Group(
        label,
        style,
        [
            Recorded(run, SimpleNamespace(seed=seed), None, [], found, {})
            for seed, (run, found) in enumerate(zip(runs, evaluations, strict=True))
        ],
    )


def comparison(folder=None):
    ind = group("ind", 0, [evaluation(a) for a in BASE], folder and folder / "ind")
    dice = group("dice", 2, [evaluation(a) for a in OTHER], folder and folder / "dice")
    chosen = {"ind": {"optimizer.lr": "0.1"}, "dice": {"redundancy.delta": "0.2"}}
    trials = {"ind": {"complete": 3}, "dice": {"complete": 2, "ended early": 1}}
    stops = {
        "0": group("dice, delta 0", 2, [evaluation(0.72, 0.3), evaluation(0.72, 0.5)]),
        "1": group("dice, delta 1", 2, [evaluation(0.61, 0.7), evaluation(0.63, 0.9)]),
    }
    curves = [Curve("dice", 2, "redundancy.delta", stops), Curve("adp", 4, "beta", stops)]
    about = ("Shapes", "Which?", "0123456789abcdef", "ensemble NLL, nats")
    return Comparison(*about, ind, [ind, dice], chosen, trials, curves, 67.0)


def page_of(found):
    return "".join(section.html for section in sections(found))


def test_the_tables_have_means_and_paired_intervals():
    text = markdown(comparison())
    low, high = stats.ttest_rel([100 * v for v in OTHER], [100 * v for v in BASE]).confidence_interval(0.95)
    assert f"+3.00 [{low:+.2f}, {high:+.2f}]" in text
    assert "| ind | 71.00 ± 1.00 |" in text and "6 trials of search" in text and "0123456789" in text
    low, high = stats.ttest_rel([61, 63], [72, 72]).confidence_interval(0.95)
    assert f"| dice, delta 1 to 0 | −10.00 [−{-low:.2f}, +{high:.2f}] |" in text
    page = page_of(comparison())
    assert "<b>+0.400 [+0.400, +0.400]</b>" in page, "the difference of ratio-errors is the same with both seeds"
    assert "2 complete, 1 ended early" in page and "redundancy.delta=0.2" in page


def test_the_interval_over_inputs_is_of_the_logits_that_runs_kept(tmp_path):
    found = comparison(tmp_path)
    labels_N = torch.arange(60) % 3
    for name, num_right in (("ind", 30), ("dice", 45)):
        for seed in range(3):
            told_N = torch.where(torch.arange(60) < num_right, labels_N, (labels_N + 1) % 3)
            logits = {"logits": 9.0 * one_hot(told_N, 3)[None].float(), "labels": labels_N}
            (tmp_path / name / str(seed)).mkdir(parents=True)
            save_file(logits, tmp_path / name / str(seed) / "logits.safetensors")
    interval = re.search(
        r"<b>\+25.00 \[\+(\d+.\d+), \+(\d+.\d+)\]</b>", page_of(found).partition("Over test inputs")[2]
    )
    low, high = map(float, interval.groups())
    spread = 100 * (0.25 * 0.75 / 60) ** 0.5  # of the share of inputs that only DICE gets right
    assert low == pytest.approx(25 - 1.96 * spread, abs=2) and high == pytest.approx(25 + 1.96 * spread, abs=2)


def test_two_columns_have_the_aurc_of_all_classes():
    generator = torch.Generator().manual_seed(0)
    logits_NSK = torch.randn(80, 3, 5, generator=generator, dtype=torch.float64).round()  # rounded, for ties
    log_p_NSK, labels_N = logits_NSK.log_softmax(2), torch.randint(5, (80,), generator=generator)
    columns_NS2 = hits_only(log_p_NSK, labels_N)
    for seed in range(3):
        assert aurc(columns_NS2[:, seed], torch.zeros(80, dtype=torch.long)) == aurc(log_p_NSK[:, seed], labels_N)


def test_no_name_of_a_comparison_becomes_markup():
    plain = comparison()
    found = Comparison(
        EVERYTHING,
        EVERYTHING,
        EVERYTHING,
        EVERYTHING,
        replace(plain.groups[0], label=HOSTILE[0]),
        [replace(one, label=name) for one, name in zip(plain.groups, HOSTILE, strict=False)],
        {name: {EVERYTHING: EVERYTHING} for name in HOSTILE},
        {name: {EVERYTHING: 1} for name in HOSTILE},
        [Curve(name, 2, name, {name + value: one for value, one in plain.curves[0].stops.items()}) for name in HOSTILE],
        67.0,
    )
    shown = assert_only_our_markup(document(found.title, found.about, sections(found)))
    assert EVERYTHING in shown


def test_differences_and_ood_scores_are_drawn():
    found = comparison()
    page = page_of(found)
    assert "Difference of ensemble accuracy" in page and "AUROC of every score" not in page, "no run has an OOD set"
    assert page.count("<figcaption>Difference of ") == 6, "NLL, ECE and Brier before and after T are one figure each"
    kinds = re.findall(r'class="(mark|hollow) [^"]*"[^>]*><title>dice, ECE (before|after) T', page)
    assert kinds == [("hollow", "before"), ("mark", "after")], "as in the figures of reliability"
    for one, auroc in zip(found.groups, (0.6, 0.8), strict=True):
        for of_seed in one.evaluations:
            of_seed["ood"] = {name: {"knn": {"auroc": auroc + shift}} for name, shift in (("near", 0), ("far", 0.1))}
    assert "KNN of ind 65.00; KNN of dice 85.00." in page_of(found)


def test_a_column_that_some_run_lacks_is_left_out():
    found = comparison()
    found.groups[0].evaluations[0]["diversity"]["ratio_error"] = None
    of_methods, _, of_curves = markdown(found).partition("One key varied")
    assert "ratio-error" not in of_methods and "ratio-error" in of_curves


def test_ratio_errors_are_compared_at_an_accuracy_that_is_fixed_beforehand():
    found = comparison()
    table = equal_accuracy(found.curves, 67.0)
    assert [head.title for head in table.heads] == ["method", "ratio-error at 67.00 %", "difference from dice"]
    (_, own, none), (_, same, apart) = table.rows
    assert own == same and own.startswith("0.520 [") and none.text == ""
    assert apart.text == "0.000 [0.000, 0.000]" and apart.kind == "unclear"
    assert equal_accuracy(found.curves, 99.0).rows[0][1] == "not reached"
    assert equal_accuracy(found.curves[:1], 67.0) is None
    assert "ratio-error at 67.00 %" in page_of(found)

"""The script that accepts a GPU machine, tried on the CPU."""

import json
import subprocess
import sys
from functools import partial

import pytest

from dicedist.diagnosis import acceptance, faults, speed, trial, whole
from dicedist.diagnosis.comparisons import BLOCKING, SINGLE, Comparison, comparisons, judge, prepare
from dicedist.diagnosis.finding import FAILED, OK, SKIPPED, SLOW, Finding, findings
from dicedist.diagnosis.speed import Expected, Steps
from dicedist.diagnosis.trial import Case
from dicedist.diagnosis.trials import Machine, Start, Trial
from dicedist.runs.run import Run
from tests.support.steps import CPU


def test_the_page_the_table_and_the_results(tmp_path, monkeypatch, capsys):
    outcomes = {
        "one": Finding(OK, "values agree"),
        "other": Finding(FAILED, "they do <not>", "mend it"),
        "third": Finding(SLOW, "12 ms", "10 are expected"),
        "fourth": Finding(SKIPPED, "needs 5 GPUs"),
    }
    checks = {name: lambda machine, found=found: found for name, found in outcomes.items()}
    monkeypatch.setattr(acceptance, "checks", lambda machine: checks)
    with pytest.raises(ValueError, match="1 of 4 checks failed: other"):
        acceptance.run(["--device", "cpu", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "results.json").read_text())["findings"]
    assert [(one["name"], one["state"]) for one in written] == [(name, one.state) for name, one in outcomes.items()]
    assert "they do &lt;not&gt;" in (tmp_path / "page.html").read_text()
    printed = capsys.readouterr().out
    table = [line.split("  ") for line in printed.splitlines()[-6:-1]]
    assert [(row[0], row[-1].strip()) for row in table[1:]] == [
        ("broken", "other"), ("slower than expected", "third"), ("works", "one"), ("not tried", "fourth"),
    ]  # fmt: skip
    assert f"please send back {tmp_path / 'results.json'}" in printed


def test_trainings_that_need_the_same_processes_run_together(tmp_path, monkeypatch):
    """And two ranks equal one process."""
    machine, starts = Machine("cpu", tmp_path), []
    start = Machine.start
    monkeypatch.setattr(Machine, "start", lambda machine, *given: starts.append(given) or start(machine, *given))
    checks = [Comparison(2, (f"method={method}", "ensemble.size=2")) for method in ("adp", "ind")]
    prepare(machine, checks)
    assert [ranks for _, ranks, *_ in starts] == [2, 1]
    assert [check(machine).state for check in checks] == [OK, OK]
    assert len(starts) == 2


def test_a_training_that_fails_leaves_the_others_alone(tmp_path, monkeypatch):
    machine, fine, bad = Machine("cpu", tmp_path), Case(("method=ind",)), Case(("method=adp",))

    def run(machine, place, cases):
        if bad in cases:
            raise RuntimeError("adp cannot")
        machine.known.update({(place, case): Trial([], [], []) for case in cases})

    monkeypatch.setattr(Machine, "run", run)
    machine.prepare([Start(1, fine), Start(1, bad)])
    assert machine.trial(Start(1, fine)) == Trial([], [], [])
    with pytest.raises(RuntimeError, match="adp cannot"):
        machine.trial(Start(1, bad))


def test_memory_is_compared_with_the_start_table(monkeypatch, tmp_path):
    machine = Machine("cpu", tmp_path)
    trial = Trial([], [], [{"said": 100, "held": 95}])
    monkeypatch.setattr(Machine, "trial", lambda machine, start: trial)
    assert acceptance.memory(machine).state == OK
    trial.bytes.append({"said": 100, "held": 80})
    found = acceptance.memory(machine)
    assert found.state == FAILED and "rank 1" in found.remedy


def test_a_run_that_lost_records_is_a_failure(tmp_path, monkeypatch):
    machine, run = Machine("cpu", tmp_path), Run(tmp_path / "run")
    run.records_file.parent.mkdir()
    run.records_file.write_text("".join(f'{{"train/loss": {n}}}\n' for n in range(3)))
    for length, state in ((3, OK), (4, FAILED)):
        known = [{"train/loss": float(n)} for n in range(length)]
        monkeypatch.setattr(faults, "undisturbed", lambda machine, known=known: known)
        assert faults.as_undisturbed(machine, run).state == state


def test_a_resumed_run_must_equal_the_other_to_the_bit(tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    run.records_file.parent.mkdir()
    run.records_file.write_text("".join(f'{{"train/loss": {n}}}\n' for n in (1.0, 2.0, 3.0000001)))
    monkeypatch.setattr(faults, "undisturbed", lambda machine: [{"train/loss": float(n)} for n in (1, 2, 3)])
    found = faults.as_undisturbed(Machine("cpu", tmp_path), run)
    assert found.state == FAILED and "the first is step 3" in found.what


@pytest.mark.parametrize(
    ("loss", "state"), [(1.0, OK), (1.0001, OK), (1.01, FAILED), (float("nan"), FAILED), (float("inf"), FAILED)]
)
def test_values_that_differ_by_more_than_rounding_are_a_failure(loss, state):
    expected = Trial([{"loss": 1.0}], [{"loss": 1.000001}], [])
    found = judge([{"loss": loss}], expected, "", SINGLE)
    assert found.state == state and ("loss in step 1" in found.remedy) == (state == FAILED)


def test_what_the_machine_lacks_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "most_ranks", 0)
    machine = Machine("cpu", tmp_path)
    checks = {name: partial(check, machine) for name, check in acceptance.checks(machine).items()}
    lacking = comparisons(0).keys() | {"a hung rank", "the time of a step: method=dice on 5 ranks"}
    assert {finding.state for name, finding in findings(checks) if name in lacking} == {SKIPPED}


def test_more_gpus_host_more_members():
    assert {check.ranks for check in comparisons(8).values()} == {1, 2, 4, 5, 8}
    assert "ensemble.size=7" in comparisons(8)["DICE, net, 8 ranks"].keys


def test_a_gpu_runs_ahead_of_the_host_and_is_watched(tmp_path, monkeypatch):
    """On a GPU: kernels in a row against kernels one by one, no waits after the first steps, the sanitizer."""
    monkeypatch.setattr(Machine, "most_ranks", 1)
    machine, starts = Machine("cuda", tmp_path), []
    known = Trial([{"loss": 1.0}], [{"loss": 1.0}], [])
    monkeypatch.setattr(Machine, "trial", lambda machine, start: starts.append(start) or known)
    checks = comparisons(1)
    for name in ("all kernels in a row, and one by one", "the host waits nowhere", "CUDA sanitizer"):
        assert checks[name](machine).state == OK
    ahead, one_by_one, watched, sanitized = starts
    assert ahead.case.in_a_row and not ahead.variables and one_by_one.variables == BLOCKING
    assert not (ahead.on_cpu or one_by_one.on_cpu)
    assert watched.case.refuses_waits and sanitized.variables == ("TORCH_CUDA_SANITIZER=1",)


def test_waits_are_refused_after_the_first_steps(monkeypatch):
    modes = []
    monkeypatch.setattr(trial.torch.cuda, "set_sync_debug_mode", modes.append)
    keys = (*Machine("cpu", None).keys, "method=ind", "ensemble.size=1")
    trial.follow(Case(keys, "float32", in_a_row=True, refuses_waits=True), trial.WARM_UP + 1, trial.World(0, 1, CPU))
    assert modes == ["error", "default"]


@pytest.mark.parametrize(("times", "state"), [(1.5, SLOW), (2.5, OK)])
def test_a_step_that_is_slower_than_expected(tmp_path, monkeypatch, times, state):
    slow, fast = Steps(1, ("method=dice",)), Steps(1, ("method=ind",))
    monkeypatch.setattr(speed, "measured", lambda steps, machine: ("", 20.0 if steps is slow else 10.0))
    expected = Expected(slow, times, fast)
    assert expected(Machine("cuda", tmp_path)).state == state
    ((_, found),) = findings({"one": partial(expected, Machine("cpu", tmp_path))})
    assert found.state == SKIPPED


def test_an_evaluation_that_differs_from_the_cpus(tmp_path, monkeypatch):
    results = iter([{"nll": 1.0}, {"nll": 1.1}, {"nll": 1.0}, {"nll": 1.0001}])
    monkeypatch.setattr(Machine, "start", lambda *given, **named: "")
    monkeypatch.setattr(Run, "result", lambda run: {"some": "results"})
    monkeypatch.setattr(whole, "smooth", lambda result: next(results))
    assert [whole.trained(Machine("cpu", tmp_path)).state for _ in range(2)] == [FAILED, OK]


def test_without_a_gpu_it_says_so():
    if acceptance.torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="--device cpu"):
        acceptance.run([])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_script(tmp_path):
    words = [sys.executable, "-m", "dicedist.diagnosis.acceptance", "--device", "cpu", "--out", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr

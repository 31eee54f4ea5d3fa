"""The script that accepts a GPU machine, tried on the CPU."""

import json
import subprocess
import sys
from functools import partial

import pytest

from dicedist.diagnosis import acceptance, faults
from dicedist.diagnosis.comparisons import Comparison, comparisons, judge
from dicedist.diagnosis.finding import FAILED, OK, SKIPPED, Finding, findings
from dicedist.diagnosis.trials import Machine, Trial
from dicedist.runs.run import Run


def test_the_page_and_the_results(tmp_path, monkeypatch):
    fine, bad = Finding(OK, "values agree"), Finding(FAILED, "they do <not>", "mend it")
    monkeypatch.setattr(acceptance, "checks", lambda: {"one": lambda machine: fine, "other": lambda machine: bad})
    with pytest.raises(ValueError, match="1 of 2 checks failed: other"):
        acceptance.run(["--device", "cpu", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "results.json").read_text())["findings"]
    assert [(one["name"], one["state"]) for one in written] == [("one", OK), ("other", FAILED)]
    assert "they do &lt;not&gt;" in (tmp_path / "page.html").read_text()


def test_two_ranks_equal_one_process(tmp_path):
    machine = Machine("cpu", tmp_path)
    found = Comparison(2, ("method=adp", "ensemble.size=2"))(machine)
    assert found.state == OK, found


def test_memory_is_compared_with_the_start_table(monkeypatch, tmp_path):
    machine = Machine("cpu", tmp_path)
    trial = Trial([], [{"said": 100, "held": 95}])
    monkeypatch.setattr(Machine, "trial", lambda machine, ranks, keys: trial)
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


def test_values_that_differ_are_a_failure():
    assert judge([{"loss": 1.0}], [{"loss": 1.001}]).state == OK
    assert judge([{"loss": 1.0}], [{"loss": 1.01}]).state == FAILED


def test_what_the_machine_lacks_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "most_ranks", 0)
    machine = Machine("cpu", tmp_path)
    checks = {name: partial(check, machine) for name, check in acceptance.checks().items()}
    lacking = comparisons().keys() | {"a hung rank", "the time of a step of dice on 5 ranks"}
    assert {finding.state for name, finding in findings(checks) if name in lacking} == {SKIPPED}


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

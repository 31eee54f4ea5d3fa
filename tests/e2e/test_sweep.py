"""A sweep trains every combination, goes on after a failure and after a stop, and refuses a misspelled key at once."""

import csv
import json
import re

import pytest

from dicedist import sweep
from dicedist.cluster.placement import place
from dicedist.runs import jobs, queue

TINY = [
    "data=shapes", "data.train_limit=48", "data.test_limit=250", "data.pipeline=torch", "batch_size=16",
    "network=resnet8", "max_steps=2", "tracking=none",
]  # fmt: skip


@pytest.mark.timeout(300)
def test_three_jobs_of_which_one_fails(tmp_path, capsys):
    arguments = ["--name", "sizes", "--dir", str(tmp_path), "--nproc", "1", *TINY, "ensemble.size=2,1,3"]
    with pytest.raises(ValueError, match=r"failed: size-1 \(logs in .*sizes\); the same command tries again"):
        sweep.run(arguments)
    told = capsys.readouterr().out
    assert re.search(r"3 runs in .*, 1 process each, \d+ at once", told)
    assert "size-1: failed: this method compares members" in told
    rows = told[told.index("ensemble.size  ") :].splitlines()[2:5]
    assert [row.split()[0] for row in rows] == ["2", "1", "3"]
    assert [row.split()[1] == "-" for row in rows] == [False, True, False]
    assert "<svg" in (tmp_path / "sizes" / "report.html").read_text()
    rows = list(csv.DictReader((tmp_path / "sizes" / "results.csv").open()))
    assert [(row["run"], row["ensemble.size"]) for row in rows] == [("size-2", "2"), ("size-1", "1"), ("size-3", "3")]
    assert [row["ensemble/accuracy"] == "" for row in rows] == [False, True, False]
    kept = json.loads((tmp_path / "sizes" / "size-3" / "evaluation.json").read_text())
    assert float(rows[2]["ensemble_tempered/nll"]) == kept["ensemble_tempered"]["nll"]
    assert {"validation/accuracy", "members/accuracy", "diversity/ratio_error"} <= rows[0].keys()

    with pytest.raises(ValueError, match="failed: size-1"):  # the others are finished
        sweep.run(arguments)
    assert capsys.readouterr().out.count(" left\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["redundancy.dleta=0.1,0.2"], "redundancy.dleta: there is no such key \\(did you mean redundancy.delta"),
        (["seed=0,1", "batch_size=0"], "batch_size=0: write a number above 0"),
        (["seed"], "write key=value"),
        ([], "arguments are required: key=value,value \\(`dicedist sweep --help` has examples\\)$"),
        (["--trails", "3", "seed=0,1"], "unrecognized arguments: --trails"),
        (["--at-once", "0", "seed=0,1"], "--at-once 0: write a number above 0"),
    ],
)
def test_mistakes_end_it_before_the_first_job(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(jobs.subprocess, "Popen", None)
    with pytest.raises(ValueError, match=message):
        sweep.run(["--dir", str(tmp_path), *arguments])


def test_names_and_values(tmp_path):
    swept, found = sweep.combinations(
        ["data=shapes", "redundancy.delta=0.1,auto", "seed=range(0,2)"], tmp_path, "trial"
    )
    assert swept == ["redundancy.delta", "seed"]
    assert [job.name for job in found] == [
        "delta-0.1_seed-0",
        "delta-0.1_seed-1",
        "delta-auto_seed-0",
        "delta-auto_seed-1",
    ]
    config = found[3].config
    assert (config.redundancy.delta, config.seed, config.run.name) == ("auto", 1, "delta-auto_seed-1")
    assert (config.tracking.experiment, config.tracking.study) == ("trial", "trial")


@pytest.mark.parametrize(
    ("devices", "nproc", "size", "ranks"),
    [(2, None, None, [2, 2]), (8, None, 4, [4, 5]), (8, 2, None, [2, 2]), (1, None, None, [1, 1])],
)
def test_methods_are_compared_at_one_size(tmp_path, monkeypatch, devices, nproc, size, ranks):
    monkeypatch.setattr(jobs, "num_devices", lambda: devices)
    _, found = sweep.combinations(["method=ind,dice"], tmp_path, "trial")
    most = nproc or max(jobs.ranks_for(job.config) for job in found)
    found, common = jobs.of_one_size(found, most)
    assert common == size
    assert [job.config.ensemble.size for job in found] == [size or "auto"] * 2
    started = []
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(jobs, "Fork", lambda overrides, log: started.append([]))
    for job in found:
        job.start(most)
    given = [next((word for word in command if "nproc" in word), "=1") for command in started]
    assert [int(word.partition("=")[2]) for word in given] == ranks
    needs = [False, True]
    assert [place(n, size or "auto", w).num_members for n, w in zip(ranks, needs, strict=True)] == [size or 4] * 2


def test_progress_is_read_from_the_end_of_a_log(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("dicedist: warning: few images\n")
    assert queue.last_step(log) == (0, "starts")
    log.write_text("step 1/1,200  3 min left\n" + "\n" * 9000 + "step 300/1,200  2 min left\ntest images 3/5\n")
    assert queue.last_step(log) == (0.25, "step 300/1,200")


def test_running_jobs_count_by_their_steps(tmp_path, monkeypatch, capsys):
    _, found = sweep.combinations(["seed=0,1"], tmp_path, "trial")
    monkeypatch.setattr(queue, "INTERVAL", 0.0)
    monkeypatch.setattr(jobs.Job, "finished", False)
    running = queue.Queue(found, 1, 2, tmp_path)
    for job, step in zip(found, (30, 10), strict=True):
        (tmp_path / f"{job.name}.log").write_text(f"step {step}/40  1 min left\n")
        running.running[step] = job, None
    running.progress.started -= 60  # a minute for one of two runs
    running.show()
    assert capsys.readouterr().out == "runs 1.0/2  1 min 00 s left  seed-0: step 30/40  seed-1: step 10/40\n"


def test_gpus_are_dealt_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert [queue.gpus_of(place, 3) for place in range(3)] == [[0, 1, 2], [3, 4, 5], None]

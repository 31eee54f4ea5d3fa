"""Images of any kind get the label that the ensemble gives their pixels; a file that is no image gets an error line."""

import io
import json
import os
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from dicedist import evaluate, predict
from dicedist.cluster.control import Control
from dicedist.config import compose_config
from dicedist.data import sources
from dicedist.data.sets.folder import decode_file
from dicedist.evaluation import prediction
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs.run import Run
from tests.support.processes import run_ranks
from tests.support.tiny import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "max_steps=2", "tracking=none")
    evaluate.run([f"run={folder / 'tiny'}", "ood.sets={}"])  # which calibrates it
    return folder / "tiny"


@pytest.fixture(scope="module")
def ensemble(run):
    return load_ensemble(Run.open(run), tell=print)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twelve test images as files, some in a subfolder."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    test = sources.load(compose_config(["data=shapes"]).data).test
    for number, pixels in enumerate(test.take(torch.arange(12)).numpy()):
        Image.fromarray(pixels).save(folder / ("more" if number % 2 else "") / f"{number:02}.png")
    return folder


def predicted(run, capsys, *arguments):
    predict.run([f"run={run}", "format=jsonl", "device=cpu", *map(str, arguments)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def expected(ensemble, path):
    pixels = torch.from_numpy(np.array(decode_file(path, 32)))
    with torch.inference_mode():
        outputs = ensemble(pixels[None])
    label = ensemble.about.class_names[outputs.pop("label")]
    p_K, p_MK = outputs["probabilities"][0], outputs["member_logits"][0].softmax(1)
    calibrated_K = (outputs["member_logits"][0].mean(0) / ensemble.about.temperature).softmax(0)
    assert calibrated_K.max().item() == pytest.approx(outputs["confidence"].item(), abs=1e-5)
    shares = dict(zip(ensemble.about.class_names, calibrated_K.tolist(), strict=True))
    within_M = -(p_MK * p_MK.log()).sum(1)
    mean_K = p_MK.mean(0)
    figures = {
        **{name: outputs[name].item() for name in prediction.COLUMNS},
        "entropy": -(p_K * p_K.log()).sum().item(),
        "mutual_information": (-(mean_K * mean_K.log()).sum() - within_M.mean()).item(),
    }
    decided = {}
    if ensemble.about.calibration is not None:
        decided["abstains"] = (None, "unsure", "unlike the training images")[outputs["reason"].item()]
        decided["ood_threshold"] = pytest.approx(ensemble.about.calibration["ood_threshold"])
        inside = [k for k in p_K.argsort(descending=True).tolist() if outputs["label_set"][0, k]]
        decided["set"] = [ensemble.about.class_names[k] for k in inside]
    return {
        "label": label,
        "members": [ensemble.about.class_names[k] for k in outputs["member_logits"][0].argmax(1).tolist()],
        **decided,
        "probabilities": pytest.approx(shares, abs=1e-5),
        **{name: pytest.approx(value, abs=1e-5) for name, value in figures.items()},
    }


def test_any_name_is_answered_and_none_commands_the_terminal(run, tmp_path, capsys):
    """Names that are not UTF-8, and with C1 controls, which some terminals obey."""
    names = [b"caf\xe9.png", "caf\u00e9.png".encode(), "a\u009b31mred\u0085.png".encode(), b"b\x1b[31m.png", b"c.png"]
    Image.new("RGB", (32, 32)).save(content := io.BytesIO(), "PNG")
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(content.getvalue())
    predict.run([f"run={run}", "format=jsonl", "device=cpu", str(tmp_path)])
    text = capsys.readouterr().out
    assert text.count("\n") == len(names) and text.replace("\n", "").isprintable() and "café" in text
    answered = [os.fsencode(json.loads(line)["path"]).rpartition(b"/")[2] for line in text.splitlines()]
    assert sorted(answered) == sorted(names)
    written = tmp_path.with_name("out.jsonl")
    predict.run([f"run={run}", "format=jsonl", "device=cpu", str(tmp_path), f"output={written}"])
    assert written.read_text("utf-8") == text


def test_a_folder_in_batches(run, ensemble, photos, capsys):
    rows = predicted(run, capsys, photos, "batch_size=5")
    files = sorted(photos.rglob("*.png"))
    assert rows == [{"path": str(file), **expected(ensemble, file)} for file in files]


def test_files_patterns_and_a_list_on_standard_input(run, photos, capsys, monkeypatch, tmp_path):
    odd = tmp_path / "a=b.png"
    odd.write_bytes((photos / "00.png").read_bytes())
    monkeypatch.chdir(tmp_path)
    listed = f"{photos / '02.png'}\n\n{photos / 'lost.png'}\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(listed)))
    rows = predicted(run, capsys, photos / "more" / "03.png", "./a=b.png", photos / "**" / "0[13].png", "-")
    named = [os.path.basename(row["path"]) for row in rows]
    assert named == ["03.png", "a=b.png", "01.png", "03.png", "02.png", "lost.png"]
    assert ["error" in row for row in rows] == [False] * 5 + [True]


def test_any_format_mode_and_size(run, ensemble, tmp_path, capsys):
    colors = Image.fromarray(np.random.default_rng(0).integers(256, size=(70, 50, 3), dtype=np.uint8))
    for mode, name in (("L", "a.png"), ("RGBA", "b.webp"), ("CMYK", "c.jpg"), ("P", "d.gif"), ("1", "e.bmp")):
        colors.convert(mode).save(tmp_path / name)
    colors.resize((3, 900)).save(tmp_path / "f.tiff")
    Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40).save(tmp_path / "g.png")
    rows = predicted(run, capsys, tmp_path)
    assert rows == [{"path": str(file), **expected(ensemble, file)} for file in sorted(tmp_path.iterdir())]


def test_a_corrupt_image_is_a_line(run, photos, tmp_path, capsys):
    whole = (photos / "00.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "good.png").write_bytes(whole)
    (tmp_path / "two\nlines.png").write_text("no image")
    rows = predicted(run, capsys, tmp_path, "batch_size=1")
    assert [row.get("error") is None for row in rows] == [False, False, True, False]

    predict.run([f"run={run}", str(tmp_path)])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:6] == ["path", "label", "confidence", "disagreement", "ood", "score"]
    assert header.endswith("abstains (why): set of labels")
    assert len(lines) == 4 and [" error: " in line for line in lines] == [True, True, False, True]
    figures = [rows[2][name] for name in prediction.COLUMNS]
    assert lines[2].split()[:5] == [rows[2]["path"], rows[2]["label"], *(f"{figure:.3f}" for figure in figures)]
    assert lines[2].endswith(f"  {prediction.advice(rows[2])}")
    assert header.index("confidence") + len("confidence") == lines[2].index(f"{figures[0]:.3f}") + 5


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"abstains": None, "set": ["oak", "elm"]}, "oak, elm"),
        ({"abstains": "unsure", "set": ["oak", "elm"]}, "abstains (unsure): oak, elm"),
        ({"abstains": "unsure", "set": ["oak"] * 4}, "abstains (unsure): 4 labels"),
        ({"abstains": "unlike the training images"}, "abstains (unlike the training images)"),
        ({"abstains": None, "set": []}, ""),
        ({}, ""),
    ],
)
def test_an_abstention_does_not_hide_the_labels(row, line):
    assert prediction.advice(row) == line


def test_one_member_into_a_file(run, photos, tmp_path, capsys):
    predict.run([f"run={run}", str(photos), "format=jsonl", f"output={tmp_path / 'out.jsonl'}", "members=[1]"])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and {row["disagreement"] for row in rows} == {0.0}
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out.jsonl'}: 12 images\n"


def test_no_more_than_two_batches_are_in_memory(ensemble, photos, monkeypatch):
    begun = []
    monkeypatch.setattr(prediction, "decode_file", lambda path, **of: begun.append(path) or decode_file(path, **of))
    rows = prediction.predict(ensemble, [str(photos / "00.png")] * 1000, batch_size=10)
    assert sum(map(len, islice(rows, 3))) == 30
    rows.close()
    assert len(begun) <= 40


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["photo.png"], "photo.png: there is no such file or folder"),
        (["*.nothing"], r"\*.nothing: no images found"),
        (["."], r"\.: no images found"),
        ([], "name images: files, folders"),
        (["text.txt"], "no image could be read: text.txt: cannot identify image file"),
        ([".", "format=csv"], "format=csv: write one of table, jsonl"),
        ([".", "device=tpu"], "device=tpu: write one of auto, cpu, cuda"),
        ([".", "batch_size=0"], "batch_size=0: write a whole number from 1"),
        ([".", "memebers=[0]"], "memebers: there is no such key \\(did you mean members"),
        ([".", "--fast"], "--fast: write key=value"),
        (["text.txt", "members=[7]"], "the run has members 0 to 1"),
        (["text.txt", "run=nowhere"], "nowhere is not a run"),
        (["text.txt", "run=null"], "write run=runs/NAME and images"),
    ],
)
def test_refusals(run, arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "text.txt" in arguments:
        (tmp_path / "text.txt").write_text("no image")
    with pytest.raises(ValueError, match=line):
        predict.run([f"run={run}", *arguments])


def test_the_command_as_typed(run, photos, tmp_path):
    """The reader of its output leaves after the first line, which is no error."""
    command = [sys.executable, "-m", "dicedist", "predict", f"run={run}", *[str(photos)] * 200, "batch_size=6"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("path")
    process.stdout.close()
    assert "Broken" not in process.stderr.read()
    assert process.wait() == 0


@pytest.mark.parametrize("closed_after", [1, 4, None])
def test_predictions_of_two_ranks_stand_in_their_order(closed_after):
    """The reporter may stop early, as `| head` does: no rank is left waiting."""
    first, second = run_ranks(2, predict_in_turn, closed_after)
    assert second == [] and first == list(range(11 if closed_after is None else min(3 * closed_after, 11)))


def predict_in_turn(rank, closed_after):
    def batches(numbers):
        return ([{"path": number} for number in numbers[start : start + 3]] for start in range(0, len(numbers), 3))

    rows = prediction.in_turn(batches, 11, 3, Control(rank, 2))
    found = [row["path"] for batch in islice(rows, closed_after) for row in batch]
    rows.close()
    return found


def test_two_processes_answer_as_one(run, photos):
    """Standard input is read once, and a pattern of key=value stays a setting."""
    listed = "\n".join(str(path) for path in sorted(photos.rglob("*.png")))
    words = [f"run={run}", "-", "format=jsonl", "batch_size=5"]
    command = [sys.executable, "-m", "dicedist.predict"]
    said = [
        subprocess.run([*command, *option, *words], input=listed, capture_output=True, text=True, timeout=240)
        for option in ((), ("--nproc", "2"))
    ]
    assert [one.returncode for one in said] == [0, 0], said[1].stderr
    alone, together = ([json.loads(line) for line in one.stdout.splitlines()] for one in said)
    assert [row["path"] for row in together] == [row["path"] for row in alone] and len(alone) == 12
    for one, other in zip(alone, together, strict=True):
        assert one["label"] == other["label"] and one["confidence"] == pytest.approx(other["confidence"], abs=1e-4)

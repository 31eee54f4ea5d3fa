"""The report: runs written by hand, read back as one page; what is pooled, what is missing, what is refused."""

import html
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape
from safetensors.torch import save_file

from dicedist import metrics
from dicedist.config import compose_config
from dicedist.config.plan import Plan
from dicedist.config.schema import MethodConfig
from dicedist.evaluation import calibration
from dicedist.evaluation.detection import histogram
from dicedist.report import run
from dicedist.reporting import paper, svg
from dicedist.reporting.labels import labels
from dicedist.reporting.lines import Line, apart, heights
from dicedist.reporting.page import figures, page, write_comparison, write_report
from dicedist.reporting.records import LONGEST_CURVE, Point, Pooled, Recorded, read_groups, read_run, styles_of, thinned
from dicedist.reporting.svg import axis
from dicedist.runs.run import Run
from tests.support.markup import EVERYTHING, HOSTILE, assert_only_our_markup

SECTIONS = (
    *(
        "decisions",
        "summary",
        "differences",
        "dynamics",
        "tradeoff",
        "reliability",
        "abstention",
        "discriminator",
        "ood",
    ),
    *("classes", "gallery", "runs"),
)
PICTURE = re.compile(r"<svg\b[^>]*>(?:(?:<svg\b.*?</svg>)|.)*?</svg>", re.DOTALL)
MakeRun = Callable[..., Path]


def write_records(folder: Path, epochs: int, compares: bool, draw: torch.Generator, until: int) -> None:
    lines = []
    for step in range(1, min(until, 4 * epochs) + 1):
        now = {"step": step, "epoch": step / 4}
        train = {"train/members/loss": 2 / step, "train/members/gradient_norm": 1 / step}
        train |= {"schedule/learning_rate": 0.1}
        if compares:
            train |= {
                "train/redundancy_nats": 3 / step - 0.7,
                "train/discriminator/loss": 0.64 + 1 / step,
                "train/discriminator/accuracy": 0.66,
            }
        lines.append(now | train)
        if step % 4 == 0:
            logits = torch.randn(3, 50, 4, generator=draw) * step**0.5
            values = metrics.validation_measures(logits, torch.arange(50) % 4)
            lines.append(now | {f"val/{name}": value for name, value in values.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def ood_scores(names: list[str], draw: torch.Generator) -> dict:
    inside, outside = torch.rand(60, generator=draw) ** 0.5, torch.rand(60, generator=draw)
    result = metrics.ood(inside, outside) | {"histogram": [histogram(inside), histogram(outside)]}
    return dict.fromkeys(names, result)


def write_evaluation(folder: Path, size: int, names: list[str], compares: bool, draw: torch.Generator) -> dict:
    num_classes, num_inputs = len(names), 40 * len(names)
    labels_N = torch.arange(num_inputs) % num_classes
    logits_MNK = torch.randn(size, num_inputs, num_classes, generator=draw)
    logits_MNK += 2 * torch.nn.functional.one_hot(labels_N, num_classes)
    pairs = [[i, j] for j in range(size) for i in range(j)]
    bins = [{"count": 10 * b, "mean": b / 10 + 0.05, "joint": b / 10} for b in range(1, 10)]
    w = {"pairs": pairs, "nats_P": [0.1] * len(pairs), "accuracy": 0.7, "calibration": bins}
    scores = ["max_softmax", "max_softmax_tempered"]
    scores += ["w_only", "dice_x_w", "dice_x_w_tempered"] if compares else []
    evaluation = {
        "member_ids": list(range(size)),
        "average": "logits",
        "class_names": names,
        **metrics.full_measures(logits_MNK, labels_N, "logits", 1),
        "redundancy": w if compares else None,
        "ood": {name: ood_scores(scores, draw) for name in ("svhn", "isun")},
        "ood_missing": ["lsun_crop: put ood/lsun_crop.npz somewhere"],
    }
    seen = {"knn": torch.rand(num_inputs, generator=draw)}
    chosen = calibration.fit(logits_MNK, labels_N, "logits", compose_config([]).calibration, seen)
    came_to = calibration.tested(chosen, logits_MNK, labels_N, "logits", seen)
    evaluation["calibration"] = {**asdict(chosen), "test": came_to}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    p_MNK = logits_MNK[:, :14].softmax(2)
    gallery = {
        "images": torch.randint(0, 256, (14, 32, 32, 3), generator=draw, dtype=torch.uint8),
        "labels": labels_N[:14],
        "predictions": p_MNK.argmax(2),
        "confidences": p_MNK.amax(2),
        "ensemble": p_MNK.mean(0).argmax(1),
    }
    save_file(gallery, folder / "gallery.safetensors")
    return evaluation


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes the folder of a run as training would leave it."""

    def make(
        name: str,
        method: str = "dice",
        seed: int = 0,
        size: int = 3,
        epochs: int = 3,
        until: int = 10**6,
        evaluated: bool = True,
        class_names: tuple[str, ...] = ("circle", "square", "star", "cross"),
        overrides: tuple[str, ...] = (),
    ) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        made = compose_config([f"method={method}", "data=shapes", *overrides])
        config = replace(made, seed=seed, ensemble=replace(made.ensemble, size=size), epochs=epochs)
        Run(folder).save_config(config)
        draw = torch.Generator().manual_seed(100 * seed + len(name))
        compares = method == "dice"
        write_records(folder, epochs, compares, draw, until)
        if evaluated:
            write_evaluation(folder, size, list(class_names), compares, draw)
        return folder

    return make


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    def write(*runs: Path) -> str:
        write_report([*map(Run.open, runs)], tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def parsed(text: str) -> list[ET.Element]:
    """Every picture of the page, parsed as stand-alone XML."""
    return [ET.fromstring(picture) for picture in PICTURE.findall(text)]


def section_of(text: str, anchor: str) -> str:
    return text.partition(f'<section id="{anchor}">')[2].partition("</section>")[0]


def row_of(text: str, label: str) -> list[str]:
    """The cells of the ensemble's row in the summary, without markup."""
    rows = re.findall(r"<tr>(.*?)</tr>", section_of(text, "summary").partition("<tbody>")[2])
    cells = next(row for row in rows if f"{label}</th>" in row).split("<td>")[1:]
    return [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in cells]


def test_one_page_with_every_figure(make_run: MakeRun, report: Callable[..., str]) -> None:
    runs = [make_run("ind", "ind"), make_run("ceb", "ceb"), make_run("a"), make_run("b", seed=1)]
    runs.append(make_run("more", overrides=("redundancy.delta=0.5",)))
    text = report(*runs)
    assert re.findall(r'<section id="(\w+)">', text) == list(SECTIONS)
    navigation = text[text.index("<nav") : text.index("</nav>")]
    assert re.findall(r'href="#(\w+)"', navigation) == list(SECTIONS)
    drawn = {anchor: section_of(text, anchor).count('role="img"') for anchor in SECTIONS}
    assert drawn == {
        "decisions": 0,
        "summary": 0,
        "differences": 0,
        "dynamics": 6 + 5 + 2,
        "tradeoff": 2,
        "reliability": 4,
        "abstention": 1 + 4,
        "discriminator": 3,
        "ood": 2 * (2 + 2 + 5 + 5),
        "classes": 4,
        "gallery": 0,
        "runs": 0,
    }
    assert text.count("<img ") == 4 * 12
    assert "nan" not in text.replace("nans", "").lower().split()
    for picture in parsed(text):
        if picture.get("role") == "img":
            assert re.search(r"\d", picture.get("aria-label", "")), "the text says what is seen, in figures"
            assert all(math.isfinite(float(number)) for number in picture.get("viewBox", "").split())


def test_sizes_that_were_trained_apart_make_one_line(make_run: MakeRun) -> None:
    name = "accuracy-against-the-size-that-was-trained"
    runs = [make_run(f"ind-{size}-{seed}", "ind", seed, size) for size in (2, 3, 5) for seed in (0, 1)]
    runs += [make_run(f"dice-{size}", "dice", 0, size) for size in (2, 3)]  # whose delta follows the size
    runs.append(make_run("alone", "ind", 0, 2, overrides=("structure=branch",)))  # of one size only
    drawn = lambda *folders: figures([*map(Run.open, folders)])  # noqa: E731
    said = drawn(*runs)[name].svg
    assert "Ind., nets" in said and "DICE, nets" in said and "branches" not in said
    for size in (2, 3, 5):
        results = [
            json.loads((run / "evaluation.json").read_text()) for run in runs if run.name.startswith(f"ind-{size}")
        ]
        accuracy = 100 * statistics.fmean(result["ensemble"]["accuracy"] for result in results)
        assert f"{accuracy:.4g}"[:4] in said
    assert name not in drawn(runs[0], runs[1])
    apart = [make_run(f"delta-{delta}", overrides=(f"redundancy.delta={delta}",)) for delta in (0.1, 0.5)]
    assert name not in drawn(*apart)


def test_what_predict_does_comes_first_and_the_papers_protocol_is_named(
    make_run: MakeRun, report: Callable[..., str]
) -> None:
    """One temperature is that of predict, with its spread; the other is called the paper's."""
    folder = make_run("a")
    found = json.loads((folder / "evaluation.json").read_text())["calibration"]
    text = report(folder)
    sections = re.findall(r'<section id="(\w+)">', text)
    assert sections[:2] == ["decisions", "summary"]
    first = html.unescape(text[text.index('id="decisions"') : text.index('id="summary"')])
    assert f"temperature {found['temperature']:.4g} ± {found['temperature_spread']:.2g}" in first
    for line in (
        "chosen on 160 validation inputs",
        "90 ± 4.6 % right",
        "≤ 5 % wrong, 90 % sure",
        "95 ± 3.5 % accepted",
    ):
        assert line in first, line
    assert "paper's protocol" not in first and text.count("paper's protocol") >= 2
    assert "T = " not in first
    summary = html.unescape(section_of(text, "summary"))
    assert "NLL, nats, after temperature, paper's protocol" in summary
    assert "Test set, the paper's protocol" in summary


def test_redundancy_is_drawn_from_zero_and_promises_nothing(make_run: MakeRun, report: Callable[..., str]) -> None:
    folder = make_run("a")
    text = html.unescape(report(folder))
    assert "DICE at work" not in text and "in nats from 0" in text
    drawn = figures([Run.open(folder)])["redundancy"].svg
    assert re.search(r'text-anchor="end"[^>]*>nothing shared', drawn), "at the right, where lines have left it"


def test_an_ensemble_that_is_not_calibrated_or_guesses_is_named(make_run: MakeRun, report: Callable[..., str]) -> None:
    folder = make_run("a")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    del evaluation["calibration"]
    evaluation["ensemble"]["accuracy"] = 0.25
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    text = html.unescape(report(folder))
    assert "Not calibrated (no validation images, or evaluated by an earlier version)" in text
    assert "No better than guessing: 25.0 % of the test set is right, and 25.0 % is of the most frequent class" in text


def test_diversity_of_training_images_is_drawn(make_run: MakeRun, report: Callable[..., str]) -> None:
    run = make_run("a")
    assert "Diversity on training images" not in report(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {k.replace("val/", "train_set/"): v for k, v in line.items() if k.startswith("val/diversity/")}
        line |= {"val/redundancy_nats": 0.5} if "val/ensemble/accuracy" in line else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Diversity on training images" in report(run)
    assert {"ratio-error-of-training-images", "redundancy-held-out"} <= figures([Run.open(run)]).keys()


def test_figures_are_also_pictures_of_their_own(make_run: MakeRun, report: Callable[..., str]) -> None:
    folder = make_run("a")
    found = figures([Run.open(folder)])
    text = report(folder)
    assert {
        "accuracy-of-the-ensemble",
        "redundancy",
        "accuracy-against-ensemble-size",
        "calibration-of-w",
    } <= found.keys()
    assert {"reliability-dice", "classes-dice"} <= found.keys(), "two sections have a figure of this name"
    for name, figure in found.items():
        root = ET.fromstring(figure.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("aria-label") == figure.seen
        assert name.endswith(figure.name) and figure.drawing in text and figure.svg not in text
        assert figure._repr_html_().startswith('<img src="data:image/svg+xml;base64,')


def test_page_needs_no_network_and_no_script(make_run: MakeRun, report: Callable[..., str]) -> None:
    text = report(make_run("a"))
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', text)
    assert "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text


def test_seeds_are_pooled_as_mean_and_deviation(make_run: MakeRun, report: Callable[..., str]) -> None:
    runs = [make_run(name, seed=seed) for seed, name in enumerate(("a", "bb", "ccc"))]
    runs.append(make_run("ind", "ind"))
    text = report(*runs, runs[0])
    accuracies = [json.loads((folder / "evaluation.json").read_text())["ensemble"]["accuracy"] for folder in runs[:3]]
    mean, deviation = 100 * statistics.mean(accuracies), 100 * statistics.stdev(accuracies)
    cells = row_of(text, "DICE")
    assert cells[0] == "3", "a run named twice counts once"
    assert cells[1] == f"{mean:.2f} ± {deviation:.2f}"
    assert row_of(text, "Ind.")[0] == "1" and "±" not in row_of(text, "Ind.")[1]


def test_only_what_is_better_beyond_the_deviations_is_bold_or_praised(
    make_run: MakeRun, report: Callable[..., str]
) -> None:
    figures = {  # by method: accuracy and NLL of two seeds
        "ind": ((0.70, 0.72), (0.30, 0.31)),
        "ceb": ((0.80, 0.84), (0.20, 0.21)),
        "dice": ((0.81, 0.85), (0.25, 0.26)),
    }
    runs = []
    for method, columns in figures.items():
        for seed, (accuracy, nll) in enumerate(zip(*columns, strict=True)):
            runs.append(make_run(f"{method}{seed}", method, seed=seed))
            evaluation = json.loads((runs[-1] / "evaluation.json").read_text())
            evaluation["ensemble"] |= {"accuracy": accuracy, "nll": nll}
            (runs[-1] / "evaluation.json").write_text(json.dumps(evaluation))
    summary = section_of(report(*runs), "summary")
    rows = re.findall(r'<tr>(<th scope="row".*?)</tr>', summary)
    bold = {
        column: [label for label, row in zip(figures, rows, strict=True) if "<b>" in row.split("<td")[column]]
        for column in (2, 4)
    }
    assert bold == {2: [], 4: ["ceb"]}
    assert "most accurate" not in summary
    alone = [run for run in runs if run.name.endswith("0")]
    assert "<b>" not in section_of(report(*alone), "summary"), "single runs have no deviation"


def test_differences_are_gray_unless_their_interval_leaves_zero_out(
    make_run: MakeRun, report: Callable[..., str]
) -> None:
    """Paired by seed, and over inputs from the kept logits: against a plain reading of both."""
    runs = []
    for method, accuracies in (
        ("ind", (0.70, 0.72, 0.74)),
        ("ceb", (0.75, 0.7701, 0.79)),
        ("dice", (0.60, 0.90, 0.70)),
    ):
        for seed, accuracy in enumerate(accuracies):
            runs.append(make_run(f"{method}{seed}", method, seed=seed))
            evaluation = json.loads((runs[-1] / "evaluation.json").read_text())
            evaluation["ensemble"] |= {"accuracy": accuracy}
            (runs[-1] / "evaluation.json").write_text(json.dumps(evaluation))
            generator = torch.Generator().manual_seed(seed + len(method))
            labels = torch.arange(90) % 4
            logits = torch.randn(2, 90, 4, generator=generator) + 3 * torch.nn.functional.one_hot(labels, 4)
            save_file(
                {"logits": logits * (1 if method == "ind" else 0), "labels": labels}, runs[-1] / "logits.safetensors"
            )
    text = section_of(report(*runs), "differences")
    row = re.findall(r'<tr><th scope="row">accuracy, % ↑</th>(.*?)</tr>', text)[0].split("</td>")
    assert row[0].startswith("<td><b>+5.00 [") and row[1].startswith('<td><span class="unclear">+1.33 [')
    assert row[2].startswith("<td><b>−"), "constant logits are worse on the same inputs"
    likelihood = re.findall(r'<tr><th scope="row">NLL, nats ↓</th>(.*?)</tr>', text)[0].split("</td>")
    assert "<b>+" in likelihood[2] and "<b>+" in likelihood[3]


def test_a_method_has_the_same_color_on_every_page() -> None:
    assert styles_of(["ind", "dice"]) == [0, 2] and styles_of(["dice", "dice", "ceb"]) == [2, 10, 1]
    assert styles_of(["mine"]) == styles_of(["ind", "mine"])[1:]
    assert [svg.style(place) for place in (2, 10, 18, 26)] == ["s2", "s2 again", "s2 third", "s2 third"]


def test_redundancy_is_compared_by_one_estimator_only(make_run: MakeRun, report: Callable[..., str]) -> None:
    runs = [make_run("ind", "ind"), make_run("dice")]
    own = report(*runs)
    assert "report --fresh" in section_of(own, "summary") and "I(Zᵢ; Zⱼ | Y)" not in own
    for folder, nats in zip(runs, (0.5, 0.25), strict=True):
        evaluation = json.loads((folder / "evaluation.json").read_text())
        kinds = {kind: {"nats_P": [nats]} for kind in ("conditional", "unconditional")}
        evaluation["redundancy_fresh"] = {"pairs": [[0, 1]], **kinds}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    fresh = report(*runs)
    assert "I(Zᵢ; Zⱼ | Y), nats ↓" in fresh and "0.250" in row_of(fresh, "DICE")
    assert "report --fresh" not in section_of(fresh, "summary")


def test_fresh_reads_every_run_that_was_not_read_so(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run("ind", "ind").parent)
    folder = make_run("dice")
    result = json.loads((folder / "evaluation.json").read_text())
    (folder / "evaluation.json").write_text(json.dumps({**result, "redundancy_fresh": {"pairs": [[0, 1]]}}))
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "dicedist.evaluation.saved.evaluate_run", lambda of, request: asked.append((of.name, request.estimator))
    )
    run(["--fresh", "ind", "dice"])
    assert asked == [("ind", "fresh")] and Path("report.html").exists()
    run(["ind"])
    assert Path("report-2.html").exists(), "nothing is overwritten"


def test_data_sets_are_not_ranked_against_each_other(make_run: MakeRun, report: Callable[..., str]) -> None:
    text = report(make_run("a"), make_run("b", overrides=("data=cifar10",)))
    assert "<b>" not in section_of(text, "summary")
    assert "DICE shapes" in text and "DICE cifar10" in text


def test_runs_that_differ_in_more_than_the_seed_are_told_apart(make_run: MakeRun) -> None:
    runs = [
        make_run("a"),
        make_run("b", seed=1, overrides=("log.every_steps=7", "checkpoint.keep=1", "run.name=x")),
        make_run("c", overrides=("redundancy.delta=0.5",)),
        make_run("d", overrides=("batch_size=64",)),
        make_run("e", "ind"),
        make_run("f", "ind", seed=3, overrides=("redundancy.delta=0.5",)),
        make_run("g", "ind", overrides=("structure=branch",)),
    ]
    groups = read_groups([*map(Run, runs)])
    assert {group.label: [recorded.run.name for recorded in group.runs] for group in groups} == {
        "Ind. 3-net": ["e", "f"],
        "Ind. 3-branch": ["g"],
        "DICE 3-net δ 0.1 batch_size 128": ["a", "b"],
        "DICE 3-net δ 0.1 batch_size 64": ["d"],
        "DICE 3-net δ 0.5": ["c"],
    }


def test_folders_of_images_are_different_data(make_run: MakeRun) -> None:
    runs = [make_run(name, overrides=("data=folder", f"data.root=/{name}")) for name in ("birds", "boats")]
    assert [group.label for group in read_groups([*map(Run, runs)])] == ["DICE folder /birds", "DICE folder /boats"]


def test_unknown_methods_go_by_their_own_name() -> None:
    config = replace(compose_config(["ensemble.size=2"]), method=MethodConfig("mine", {"cross_entropy": {}}, ["net"]))
    settings = Recorded(Run("runs/mine"), config, Plan.of_older(config), [], {}, {}).settings
    assert labels([settings]) == ["mine"] and settings["method.meaning"] == 'terms {"cross_entropy": {}}'


@pytest.mark.parametrize("until", [0, 2, 6])
def test_stopped_run_shows_what_there_is(make_run: MakeRun, report: Callable[..., str], until: int) -> None:
    alone = report(make_run("stopped", until=until, evaluated=False))
    assert 'id="dynamics"' in alone and 'id="summary"' not in alone
    assert "not evaluated: python -m dicedist.evaluate run=" in alone
    assert ("stopped at epoch" if until else "no records of training") in alone
    assert ("no validation" in alone) == (until < 4)
    assert section_of(alone, "dynamics").count('role="img"') == {0: 0, 2: 3, 6: 13}[until]

    beside = report(make_run("whole", "ind"), make_run("again", until=until, evaluated=False))
    assert "Not evaluated yet: DICE." in beside
    parsed(beside)


def test_single_member_has_no_diversity(make_run: MakeRun, report: Callable[..., str]) -> None:
    text = report(make_run("one", "ind", size=1))
    assert "One member alone has no diversity: Ind." in text
    assert "ratio-error ↑" not in text
    assert "members averaged" not in text


def test_names_cannot_become_markup(make_run: MakeRun, report: Callable[..., str]) -> None:
    nasty = '<b id="x">&"\''
    text = report(make_run(nasty, class_names=(nasty, "square", "star", "cross")))
    assert nasty not in text and '<b id="x">' not in text
    assert escape(nasty) in text
    parsed(text)


def hostile_runs(make_run: MakeRun, names: Sequence[str] = HOSTILE) -> list[Path]:
    """Names of runs, classes, members, OOD sets, scores, shifts, records, and values of the config."""
    folders = []
    for nth, name in enumerate(names):
        folder = make_run(name.replace("/", "-"), seed=nth, class_names=(name, name + "2", "star", "cross"))
        config = Run(folder).config()
        data = replace(config.data, name="folder", root=f"/images/{name}")
        method = replace(config.method, title=f"DICE {name}", meaning=name)
        Run(folder).save_config(replace(config, data=data, method=method, network=replace(config.network, name=name)))
        evaluation = json.loads((folder / "evaluation.json").read_text())
        evaluation["member_ids"] = [name, "1", "2"]
        scores = evaluation["ood"].pop("svhn")
        evaluation["ood"] |= {name: scores | {name: scores["max_softmax"]}}
        evaluation["ood_missing"] = [f"{name}: is not there"]
        ranked = {"auroc": 0.5, "auroc_interval": [0.4, 0.6], "fpr95": 0.5, "fpr95_ood_positive": 0.5}
        evaluation["ood_groups"] = {name: {"sets": [name], "missing": [name], "scores": {"max_softmax": ranked}}}
        means = {str(severity): {"accuracy": 0.5} for severity in range(6)}
        sets = {name: {"1": {"accuracy": 0.5}}}
        evaluation["shift"] = {name: {"mean": means, "sets": sets, "num_inputs": 5, "mean_error": 0.5}}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": 13, "epoch": 3.25, f"train/{name}": 1.0, "val/ensemble/accuracy": 0.5}) + "\n"
            )
        folders.append(folder)
    return folders


def test_no_string_of_a_run_becomes_markup(make_run: MakeRun, report: Callable[..., str], tmp_path: Path) -> None:
    folders = hostile_runs(make_run)
    text = report(*folders)
    shown = assert_only_our_markup(text)
    assert all(name in shown for name in HOSTILE), "shown as they are"
    drawn = figures([*map(Run.open, folders)]).values()
    for figure in drawn:
        ET.fromstring(figure.svg)
        assert_only_our_markup(figure.svg)
        assert_only_our_markup(figure._repr_html_())
    assert any("evil" in figure.seen for figure in drawn)
    write_comparison(tmp_path / "paper.html", ["table", "cell", "note"], [[EVERYTHING] * 3, ["other", *HOSTILE[:2]]])
    assert EVERYTHING in assert_only_our_markup((tmp_path / "paper.html").read_text())


def places_in(values: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value, of lists only of the first one."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from places_in(value, (*path, key))
    elif isinstance(values, list) and values:
        yield from places_in(values[0], (*path, 0))
    yield path


def changed_at(values: Any, path: tuple, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(values)
    first, *rest = path
    inner = changed_at(values[first], tuple(rest), change)
    return {**values, first: inner} if isinstance(values, dict) else [inner, *values[1:]]


def hostile(value: Any) -> Any:
    """Text in place of a value, and for keys of a dictionary."""
    return {f"{key}{EVERYTHING}": inner for key, inner in value.items()} if isinstance(value, dict) else EVERYTHING


@pytest.mark.parametrize("share", [pytest.param(25, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_nothing_in_results_and_records_becomes_markup(make_run: MakeRun, share: int) -> None:
    """Any value may be text, and any key: a page of it has our markup only, or there is no page."""
    folder = make_run("fuzzed")
    evaluation, lines = json.loads((folder / "evaluation.json").read_text()), (folder / "metrics.jsonl").read_text()
    record, pages = json.loads(lines.splitlines()[-1]), 0
    cases = [("evaluation.json", path) for path in places_in(evaluation)]
    cases += [("metrics.jsonl", path) for path in places_in(record)]
    for name, path in random.Random(share).sample(cases, len(cases) // share):
        values = evaluation if name == "evaluation.json" else record
        text = json.dumps(changed_at(values, path, hostile))
        whole = {"evaluation.json": json.dumps(evaluation), "metrics.jsonl": lines, name: text}
        whole["metrics.jsonl"] = lines + text + "\n" + lines.splitlines()[0] if name == "metrics.jsonl" else lines
        for file, content in whole.items():
            (folder / file).write_text(content)
        try:
            written = page(read_groups([Run.open(folder)]))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            continue  # a command reports it in one line
        pages += 1
        assert_only_our_markup(written)
    assert pages > 0


@pytest.mark.slow
def test_a_browser_stays_on_the_page(make_run: MakeRun, report: Callable[..., str], tmp_path: Path) -> None:
    """Chromium, if there is one: it calls nobody, runs nothing, and shows our title."""
    if (browser := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("no Chromium on this machine")
    calls: list[str] = []

    class Listening(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Listening) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        evil = f"127.0.0.1:{server.server_port}/evil"
        names = [name.replace("evil.example", evil).replace("evil()", f"fetch('//{evil}')") for name in HOSTILE]
        report(*hostile_runs(make_run, names))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
        options += [f"--user-data-dir={tmp_path / 'browser'}"]

        def shown(path: Path) -> str:
            done = subprocess.run([browser, *options, path.as_uri()], capture_output=True, text=True, timeout=120)
            return done.stdout

        (tmp_path / "open.html").write_text(f"<title>t</title>{names[1]}{names[2]}")
        shown(tmp_path / "open.html")
        assert calls, "without our templates the browser does call"
        calls.clear()
        assert "<title>DICE" in shown(tmp_path / "report.html") and calls == []
        server.shutdown()


def test_many_classes_show_the_hardest_and_list_all(make_run: MakeRun, report: Callable[..., str]) -> None:
    names = tuple(f"class number {k}" for k in range(30))
    text = section_of(report(make_run("many", class_names=names)), "classes")
    assert "the 20 hardest of 30 classes" in text
    assert len(re.findall(r'<th scope="row">class number \d+</th>', text)) == 30


def test_long_curves_are_averaged_over_neighbors() -> None:
    points = [Point(x, Pooled(float(x % 2), 0.5, 2)) for x in range(4 * LONGEST_CURVE)]
    thin = thinned(points)
    assert len(thin) == LONGEST_CURVE
    assert {(point.y.mean, point.y.deviation) for point in thin} == {(0.5, 0.5)}
    assert thinned(points[:LONGEST_CURVE]) == points[:LONGEST_CURVE]


def test_axis_leaves_out_a_spike_but_never_the_end() -> None:
    course = [1000.0] + [float(x) for x in range(150)]
    found = heights([Line("a", 0, [Point(x, Pooled(y, None, 1)) for x, y in enumerate(course)])])
    assert max(found) == course[-1]


def test_gallery_of_other_members_than_were_measured_last(make_run: MakeRun, report: Callable[..., str]) -> None:
    folder = make_run("some")
    path = folder / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"member_ids": [0, 2]}))
    assert report(folder).count("<img ") == 12


def test_paper_figures_are_quoted_for_its_own_setting_only(make_run: MakeRun, report: Callable[..., str]) -> None:
    cell = ("data=cifar100", "network=resnet32", "data.split=full", "batch_size=128")
    others = ("data.split=holdout", "redundancy.delta=5", "data.train_limit=100", "optimizer.lr=chen2020")
    runs = [make_run("p", size=4, epochs=300, until=1, overrides=cell)]
    runs += [make_run(f"q{n}", size=4, epochs=300, until=1, overrides=(*cell, o)) for n, o in enumerate(others)]
    found = {recorded.run.name: paper.accuracy(recorded.config) for recorded in map(read_run, map(Run, runs))}
    assert found == {"p": pytest.approx(Pooled(0.7792, 0.0008, 3)), **{f"q{n}": None for n in range(len(others))}}


def test_cut_off_last_record_is_left_out(make_run: MakeRun) -> None:
    folder = make_run("cut", evaluated=False)
    path = folder / "metrics.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole) + '\n{"step": 99, "ep')
    assert len(read_groups([Run(folder)])[0].runs[0].records) == len(whole)


def damage_config(folder: Path) -> None:
    (folder / "config.yaml").write_text("epochs: many")


def remove_config(folder: Path) -> None:
    (folder / "config.yaml").unlink()


def damage_records(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("not json\n" + path.read_text())


def damage_evaluation(folder: Path) -> None:
    (folder / "evaluation.json").write_text("{")


def other_evaluation(folder: Path) -> None:
    (folder / "evaluation.json").write_text("{}")


def damage_gallery(folder: Path) -> None:
    (folder / "gallery.safetensors").write_bytes(b"no")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (remove_config, "is not a run: it has no config.yaml"),
        (damage_config, "is not a run of this version: epochs"),
        (damage_records, "metrics.jsonl is damaged at line 1"),
        (damage_evaluation, "evaluation.json is damaged: python -m dicedist.evaluate"),
        (other_evaluation, "evaluation.json is not an evaluation of this version"),
        (damage_gallery, "gallery.safetensors is damaged"),
    ],
)
def test_bad_run_is_one_clear_line(
    make_run: MakeRun, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    folder = make_run("bad")
    harm(folder)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        write_report([Run.open(folder)], tmp_path / "report.html")
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "report.html").exists()


def test_command_writes_where_it_is_told(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new folder" / "page.html"
    run([str(make_run("delta=0.1")), f"output={target}"])
    assert target.read_text().startswith("<!doctype html>")
    assert f"wrote {target}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="name the runs to report"):
        run([])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_axis_holds_its_values_between_few_round_ticks(values: list[float]) -> None:
    found = axis("x", values)
    slack = 1e-6 * (found.high - found.low)
    assert found.low - slack <= min(values) and max(values) <= found.high + slack
    assert 2 <= len(found.ticks) <= 8
    assert len(set(found.texts)) == len(found.texts)


@given(st.lists(st.floats(0, 100), max_size=8))
def test_labels_are_kept_apart_in_order(heights: list[float]) -> None:
    moved = apart(heights, 10, 0, 100)
    assert all(0 <= height <= 100 for height in moved)
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    gaps = [moved[after] - moved[before] for before, after in zip(order, order[1:], strict=False)]
    assert all(gap > 10 - 1e-6 for gap in gaps)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not on PATH: apt-get install chromium")
def test_browser_shows_every_section_without_complaint(
    make_run: MakeRun, report: Callable[..., str], tmp_path: Path
) -> None:
    report(make_run("ind", "ind"), make_run("a"), make_run("b", seed=1))
    quiet = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    browser = [
        "chromium",
        "--headless",
        "--no-sandbox",
        *quiet,
        "--disable-sync",
        f"--user-data-dir={tmp_path}/profile",
    ]
    page = f"file://{tmp_path}/report.html"
    shown = subprocess.run(
        [*browser, "--enable-logging=stderr", "--v=0", "--dump-dom", page], capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0
    assert "CONSOLE" not in shown.stderr
    assert re.findall(r'<section id="(\w+)">', shown.stdout) == list(SECTIONS)

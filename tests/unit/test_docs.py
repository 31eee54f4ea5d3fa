"""The docs are true: bash parses every command, dicedist accepts it, and files, links and keys exist."""

import os
import re
import subprocess
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import run as torchrun

from dicedist import bench, paper, train
from dicedist.config import Config, compose_config
from dicedist.config.commands import COMMANDS
from dicedist.metrics.measures import ALL, MEANINGS, OOD_SCORES
from dicedist.runs.queue import Queue
from dicedist.studies.search import Search
from tests.support import CHECKOUT

FOLDERS = (".", "docs", "docs/tutorials", "docs/results", "docs/reference", "launch/k8s", "examples")
PAGES = sorted(path for folder in FOLDERS for path in (CHECKOUT / folder).glob("*.md"))
PROGRAMS = ("dicedist", "timeout", "python", "torchrun", "docker", "kubectl", "sbatch", "mlflow", "find")
START = re.compile(rf"(?:\./)?(?:{'|'.join(PROGRAMS)}|launch/[\w-]+|\.venv/bin/python)(?= |$)")
# What is refused because nothing was trained, and no file of the user's is there.
MISSING = "is not a run: it has no config.yaml|there is no such file or folder|no trial of .* is complete"
RECORDER = '#!/usr/bin/env bash\nprintf "%s\\0" "${0#"$PWD/"}" "$@" >"$ASKED/$$"\n'  # programs of a pipe run at once


def blocks(text):
    """The lines of a page's code blocks, with those that a backslash continues."""
    for block in re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def commands_of(page):
    text = page.read_text()
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    found = [line for line in [*blocks(text), *spans] if START.match(line)]
    return [line for line in found if " " in line or line.startswith("./launch")]


def examples_of(name):
    """The commands in what `--help` prints first, without the remark behind them."""
    lines = (import_module(f"dicedist.{name}").__doc__ or "").splitlines()
    return [re.split(r"\s{2,}", line.strip())[0] for line in lines if START.match(line.strip())]


LINES = {
    **{line: f"{name} --help" for name in (*COMMANDS, "paper", "launch", "__main__") for line in examples_of(name)},
    **{line: page.relative_to(CHECKOUT).as_posix() for page in PAGES for line in commands_of(page)},
}
PLACEHOLDERS = ("COMMAND", "dicedist.NAME", "dicedist NAME", "key=value", "...")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder in which every program only writes down what it was called with."""
    for program in PROGRAMS:
        write(tmp_path / "bin" / program)
    for script in (CHECKOUT / "launch").iterdir():
        write(tmp_path / "launch" / script.name)
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": tmp_path / "home", "DICEDIST_DATA": tmp_path / "data"}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "home/.config/fish/completions").mkdir(parents=True)  # fish makes it when it is first started
    return tmp_path


def write(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text(RECORDER)
    path.chmod(0o755)


def through_bash(line, folder):
    """The words of every program that a line of bash starts."""
    (asked := folder / "asked").mkdir()
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "ASKED": str(asked)}
    done = subprocess.run(["bash", "-euc", line], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    calls = [file.read_text().split("\0")[:-1] for file in asked.iterdir()]
    assert calls, "no program was started"
    return [[Path(program).name if "/bin/" in program else program, *words] for program, *words in calls]


@pytest.fixture
def started(monkeypatch):
    """Nothing trains and nothing is measured; what was asked for is composed all the same."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(train.NPROC, raising=False)
    monkeypatch.setattr("dicedist.trainer.train", lambda config: None)
    monkeypatch.setattr(os, "execv", lambda program, words: None)
    monkeypatch.setattr(bench, "measured", lambda name, overrides: compose_config(overrides) and [{"s": 1}])
    monkeypatch.setattr(Queue, "run", lambda self: [])
    monkeypatch.setattr(Search, "run", lambda self: None)
    monkeypatch.setattr(paper, "finish", lambda job, ranks: True)
    job = SimpleNamespace(name="a cell", config=None, result=None)  # a table has hundreds of configs
    monkeypatch.setattr(paper, "job_of", lambda cell, seed, overrides: composed_once(overrides) or job)
    monkeypatch.setattr(paper, "ranks_for", lambda config: 1)
    monkeypatch.setattr(paper, "forecast", lambda jobs: "hours")
    monkeypatch.setattr(paper, "costs_of", lambda cell: {"parameters": 1.0, "gflops": 1.0})


@cache
def composed_once(overrides):
    """For all cells of a table."""
    compose_config(overrides)


@pytest.mark.parametrize(("line", "origin"), LINES.items(), ids=lambda value: value[:60])
def test_every_command_is_understood(line, origin, folder, started):
    if any(word in line.split("#")[0] for word in PLACEHOLDERS):
        pytest.skip("for the reader to fill in")
    for program, *words in through_bash(line, folder):
        run(program.removeprefix("./"), words)


def run(program, words):
    if program == "dicedist":
        name, *rest = words
        if not name.startswith("-"):
            command(name, rest)
    elif program == "python" and words[0] == "-m":
        module, *rest = words[1:]
        assert find_spec(module), module
        if module.startswith("dicedist."):
            command(module.removeprefix("dicedist."), rest)
    elif program == "python":
        assert (CHECKOUT / words[0]).exists()
    elif program == "torchrun":
        command("launch", words)
    elif program == "docker" and words[0] == "run" and "dicedist" in words:
        image = words.index("dicedist")
        entry = words[words.index("--entrypoint") + 1] if "--entrypoint" in words else "dicedist"
        run(entry, words[image + 1 :])
    elif program == "sbatch":
        command("train", words[words.index("launch/slurm.sbatch") + 1 :])
    elif program == "kubectl":
        files = [words[place + 1] for place, word in enumerate(words) if word == "-f" and words[0] == "apply"]
        assert all((CHECKOUT / file).exists() for file in files), files
    elif program.startswith("launch/"):
        script(program.removeprefix("launch/"), words)


def script(name, words):
    if name == "quickstart":
        command("train", ["experiment=quickstart", *words])
    elif name in ("paper", "sweep") and words:  # else it is only mentioned
        command(name, words)
    elif name == "docker":
        run("dicedist", words or ["train"])
    elif name == "test":
        assert all((CHECKOUT / word).exists() for word in words if word.startswith("tests/")), words


def command(name, words):
    if name == "launch":
        options = torchrun.parse_args(words)
        assert options.module
        run("python", ["-m", options.training_script, *options.training_script_args])
        return
    try:
        import_module(f"dicedist.{name}").run(words)
    except ValueError as error:
        assert re.search(MISSING, str(error)), error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


PATH = re.compile(r"(?<![\w/.{-])(?:dicedist|tests|conf|docs|launch)/[\w./*-]*[\w*/]")
ABOUT_PATHS = [
    path
    for pattern in ("*.md", "docs/**/*", "launch/**/*", "dicedist/**/*.py", "tests/**/*.py", "conf/**/*.yaml")
    for path in sorted(CHECKOUT.glob(pattern))
    if path.is_file() and path.suffix in (".md", ".py", ".yaml", "") and path != Path(__file__)
]
INVENTED = re.compile(r"NAME|TERM|conf/(?:data|method|network|experiment)/\.\.\.|dicedist/(?:prepared|conf)|conf/GROUP")


def test_every_file_that_is_cited_exists():
    lost = [
        f"{page.relative_to(CHECKOUT)}: {cited}"
        for page in ABOUT_PATHS
        for cited in PATH.findall(page.read_text())
        if not INVENTED.search(cited) and not exists(cited)
    ]
    assert lost == []


def exists(cited):
    cited = cited.rstrip(".")
    return any(CHECKOUT.glob(cited)) if "*" in cited else (CHECKOUT / cited).exists()


def test_no_page_of_ours_is_cited_by_a_name_that_readers_do_not_have():
    private = re.compile(r"\b(?:DESIGN|FACTS|STYLE)\b(?! *=)|\bMETHODS?2?(?:\.md| decision)")
    told = [
        f"{path.relative_to(CHECKOUT)}: {found[0]}"
        for path in ABOUT_PATHS
        for line in path.read_text().splitlines()
        if "STYLE." not in line and "STYLE}" not in line and (found := private.search(line))
    ]
    assert told == []


def test_rows_of_the_choices_that_the_code_cites_exist():
    rows = set(re.findall(r"^\| (\d+) \|", (CHECKOUT / "docs/choices.md").read_text(), re.MULTILINE))
    texts = [path.read_text() for path in (CHECKOUT / "dicedist").rglob("*.py")]
    cited = {
        row
        for text in texts
        for found in re.findall(r"docs/choices\.md, ([\d, and]+)", text)
        for row in re.findall(r"\d+", found)
    }
    assert cited and cited <= rows


KEY = re.compile(r"`([a-z_]+(?:\.[\w*]+)+)(?:=[^`]*)?`")


def test_every_key_that_is_named_exists():
    groups = {entry.name: entry.type for entry in fields(Config) if is_dataclass(entry.type)}
    texts = {page.name: page.read_text() for page in PAGES}
    # Pages with Python in them speak of its objects.
    named = [(page, key) for page, text in texts.items() if "```python" not in text for key in KEY.findall(text)]
    known = [(page, key) for page, key in named if key.partition(".")[0] in {**groups, "resume": None}]
    assert len(known) > 20 and [(page, key) for page, key in known if not is_key(groups, key)] == []


def is_key(groups, key):
    first, name, *_ = key.split(".")
    schema = groups["resuming" if first == "resume" else first]
    return name == "*" or name in {entry.name for entry in fields(schema)}


def test_the_tables_of_commands_are_complete():
    readme = (CHECKOUT / "README.md").read_text()
    named = re.findall(r"\| `(\w+)` \||`dicedist (\w+) ", readme)  # a row of the table, or a sentence
    assert {*COMMANDS} <= {word for words in named for word in words}
    assert len(readme.splitlines()) <= 150


def test_the_page_of_measures_is_the_list():
    page = (CHECKOUT / "docs/measures.md").read_text()
    rows = [f"| {escaped(measure.heading)}{measure.arrow} | `{measure.name}` | {measure.meaning} |" for measure in ALL]
    assert [row for row in rows if row not in page or row.endswith("|  |")] == []
    assert {measure.name for measure in ALL} == {*MEANINGS}
    scores = page.partition("## Scores for OOD detection")[2]
    assert [title for title in OOD_SCORES.values() if title.removesuffix(" + T") not in scores] == []


def escaped(text):
    return text.replace("|", "\\|")


def test_words_arrive_whole_from_bash(folder):
    (call,) = through_bash("dicedist train 'data.root=/my fotos/über' ood.sets={} 'a=[1,2]' ~/x", folder)
    assert call[2:] == [
        "data.root=/my fotos/über",
        "ood.sets={}",
        "a=[1,2]",
        f"{folder}/home/x",
    ]

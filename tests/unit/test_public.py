"""The public names and their site: every example in a docstring runs, every page is built without a warning."""

import doctest
import html
import json
import re
import subprocess
import sys
from urllib.parse import unquote

import pytest
import torch
from torch import nn

import dicedist
from dicedist import Ensemble
from dicedist.config.schema import Config, keys_of
from docs.versions import add
from tests.support import CHECKOUT

NAMES = sorted(dicedist.__all__, key=lambda name: (name == "Run", name))  # `fit` makes the run that `Run` opens


def examples_of(value):
    found = doctest.DocTestFinder(recurse=False).find(value, getattr(value, "__name__", ""))
    return [test for test in found if test.examples]


@pytest.fixture(scope="module")
def known():
    members = [nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)) for _ in range(3)]
    ensemble = Ensemble.from_members(members, ["cat", "dog"], size=8)
    return {"torch": torch, "nn": nn, "ensemble": ensemble, "images": torch.rand(4, 3, 8, 8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.mark.parametrize("name", NAMES)
def test_its_examples_run(name, known, folder, monkeypatch):
    monkeypatch.chdir(folder)
    value = getattr(dicedist, name)
    values = [value] if name != "losses" else [getattr(value, each) for each in value.__all__]
    for one in values:
        tests = examples_of(one)
        assert tests, f"{one} has no example"
        for test in tests:
            test.globs |= known
            assert doctest.DocTestRunner().run(test).failed == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("zensical", reason="pip install 'dicedist[docs]'")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(folder / "mkdocs.yml")]
    for command in ([sys.executable, str(CHECKOUT / "docs/generated.py"), str(folder)], build):
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(?!data:)(?:https?:)?//', page.read_text()), page
        assert not re.findall(r'<link[^>]* rel="stylesheet"[^>]* href="(?:https?:)?//', page.read_text()), page


def test_every_link_of_the_site_leads_somewhere(site):
    texts = {page.resolve(): page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r' (?:id|name)="([^"]+)"', text)) for page, text in texts.items()}
    lost = []
    for page, text in texts.items():
        for link in re.findall(r' (?:href|src)="([^"]+)"', text):
            if page.name == "404.html" or re.match(
                r"[a-z]+:", link
            ):  # that page names everything from the server's root
                continue
            path, _, anchor = html.unescape(link).partition("#")
            aim = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
            if not aim.exists() or (anchor and aim in anchors and unquote(anchor) not in anchors[aim]):
                lost.append(f"{page.name}: {link}")
    assert lost == [] and len(texts) > 25
    assert 'href="../uncertainty.html"' in (site / "tutorials" / "serve.html").read_text(), "tutorials link to pages"


def test_every_key_and_every_page_is_on_the_site(site):
    keys = (site / "reference" / "keys.html").read_text()
    assert [name for name in keys_of(Config) if "." in name and f"<code>{name}</code>" not in keys] == []
    start = (site / "index.html").read_text()
    for page in (CHECKOUT / "docs").glob("*.md"):
        assert f'href="./{page.stem}.html"' in start, f"{page.name} is not in the navigation"
    for name in dicedist.__all__:
        assert name in (site / "reference" / "python.html").read_text()


def test_versions_stand_next_to_each_other(tmp_path):
    (site := tmp_path / "site").mkdir()
    for version in ("0.10.0", "0.9.0", "0.9.0"):
        (site / "index.html").write_text(version)
        add(site, tmp_path / "pages", version)
    rows = json.loads((tmp_path / "pages/versions.json").read_text())
    assert [(row["version"], row["aliases"]) for row in rows] == [("0.10.0", ["latest"]), ("0.9.0", [])]
    assert "url=0.10.0/index.html" in (tmp_path / "pages/index.html").read_text()
    assert (tmp_path / "pages/0.9.0/index.html").read_text() == "0.9.0"


def test_notebooks_hold_their_outputs():
    for path in (CHECKOUT / "docs" / "tutorials").glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 1, path
        assert "/tmp/" not in path.read_text(), "a path of the machine that ran it"

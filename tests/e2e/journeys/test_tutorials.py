"""The tutorials: every command and every block of Python on them, in their order, in one terminal."""

import re
import textwrap

import numpy as np
import pytest

from tests.support import CHECKOUT
from tests.support.journeys import SMALL, Shell, photos, picture
from tests.support.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TUTORIALS = CHECKOUT / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(dicedist|timeout|MLFLOW_TRACKING_URI=)")


def script_of(page, replaced):
    """One script of bash for the page: commands as they stand, and Python as files that it starts."""
    lines = ["set -e", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for number, (kind, code) in enumerate(BLOCK.findall(page.read_text())):
        if kind == "python":
            lines.append(f"cat > block{number}.py <<'END'\n{code}END\npython block{number}.py")
        else:
            lines += [line for line in code.replace("\\\n", " ").splitlines() if COMMAND.match(line)]
    text = "\n".join(lines)
    for old, new in replaced.items():
        assert old in text, f"{page.name} says {old} no more"
        text = text.replace(old, new)
    return text


def test_every_tutorial_is_walked():
    """Pages named your-* run in tests/e2e/test_tutorials.py, which lists them from the folder."""
    pages = {path.stem for path in TUTORIALS.glob("*.md") if not path.stem.startswith("your-")}
    assert {page for page in pages if f"test_{page}" not in globals()} == set()


@pytest.mark.timeout(2400)  # four estimators of redundancy are trained
def test_compare(tmp_path):
    told = Shell(tmp_path).run(script_of(TUTORIALS / "compare.md", {"experiment=digits": "experiment=digits epochs=4"}))
    assert "9 runs in runs/compare, 1 process each" in told
    assert len(re.findall(r"^(?:ind|ceb|dice)(?: +[\d.]+ +[\d.]+ +3){3}$", told, re.MULTILINE)) == 3
    assert "Name: val/ensemble/accuracy" in told
    assert "wrote fresh.html" in told


def test_photos(tmp_path):
    shell = Shell(tmp_path)
    names = photos(shell.home / "photos")
    (shell.home / "new_photos").mkdir()
    for number in range(3):
        picture(number, np.random.default_rng(number)).save(shell.home / "new_photos" / f"{number}.jpg")
    (shell.home / "new_photos" / "broken.jpg").write_bytes(b"no image")
    small = f"run.name=photos {SMALL.replace('batch_size=32', 'batch_size=16')} data.size=32 tracking=none"
    told = shell.run(script_of(TUTORIALS / "photos.md", {"run.name=photos\n": f"{small}\n"}))
    said = [line for line in told.splitlines()[-3:] if line.startswith(tuple(names))]
    assert len(said) == 3 and "left out" in shell.told and "broken.jpg" in shell.told


def test_serve(tmp_path):
    replaced = {"5050": str(free_port()), "models serve": "models serve --workers 1"}
    told = Shell(tmp_path).run(script_of(TUTORIALS / "serve.md", replaced))
    for name in ("class", "confidence", "mutual_information", "abstain", "ood_score"):
        assert re.search(rf"^{name} \[[^,]+, [^,]+, [^,]+\]$", told, re.MULTILINE), name
    assert "wrote digits.pt2" in told and "wrote student.pt2" in told and "taught by the 3 members" in told


def test_spot(tmp_path):
    shell = Shell(tmp_path)
    told = shell.run(script_of(TUTORIALS / "spot.md", {}))
    assert re.search(r"^\d+ records up to step 2500$", told, re.MULTILINE), told
    assert "the same command continues" in shell.told or "stopped" in shell.told, textwrap.shorten(shell.told, 500)

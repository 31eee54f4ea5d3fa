"""The pages for people who bring their own objects run as they stand, and print what they show."""

import re
import subprocess
import sys

import pytest

from tests.support import CHECKOUT

TUTORIALS = sorted((CHECKOUT / "docs" / "tutorials").glob("your-*.md"))
PAGES = ("README.md", *(path.relative_to(CHECKOUT).as_posix() for path in TUTORIALS))


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page, tmp_path):
    text = (CHECKOUT / page).read_text()
    code, printed = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", text, re.DOTALL).groups()
    (tmp_path / "example.py").write_text(re.sub(r"epochs=\d+", "epochs=3", code))
    ended = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for line in printed.splitlines():
        assert without_numbers(line) in {without_numbers(found) for found in ended.stdout.splitlines()}


def without_numbers(line):
    return re.sub(r"[+-]?[\d.]+", "", line)

"""Docstrings begin with a verb or a noun, and prose avoids words that read as translated."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.support import CHECKOUT

PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/results/*.md", "docs/tutorials/*.md", "launch/k8s/*.md")
CLEAN = ("dicedist/**/*.py", "tests/**/*.py", *PAGES)
BEGINNING = re.compile(r"(What|Whether|Where|Those|As|How|Who|That of)\b")
BANNED = re.compile(r"\b(told|tells|beside|anew|whence|thence|hears|such a one|those (which|who))\b", re.IGNORECASE)


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (words := ast.get_docstring(node)):
            yield node.body[0].lineno, words


def comments(text: str) -> Iterator[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def faults(text: str, is_python: bool) -> Iterator[str]:
    """Yield LINE: FAULT for a Python file or for Markdown."""
    blocks = [*docstrings(text)] if is_python else [(1, text)]
    yield from (f"{line}: begins with {found[0]}" for line, block in blocks if (found := BEGINNING.match(block)))
    lines = [(first + more, words) for first, block in blocks for more, words in enumerate(block.splitlines())]
    for line, words in [*lines, *(comments(text) if is_python else [])]:
        yield from (f"{line}: {found[0]}" for found in BANNED.finditer(words))


@pytest.mark.parametrize("pattern", CLEAN)
def test_words_are_plain(pattern: str) -> None:
    texts = {path.relative_to(CHECKOUT).as_posix(): path.read_text() for path in sorted(CHECKOUT.glob(pattern))}
    found = [f"{name}:{fault}" for name, text in texts.items() for fault in faults(text, name.endswith(".py"))]
    assert texts and not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("pattern", PAGES)
def test_lines_of_pages_fit(pattern: str) -> None:
    """Lines have at most 120 characters, except rows of tables outside the README, which cannot be broken."""
    pages = {path.relative_to(CHECKOUT).as_posix(): path.read_text() for path in CHECKOUT.glob(pattern)}
    lines = [(name, line) for name, text in pages.items() for line in text.splitlines()]
    assert [one for one in lines if len(one[1]) > 120 and not (one[1][0] == "|" and one[0] != "README.md")] == []


def test_faults_are_found() -> None:
    text = '"""Whether it holds.\n\nSays what it was told."""\nx = 1  # anew\n'
    assert [*faults(text, True)] == ["1: begins with Whether", "3: told", "4: anew"]
    assert [*faults("A\n\nbeside it", False)] == ["3: beside"]

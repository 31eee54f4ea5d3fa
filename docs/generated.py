"""Writes what the site is made of, for any generator of Markdown pages: python docs/generated.py [FOLDER]

FOLDER (build) receives docs/, the pages of docs/ and those that are made from the code, so that they cannot say
anything else than it does: the README as the start, notebooks with their outputs, every key, every command, the files
of a run. mkdocs.yml is there too, with every page in its navigation. launch/docs builds the site from both.
"""

import ast
import json
import posixpath
import re
import shutil
import sys
from html import escape
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from dicedist.config.commands import COMMANDS
from dicedist.config.compose import composed
from dicedist.config.schema import Config, keys_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SECTIONS = {"measures.md": "Reference", "intervals.md": "Explanation"}  # of pages that mkdocs.yml does not name
OUTSIDE = re.compile(r"[A-Z]+\.(?:md|cff)")  # files next to the README that it links to
HEAD = ["| key | by default | meaning |", "|---|---|---|"]
EXIT_CODES = ROOT / "dicedist" / "cluster" / "process.py"
FILES = ROOT / "dicedist" / "runs" / "run.py"


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        name = path.relative_to(DOCS).as_posix()
        if path.is_dir() or path.suffix in (".py", ".pyc"):
            continue
        (copy := folder / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(inside(path.read_text(), posixpath.dirname(name)))
        elif path.suffix == ".ipynb":
            text = from_notebook(json.loads(path.read_text()), posixpath.dirname(name))
            copy.with_suffix(".md").write_text(text)
        else:
            shutil.copy(path, copy)
    for name, text in made_from_code().items():
        (folder / "docs" / name).write_text(text)
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config(), sort_keys=False, allow_unicode=True))


def config() -> dict[str, Any]:
    """Return mkdocs.yml with the pages that its navigation leaves out: each in its section, or among `How to`."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (handlers,) = [plugin["mkdocstrings"]["handlers"] for plugin in settings["plugins"] if "mkdocstrings" in plugin]
    handlers["python"]["paths"] = [str(ROOT)]
    listed = json.dumps(settings["nav"])
    sections = {name: pages for entry in settings["nav"] if isinstance(entry, dict) for name, pages in entry.items()}
    for page in sorted(DOCS.glob("*.md")):
        if f'"{page.name}"' not in listed:
            sections[SECTIONS.get(page.name, "How to")].append(page.name)
    return settings


def made_from_code() -> dict[str, str]:
    return {
        "index.md": start(),
        "reference/keys.md": keys(),
        "reference/commands.md": commands(),
        "reference/files.md": "# Files of a run\n\n```\n" + docstring(FILES).partition("\n\n")[2] + "\n```\n",
    }


def start() -> str:
    """The README, whose links lead into docs/ from above."""
    text = (ROOT / "README.md").read_text().replace(".ipynb)", ".md)")
    return inside(re.sub(r"\]\(docs/", "](", text))


def inside(text: str, folder: str = "") -> str:
    """Links to files outside docs/ lead nowhere on the site: their words stay. folder: of the page, in docs/."""

    def kept(link: re.Match[str]) -> str:
        leads_to = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if leads_to.startswith("../") or OUTSIDE.fullmatch(link[2]) else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", kept, text)


def keys() -> str:
    defaults = OmegaConf.to_container(composed("train", []), resolve=False)
    told = {name: entry.metadata["help"] for name, entry in keys_of(Config).items()}
    lines = ["# Keys", "", "Every key of `dicedist train`, from `dicedist/config/schema.py`; write `key=value`.", ""]
    for group in (name for name in told if "." not in name and any(other.startswith(f"{name}.") for other in told)):
        rows = [name for name in told if name.startswith(f"{group}.")]
        lines += [
            f"## {group}",
            "",
            f"{told[group].capitalize()}.",
            "",
            "| key | by default | meaning |",
            "|---|---|---|",
        ]
        lines += [row(name, told[name], value_at(defaults, name)) for name in rows] + [""]
    alone = [name for name in told if "." not in name and not any(other.startswith(f"{name}.") for other in told)]
    table = ["## The run as a whole", "", *HEAD]
    table += [row(name, told[name], value_at(defaults, name)) for name in alone] + [""]
    return "\n".join(lines[:4] + table + lines[4:])


def row(name: str, meaning: str, value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    shown = shown if len(shown) < 60 else shown[:57] + "..."
    return f"| `{name}` | {f'`{shown}`' if shown else ''} | {escape(meaning).replace('|', chr(92) + '|')} |"


def value_at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def commands() -> str:
    lines = ["# Commands and exit codes", "", docstring(EXIT_CODES).split("\n\n")[1].replace("\n", " "), ""]
    for name, purpose in COMMANDS.items():
        module = ROOT / "dicedist" / f"{name}.py"
        if module.exists():
            lines += [f"## {name}", "", f"`dicedist {name}`: {purpose}.", "", "```", docstring(module), "```", ""]
    return "\n".join(lines)


def docstring(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").strip()


def from_notebook(notebook: dict[str, Any], folder: str) -> str:
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(inside(source, folder) if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = cell.get("outputs", [])
        printed = "".join("".join(output.get("text", "")) for output in outputs)
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
        parts += [shown(output["data"]) for output in outputs if "data" in output]
    return "\n\n".join(parts) + "\n"


def shown(data: dict[str, list[str]]) -> str:
    if "text/html" in data:
        return "".join(data["text/html"])
    return f"```text\n{''.join(data['text/plain'])}\n```"


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build")

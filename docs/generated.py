"""Pages of the site that are made from the code when it is built, so that they cannot say anything else than it does.

mkdocs calls on_config and on_files. The pages: the README as the start, notebooks with their outputs, every key, every
command, the files of a run.
"""

import ast
import json
import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from omegaconf import OmegaConf

from dicedist.config.commands import COMMANDS
from dicedist.config.compose import composed
from dicedist.config.keys import keys_of
from dicedist.config.schema import Config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SECTIONS = {"measures.md": "Reference", "intervals.md": "Explanation"}  # of pages that mkdocs.yml does not name
OUTSIDE = re.compile(r"[A-Z]+\.(?:md|cff)")  # of the README, beside it
HEAD = ["| key | by default | meaning |", "|---|---|---|"]
EXIT_CODES = ROOT / "dicedist" / "cluster" / "process.py"
FILES = ROOT / "dicedist" / "runs" / "run.py"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A page that mkdocs.yml does not name is still found: in its section, or among those that tell how to."""
    listed = json.dumps(config.nav)
    for page in sorted(DOCS.glob("*.md")):
        if f'"{page.name}"' not in listed:
            section = SECTIONS.get(page.name, "How to")
            next(entry[section] for entry in config.nav if isinstance(entry, dict) and section in entry).append(
                page.name
            )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "index.md": start(),
        "reference/keys.md": keys(),
        "reference/commands.md": commands(),
        "reference/files.md": "# Files of a run\n\n```\n" + docstring(FILES).partition("\n\n")[2] + "\n```\n",
    }
    for notebook in sorted(DOCS.glob("tutorials/*.ipynb")):
        pages[f"tutorials/{notebook.stem}.md"] = from_notebook(json.loads(notebook.read_text()), "tutorials")
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for file in list(files):
        if file.src_uri.endswith(".md") and file.src_uri not in pages and not file.generated_by:
            file.content_string = inside(file.content_string, posixpath.dirname(file.src_uri))
    return files


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

"""Adds the built site to a folder with one site per version: python docs/versions.py SITE FOLDER

FOLDER/VERSION is the site, FOLDER/versions.json the list that the menu of every version reads (in the form of the
program mike, which this theme expects), and FOLDER/index.html leads to the newest version.
"""

import json
import shutil
import sys
from pathlib import Path

from packaging.version import Version

from dicedist import __version__


def add(site: Path, folder: Path, version: str) -> None:
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    versions = sorted((path.parent.name for path in folder.glob("*/index.html")), key=Version, reverse=True)
    rows = [{"version": name, "title": name, "aliases": ["latest"] * (name == versions[0])} for name in versions]
    (folder / "versions.json").write_text(json.dumps(rows, indent=1))
    (folder / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n')


if __name__ == "__main__":
    add(Path(sys.argv[1]), Path(sys.argv[2]), __version__)

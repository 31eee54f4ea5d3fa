"""Metadata of a release that only its repository knows: its URLs, and absolute links in the README for PyPI.

The release workflow sets DICEDIST_REPOSITORY to the repository's URL. Other builds leave it out: their README is as
written, and no address is invented.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAPER = "https://openreview.net/forum?id=R2ZlTVPx0Gk"
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


class Release(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("DICEDIST_REPOSITORY", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text()
        metadata["urls"] = {"Paper": PAPER}
        if repository:
            metadata["urls"] |= {
                "Source": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            }
            text = absolute(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """Return the text with links into the repository at this tag, and images as raw files."""

    def full(link: re.Match[str]) -> str:
        image, words, path = link.groups()
        return f"{image}{words}({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    return RELATIVE.sub(full, text)

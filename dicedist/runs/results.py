"""The results of an evaluation, in files that are written together and belong together.

evaluation.json is written last, and names the digest of each other file, the step and the checkpoint. Readers refuse a
file that it does not name. Writers hold a lock, and results of an earlier step never replace those of a later one:
`Findings.save`.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from dicedist.config import Config
from dicedist.runs.checkpoint import Checkpoint
from dicedist.runs.files import digest, draft_json, draft_tensors, publish, read_json, read_plain
from dicedist.runs.lock import locked

FILES = "files"  # the key of evaluation.json that holds the digests
LARGEST_TENSORS = 2**36  # bytes


class Results:
    """A folder that an evaluation is written to: the folder of a run, or a separate one."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def result_file(self) -> Path:
        return self.directory / "evaluation.json"

    @property
    def logits_file(self) -> Path:
        return self.directory / "logits.safetensors"

    @property
    def gallery_file(self) -> Path:
        return self.directory / "gallery.safetensors"

    @property
    def report_file(self) -> Path:
        return self.directory / "report.html"

    @property
    def files(self) -> list[Path]:
        """The one that says that there are results comes last."""
        return [self.logits_file, self.gallery_file, self.report_file, self.result_file]

    def result(self, step: int | None = None) -> dict[str, Any] | None:
        """The results of the evaluation; None if they were not written, are damaged, or not of this step, if given."""
        try:
            found = read_json(self.result_file)
        except (OSError, ValueError):
            return None
        return found if step in (None, found.get("step", step)) else None

    def tensors(self, path: Path, result: Mapping[str, Any]) -> dict[str, Tensor]:
        """Load the logits or the gallery that belong to a result; ValueError if the file is of another evaluation.

        Results of earlier versions name no files.
        """
        content = read_plain(path, LARGEST_TENSORS)
        if not is_named(result, path, hashlib.sha256(content).hexdigest()):
            raise ValueError(f"{path} is not of the evaluation in {self.result_file.name}: evaluate again")
        try:
            return load(content)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: evaluate again") from error

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Let one process at a time write results to this folder, which is created if needed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return locked(self.directory / ".results.lock")

    def write_result(
        self,
        result: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        gallery: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write everything under other names first, so that a full disk leaves the earlier results whole."""
        self.directory.mkdir(parents=True, exist_ok=True)
        given = {path: values for path, values in ((self.logits_file, tensors), (self.gallery_file, gallery)) if values}
        drafts = {path: draft_tensors(values, path) for path, values in given.items()}
        digests = {FILES: {path.name: digest(draft) for path, draft in drafts.items()}} if drafts else {}
        drafts[self.result_file] = draft_json({**result, **digests}, self.result_file)
        publish(drafts)

    def aside(self, step: int) -> "Results":
        """The results of an earlier step, which must not replace these."""
        return Results(self.directory.with_name(f"{self.directory.name}_step-{step}"))


def is_named(result: Mapping[str, Any], path: Path, sha256: str | None = None) -> bool:
    """Return whether a result has a file of this name and, if given, of this digest."""
    if FILES not in result:
        return True
    named = result[FILES].get(path.name) if isinstance(result[FILES], dict) else None
    return named is not None and sha256 in (None, named)


def origin(config: Config, found: Checkpoint) -> dict[str, str]:
    """Name the weights that are measured, for evaluation.json."""
    return {"checkpoint": found.sha256, "weights": "ema" if config.uses_average else "last"}

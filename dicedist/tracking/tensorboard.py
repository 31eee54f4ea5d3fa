"""TensorBoard as a destination: event files in the run's folder, for `tensorboard --logdir runs`.

Each mirror starts a new file, which replaces the earlier ones. So TensorBoard shows exactly the records of the run,
also after the run went back to a checkpoint or was copied from another machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from dicedist.config import Config, flatten
from dicedist.config.compose import chosen_settings
from dicedist.reporting.svg import Figure
from dicedist.runs.run import Run
from dicedist.tracking.destination import Destination, numbers_in
from dicedist.tracking.mirror import FINISHED, values_of

COMPARED = ("data.name", "method.name", "network.name", "structure", "ensemble.size", "seed")
SUMMARY = ("test/ensemble/accuracy", "test/ensemble/nll", "test/ensemble/ece", "test/members/accuracy")


class TensorBoard(Destination):
    name = "tensorboard"

    def __init__(self, run: Run, config: Config):
        super().__init__(run, config)
        self.writer: SummaryWriter | None = None
        self.last_step = 0

    @property
    def shown(self) -> str:
        return str(self.run)

    def begin(self) -> bool:
        if self.writer is not None:
            return False
        for path in self.run.event_files[:-1]:  # keep the last: a running TensorBoard reads it
            path.unlink(missing_ok=True)
        self.writer = SummaryWriter(str(self.run.directory), purge_step=0)
        # In backquotes, because underscores are emphasis in Markdown.
        rows = "\n".join(f"| `{key}` | `{value}` |" for key, value in self.settings().items())
        self.writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)
        return True

    def start_over(self) -> bool:
        assert self.writer is not None
        self.writer.close()
        self.writer = None
        return self.begin()

    def settings(self) -> dict[str, Any]:
        return flatten(self.run.plan().resolve(self.config))

    def send_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        assert self.writer is not None
        for record in records:
            step = int(record["step"])
            self.last_step = max(self.last_step, step)
            for name, value in numbers_in(record).items():
                self.writer.add_scalar(name, value, step, walltime=record.get("time"))
        self.writer.flush()

    def send_result(self, values: Mapping[str, float]) -> None:
        """Send all results but those that `close` sends with the hyperparameters."""
        assert self.writer is not None
        for name in values.keys() - set(SUMMARY):
            self.writer.add_scalar(name, values[name], self.last_step)

    def send_files(self, figures: Mapping[str, Figure], files: Sequence[Path]) -> None:
        """Send the path of the report: TensorBoard shows no SVG."""
        assert self.writer is not None
        self.writer.add_text("report", f"`{self.run.report_file}`", 0)

    def close(self, status: str) -> None:
        assert self.writer is not None
        self.writer.add_text("status", status, 0)
        self.writer.flush()
        if status == FINISHED:  # in a separate file, which TensorBoard reads last
            figures = {name: value for name, value in values_of(self.run).items() if name in SUMMARY}
            self.writer.add_hparams(self.hyperparameters(), figures, run_name=".", global_step=self.last_step)
        self.writer.close()
        self.writer = None

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings by which TensorBoard compares runs: a fixed few, and all that differ from the default."""
        settings, plain = self.settings(), bool | int | float | str
        chosen = {key: settings[key] for key in (*COMPARED, *chosen_settings(self.config))}
        return {key: value if isinstance(value, plain) else str(value) for key, value in chosen.items()}

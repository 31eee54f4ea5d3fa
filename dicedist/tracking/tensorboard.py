"""TensorBoard as a destination: one event file in the run's folder, for `tensorboard --logdir runs`.

The file is written again whenever a mirror starts. So it holds exactly the records of the run, also after the run went
back to a checkpoint or was copied from elsewhere, and needs no memory of what was sent.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from dicedist.config import Config, flatten
from dicedist.reporting.svg import Figure
from dicedist.runs.run import Run
from dicedist.tracking.destination import Destination, numbers_in


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
        earlier = self.run.event_files
        # A TensorBoard that has read an earlier file forgets what it read at this mark.
        self.writer = SummaryWriter(str(self.run.directory), purge_step=0)
        settings = flatten(self.run.plan().resolve(self.config))
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self.writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)
        for path in earlier:
            path.unlink(missing_ok=True)
        return True

    def send_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        assert self.writer is not None
        for record in records:
            self.last_step = int(record["step"])
            for name, value in numbers_in(record).items():
                self.writer.add_scalar(name, value, self.last_step, walltime=record.get("time"))
        self.writer.flush()

    def send_result(self, values: Mapping[str, float]) -> None:
        assert self.writer is not None
        for name, value in values.items():
            self.writer.add_scalar(name, value, self.last_step)

    def send_files(self, figures: Mapping[str, Figure], files: Sequence[Path]) -> None:
        """Name the report: TensorBoard shows no SVG."""
        assert self.writer is not None
        self.writer.add_text("report", f"`{self.run.report_file}`", 0)

    def close(self, status: str) -> None:
        assert self.writer is not None
        self.writer.add_text("status", status, 0)
        self.writer.close()
        self.writer = None

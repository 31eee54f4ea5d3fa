"""A second CUDA stream, on which the discriminator learns while members run backward on the same GPU."""

import contextlib
import functools
from collections.abc import Iterator

import torch


class SideStream:
    """A second stream. Without `overlaps` everything runs on the current stream, in the order of the code."""

    def __init__(self, device: torch.device, overlaps: bool):
        self.device, self.overlaps = device, overlaps and device.type == "cuda"

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the body on the second stream, after all work queued on the current stream so far."""
        if not self.overlaps:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Order later work on the current stream after the body: it sees the new weights and may reuse memory."""
        if self.overlaps:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

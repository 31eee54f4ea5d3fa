"""The ensemble of another run as a teacher: it predicts the training inputs as its students see them.

Legend: B inputs, T members of the teacher, K classes.
"""

import torch
from torch import Tensor, nn

from dicedist.cluster.placement import REPORTER
from dicedist.cluster.process import this_rank
from dicedist.config.schema import Config
from dicedist.data.sources import Source
from dicedist.evaluation.about import VECTORS
from dicedist.evaluation.ensemble import Ensemble, as_in_training
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs.run import Run
from dicedist.runs.weights import digest


class Teacher(nn.Module):
    """Returns logits [B, T, K] for inputs that are normalized for the students; it changes to its own normalization."""

    factor: Tensor
    shift: Tensor

    def __init__(self, ensemble: Ensemble, source: Source, origin: str):
        super().__init__()
        self.ensemble = ensemble
        refuse_another(ensemble, source, origin)
        each = (-1,) if source.kind == VECTORS else (-1, 1, 1)
        own, theirs = (
            [torch.tensor(values, dtype=torch.float64).view(each) for values in (one.mean, one.std)]
            for one in (ensemble.about, source)
        )
        self.same = own[0].equal(theirs[0]) and own[1].equal(theirs[1])
        self.register_buffer("factor", (theirs[1] / own[1]).float())
        self.register_buffer("shift", ((theirs[0] - own[0]) / own[1]).float())

    @classmethod
    def of(cls, config: Config, source: Source, device: torch.device) -> "Teacher":
        """Load the run that the config names; code of a user's own network runs only if the config trusts it."""
        assert config.teacher.run is not None
        run = Run.open(config.teacher.run)
        if this_rank() == REPORTER:
            run.checkpoint()  # warns if it is not the newest; a teacher needs no warnings about calibration
        ensemble = load_ensemble(run, trusted=config.teacher.trusted, tell=lambda text: None)
        return cls(as_in_training(ensemble), source, config.teacher.run).to(device)

    def __len__(self) -> int:
        return len(self.ensemble)

    @property
    def digests(self) -> list[str]:
        """Return the sha256 of each member's weights, including its trunk."""
        weights, found = self.ensemble.state_dict(), []
        for place in range(len(self)):
            own = (f"encoders.{place}.", f"classifiers.{place}.", "trunk.")
            found.append(digest({name: value.cpu() for name, value in weights.items() if name.startswith(own)}))
        return found

    @property
    def bytes(self) -> int:
        return sum(value.numel() * value.itemsize for value in self.state_dict().values())

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        means, _ = self.ensemble.encode(inputs if self.same else inputs * self.factor + self.shift)
        return torch.stack(self.ensemble.classify(means), dim=1)


def refuse_another(ensemble: Ensemble, source: Source, origin: str) -> None:
    about = ensemble.about
    if about.class_names != list(source.class_names):
        raise ValueError(
            f"the teacher {origin} has {len(about.class_names)} classes, these data have {source.num_classes}, or the "
            "names differ: choose data with the teacher's classes, or another teacher.run"
        )
    taken = list(about.input_shape)
    if taken != list(source.shape):
        raise ValueError(
            f"the teacher {origin} takes inputs of shape {taken}, and these data have {list(source.shape)}: "
            + ("write data.size=" + str(about.size) if len(taken) == len(source.shape) == 3 else "choose other data")
        )

"""A run's ensemble as an MLflow model: a pt2 file, its signature, and the code that serves it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dicedist.evaluation.formats import export, images_to_check
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs.run import Run

SERVING = Path(__file__).with_name("serving.py")


def packed(run: Run, images: str | None, path: Path, trusted: bool) -> dict[str, Any]:
    """Export the ensemble of a run's last checkpoint. Return what MLflow needs to log it."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    ensemble = load_ensemble(run, images=images or "uint8", trusted=trusted)
    example, _ = images_to_check(run, ensemble.about)
    export(ensemble, path, "pt2", example)
    answers = {name: value.numpy() for name, value in ensemble(example).items()}
    outputs = [TensorSpec(value.dtype, (-1, *value.shape[1:]), name) for name, value in answers.items()]
    return {
        "artifacts": {"ensemble": str(path)},
        "signature": ModelSignature(
            Schema([TensorSpec(example.numpy().dtype, (-1, *example.shape[1:]))]),
            Schema([TensorSpec(np.dtype("str"), (-1,), "class"), *outputs]),
        ),
        "input_example": example[:2].numpy(),
        "metadata": {"class_names": ensemble.about.class_names, "calibration": ensemble.about.calibration},
        "pip_requirements": [f"torch=={torch.__version__.partition('+')[0]}", f"mlflow=={version('mlflow')}"],
    }

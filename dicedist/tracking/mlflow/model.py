"""A run's ensemble as an MLflow model: a pt2 file, its signature, and the code that serves it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dicedist.evaluation.about import VECTORS
from dicedist.evaluation.formats import export, images_to_check
from dicedist.evaluation.loading import load_ensemble
from dicedist.runs.run import Run
from dicedist.tracking.mlflow.registry import described_inputs

SERVING = Path(__file__).with_name("serving.py")


def packed(run: Run, images: str | None, path: Path, trusted: bool) -> dict[str, Any]:
    """Export the ensemble of a run's last checkpoint. Return the arguments with which MLflow logs it.

    Only a model of vectors has inputs in its signature, because with them MLflow would refuse base64 images.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    ensemble = load_ensemble(run, images=images or "uint8", trusted=trusted)
    about = ensemble.about
    example, _ = images_to_check(run, about)
    export(ensemble, path, "pt2", example)
    answers = {name: value.numpy() for name, value in ensemble(example).items()}
    outputs = [TensorSpec(value.dtype, (-1, *value.shape[1:]), name) for name, value in answers.items()]
    taken = TensorSpec(example.numpy().dtype, (-1, *example.shape[1:]))
    needed = {"torch": torch.__version__.partition("+")[0], "mlflow": version("mlflow"), "pillow": version("pillow")}
    return {
        "artifacts": {"ensemble": str(path)},
        "signature": ModelSignature(
            Schema([taken]) if about.images == VECTORS else None,
            Schema([TensorSpec(np.dtype("str"), (-1,), "class"), *outputs]),
        ),
        "input_example": example[:2].numpy(),
        "metadata": {
            "inputs": described_inputs(taken.type, taken.shape),
            "class_names": about.class_names,
            "calibration": about.calibration,
        },
        "pip_requirements": [f"{name}=={release}" for name, release in needed.items()],
    }

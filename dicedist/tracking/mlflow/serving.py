"""The ensemble as MLflow serves it: MLflow stores this file with the model and runs it, without dicedist or pickle."""

import json
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext


class ServedEnsemble(PythonModel):
    def load_context(self, context: PythonModelContext) -> None:
        about = {"about": ""}
        self.program = torch.export.load(context.artifacts["ensemble"], extra_files=about).module()
        self.about = json.loads(about["about"])
        self.class_names = np.array(self.about["class_names"])

    def predict(
        self, context: PythonModelContext, model_input: np.ndarray, params: Any = None
    ) -> dict[str, np.ndarray]:
        self.refuse_unfit(model_input)
        with torch.inference_mode():
            answers = self.program(torch.from_numpy(np.ascontiguousarray(model_input)))
        arrays = {name: value.numpy() for name, value in answers.items()}
        return {"class": self.class_names[arrays["label"]], **arrays}

    def refuse_unfit(self, images: np.ndarray) -> None:
        """Inputs of another size or range would be answered, and wrongly; MLflow turns this into a 400."""
        size, is_uint8 = self.about["size"], self.about["images"] == "uint8"
        shape = (size, size, 3) if is_uint8 else (3, size, size)
        reason, width = None, len(self.about["mean"])
        if self.about["images"] == "vectors":
            if images.ndim != 2 or images.shape[1] != width or not len(images):
                reason = f"vectors have shape {list(images.shape)}, and this model takes [N, {width}]"
            elif not np.isfinite(images).all():
                reason = "a value is not a finite number"
        elif images.ndim != 4 or images.shape[1:] != shape or not len(images):
            reason = f"images have shape {list(images.shape)}, and this model takes [N, {', '.join(map(str, shape))}]"
        elif is_uint8 and images.max() <= 1:  # MLflow has cut floats to whole numbers by now
            reason = f"the brightest pixel is {images.max()} of 255: this model takes uint8 images, not floats in 0..1"
        elif not is_uint8 and not (images.min() >= 0 and images.max() <= 1):
            reason = f"pixels lie in {images.min():.3g}..{images.max():.3g}: this model takes floats in 0..1"
        if reason:
            raise MlflowException.invalid_parameter_value(reason)


mlflow.models.set_model(ServedEnsemble())

"""The ensemble as MLflow serves it: MLflow stores this file with the model and runs it, without dicedist or pickle."""

import json
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc import PythonModel, PythonModelContext


class ServedEnsemble(PythonModel):
    def load_context(self, context: PythonModelContext) -> None:
        about = {"about": ""}
        self.program = torch.export.load(context.artifacts["ensemble"], extra_files=about).module()
        self.class_names = np.array(json.loads(about["about"])["class_names"])

    def predict(
        self, context: PythonModelContext, model_input: np.ndarray, params: Any = None
    ) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            answers = self.program(torch.from_numpy(np.ascontiguousarray(model_input)))
        arrays = {name: value.numpy() for name, value in answers.items()}
        return {"class": self.class_names[arrays["label"]], **arrays}


mlflow.models.set_model(ServedEnsemble())

"""The ensemble as MLflow serves it: MLflow stores this file with the model and runs it, without dicedist or pickle.

Images arrive as arrays, or as the base64 text of JPEG or PNG files. MLFLOW_DEFAULT_PREDICTION_DEVICE names the device;
without it a GPU is used if there is one.
"""

import base64
import io
import json
import os
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext
from PIL import Image, ImageOps
from torch.export.passes import move_to_device_pass

FORMATS = ("JPEG", "PNG")
MODES = {1: "L", 3: "RGB"}  # channels -> the name that PIL has for them


class ServedEnsemble(PythonModel):
    def load_context(self, context: PythonModelContext) -> None:
        about = {"about": ""}
        program = torch.export.load(context.artifacts["ensemble"], extra_files=about)
        usual = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(os.environ.get("MLFLOW_DEFAULT_PREDICTION_DEVICE") or usual)
        self.program = move_to_device_pass(program, self.device).module()
        self.about = json.loads(about["about"])
        self.class_names = np.array(self.about["class_names"])

    def predict(
        self, context: PythonModelContext, model_input: np.ndarray, params: Any = None
    ) -> dict[str, np.ndarray]:
        given = np.asarray(model_input)
        inputs = self.decoded(given) if given.dtype.kind == "U" else self.taken(given)
        with torch.inference_mode():
            answers = self.program(torch.from_numpy(np.ascontiguousarray(inputs)).to(self.device))
        arrays = {name: value.cpu().numpy() for name, value in answers.items()}
        return {"class": self.class_names[arrays["label"]], **arrays}

    def taken(self, given: np.ndarray) -> np.ndarray:
        """Convert arrays to the type of the program's input. JSON has no types, so integers may have any."""
        refuse(given.dtype.kind not in "iufb", f"inputs are {given.dtype}, and this model takes numbers")
        self.refuse_unfit(given)
        return given.astype(np.uint8 if self.about["images"] == "uint8" else np.float32)

    def decoded(self, texts: np.ndarray) -> np.ndarray:
        """Decode base64 images, and resize them as training did: scale the short side, crop the center."""
        refuse(self.about["images"] == "vectors", "inputs are text, and this model takes vectors")
        channels = len(self.about["mean"])
        refuse(channels not in MODES, f"inputs are text, and this model takes arrays of {channels} channels")
        refuse(texts.ndim != 1 or not len(texts), f"text has shape {list(texts.shape)}: give a list of base64 images")
        images_NHWC = np.stack([decoded_image(str(text), self.about["size"], channels) for text in texts])
        if self.about["images"] == "uint8":
            return images_NHWC
        return (images_NHWC.transpose(0, 3, 1, 2) / 255).astype(np.float32)

    def refuse_unfit(self, given: np.ndarray) -> None:
        """Refuse inputs of another size or range, whose answers would be wrong. MLflow answers with status 400."""
        size, kind, width = self.about["size"], self.about["images"], len(self.about["mean"])  # channels, or values
        shape = {"uint8": (size, size, width), "float": (width, size, size), "vectors": (width,)}[kind]
        noun, wanted = "vectors" if kind == "vectors" else "images", ", ".join(map(str, shape))
        unfit = given.shape[1:] != shape or not len(given)
        refuse(unfit, f"{noun} have shape {list(given.shape)}, and this model takes [N, {wanted}]")
        low, high = given.min(), given.max()
        found = f"pixels lie in {low:.3g}..{high:.3g}"
        if kind == "vectors":
            refuse(not np.isfinite(given).all(), "a value is not a finite number")
        elif kind == "float":
            refuse(not (low >= 0 and high <= 1), f"{found}: this model takes floats in 0..1")
        else:
            whole = given.dtype.kind in "iu" or bool((given == np.floor(given)).all())
            fits = whole and low >= 0 and 1 < high <= 255
            refuse(not fits, f"{found}: this model takes uint8 images, not floats in 0..1")


def decoded_image(text: str, size: int, channels: int) -> np.ndarray:
    """Decode a JPEG or PNG to uint8 [size, size, C]. The base64 text may begin with data:image/png;base64,"""
    try:
        file = io.BytesIO(base64.b64decode(text.rpartition(",")[2], validate=True))
        image: Image.Image = ImageOps.exif_transpose(Image.open(file, formats=FORMATS))
        if image.mode.startswith("I;16"):  # convert() would clip the 16 bits to 8 instead of scaling them
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert(MODES[channels])
        width, height = (int(side * size / min(image.size) + 0.5) for side in image.size)
        left, top = ((side - size + 1) // 2 for side in (width, height))
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.atleast_3d(np.asarray(resized.crop((left, top, left + size, top + size))))
    except Exception as error:  # PIL raises any kind of error for a damaged file
        raise MlflowException.invalid_parameter_value(f"not a JPEG or PNG image as base64 text: {error}") from error


def refuse(wrong: bool, reason: str) -> None:
    if wrong:
        raise MlflowException.invalid_parameter_value(reason)


mlflow.models.set_model(ServedEnsemble())

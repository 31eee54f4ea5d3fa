"""Exports an ensemble as one file (pt2, onnx or safetensors), which is loaded and checked before it gets its name."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from dicedist.algorithm.randomness import generator
from dicedist.data import sources
from dicedist.evaluation.ensemble import About, Ensemble
from dicedist.runs.checkpoint import sync
from dicedist.runs.run import Run

ABOUT = "about"
DYNAMIC = {"images": {0: torch.export.Dim("N", min=1)}}
TOLERANCE = 1e-4
CHECKED_ON = 8  # images together, and on the first alone
Outputs = dict[str, Tensor]
Answers = Callable[[Tensor], Outputs]


def images_to_check(run: Run, about: About) -> tuple[Tensor, str]:
    """Images as the ensemble takes them, from the run's test set if available, else random; and a description."""
    config = run.config().data
    try:
        test = sources.load(replace(config, download=False)).test
        images_NHWC = test.take(torch.arange(CHECKED_ON) % len(test))
        described = f"test images of {config.name}"
    except (ValueError, OSError):
        draws = generator("cpu", 0, "export")
        images_NHWC = torch.randint(256, (CHECKED_ON, about.size, about.size, 3), dtype=torch.uint8, generator=draws)
        described = f"random images, as {config.name} is not at hand"
    return images_NHWC if about.images == "uint8" else images_NHWC.permute(0, 3, 1, 2) / 255, described


def export(ensemble: Ensemble, output: Path, format: str, images: Tensor) -> float:
    """Returns the largest difference between the outputs of the file and the networks, on all images and on one."""
    write, read = FORMATS[format]
    if output.is_dir():
        raise ValueError(f"{output} is a folder: name a file")
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".partial-", dir=output.parent) as folder, warnings.catch_warnings(action="ignore"):
        draft = Path(folder) / f"{output.stem}.{format}"  # torch.export.save insists on its suffix
        write(ensemble, draft, images)
        answers = read(draft)
        difference = largest_difference(ensemble, answers, (images, images[:1]))
        if not difference <= TOLERANCE:
            raise ValueError(f"{output}: not written, what it answers is {difference:.1g} off what the networks answer")
        sync(draft)
        draft.replace(output)
    return difference


def largest_difference(ensemble: Ensemble, answers: Answers, batches: Sequence[Tensor]) -> float:
    differences = [
        (value.double() - found[name].double()).abs().max()
        for images in batches
        for expected, found in [(ensemble(images), answers(images))]
        for name, value in expected.items()
    ]
    return torch.stack(differences).max().item()  # torch's max keeps a NaN; Python's max() may drop it


def write_pt2(ensemble: Ensemble, path: Path, images: Tensor) -> None:
    program = torch.export.export(ensemble, (images,), dynamic_shapes=DYNAMIC)
    program.example_inputs = None  # the file must not contain the images
    torch.export.save(program, path, extra_files={ABOUT: as_json(ensemble.about)})


def read_pt2(path: Path) -> Answers:
    return torch.export.load(path).module()


def write_onnx(ensemble: Ensemble, path: Path, images: Tensor) -> None:
    program = torch.onnx.export(
        ensemble,
        (images,),
        dynamo=True,
        dynamic_shapes=DYNAMIC,
        input_names=["images"],
        output_names=list(ensemble(images)),
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props[ABOUT] = as_json(ensemble.about)
    program.save(path, external_data=False)


def read_onnx(path: Path) -> Answers:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def answers(images: Tensor) -> Outputs:
        return dict(zip(names, map(torch.from_numpy, session.run(None, {"images": images.numpy()})), strict=True))

    return answers


def write_safetensors(ensemble: Ensemble, path: Path, images: Tensor) -> None:
    weights = {name: value.contiguous() for name, value in ensemble.state_dict().items()}
    path.write_bytes(save(weights, {ABOUT: as_json(ensemble.about)}))  # other users cannot read save_file's output


def read_ensemble(path: Path, trusted: bool = False) -> Ensemble:
    """Reads a file of format=safetensors. trusted: may run the code of a user's own network."""
    try:
        with safe_open(path, "pt") as file:
            about = About(**json.loads(file.metadata()[ABOUT]))
        weights = load_file(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{path} is not an ensemble that dicedist.export wrote") from error
    return Ensemble(about, trusted).load(weights, path)


def as_json(about: About) -> str:
    return json.dumps(asdict(about))


FORMATS: dict[str, tuple[Callable[[Ensemble, Path, Tensor], None], Callable[[Path], Answers]]] = {
    "pt2": (write_pt2, read_pt2),
    "onnx": (write_onnx, read_onnx),
    "safetensors": (write_safetensors, read_ensemble),
}

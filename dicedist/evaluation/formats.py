"""Export an ensemble as one file (pt2, onnx or safetensors), which is loaded and checked before it gets its name."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from dicedist.algorithm.randomness import generator
from dicedist.data import sources
from dicedist.evaluation.about import VECTORS, About, not_ours
from dicedist.evaluation.calibration import parsed
from dicedist.evaluation.ensemble import Ensemble, restored
from dicedist.runs.files import sync
from dicedist.runs.run import Run

ABOUT = "about"
DYNAMIC = {"images": {0: torch.export.Dim("N", min=1)}}
TOLERANCE = 1e-4
CHECKED_ON = 8  # images in one batch; the first image is also checked alone
Outputs = dict[str, Tensor]
Answers = Callable[[Tensor], Outputs]


def images_to_check(run: Run, about: About) -> tuple[Tensor, str]:
    """Return inputs from the run's test set if available, otherwise random inputs; and a description of them."""
    config, kind = run.config().data, VECTORS if about.images == VECTORS else "images"
    try:
        test = sources.load(sources.of_run(config)).test
        images_NHWC = test.take(torch.arange(CHECKED_ON) % len(test))
        described = f"test {kind} of {config.name}"
    except (ValueError, OSError):
        return random_inputs(about), f"random {kind}, because {config.name} is not available"
    return images_NHWC if about.images != "float" else images_NHWC.permute(0, 3, 1, 2) / 255, described


def random_inputs(about: About) -> Tensor:
    draws = generator("cpu", 0, "export")
    if about.images == VECTORS:
        return torch.randn(CHECKED_ON, len(about.mean), generator=draws)
    channels, size, _ = about.input_shape
    images_NHWC = torch.randint(256, (CHECKED_ON, size, size, channels), dtype=torch.uint8, generator=draws)
    return images_NHWC if about.images == "uint8" else images_NHWC.permute(0, 3, 1, 2) / 255


def export(ensemble: Ensemble, output: Path, format: str, images: Tensor) -> float:
    """Write the file. Return the largest difference between its outputs and the networks', on all images and on one."""
    write, read = FORMATS[format]
    if output.is_dir():
        raise ValueError(f"{output} is a folder: name a file")
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".partial-", dir=output.parent) as folder, warnings.catch_warnings(action="ignore"):
        draft = Path(folder) / f"{output.stem}.{format}"  # torch.export.save requires this suffix
        write(ensemble, draft, images)
        answers = read(draft)
        difference = largest_difference(ensemble, answers, (images, images[:1]))
        if not difference <= TOLERANCE:
            remedy = "; write format=pt2, or train at the network's own data.size" if format == "onnx" else ""
            raise ValueError(
                f"{output}: not written, its answers differ by {difference:.1g} from those of the networks{remedy}"
            )
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
    try:
        torch.export.save(program, path, extra_files={ABOUT: ensemble.about.as_json()})
    except RuntimeError as error:
        if "PytorchStreamWriter" in str(error):  # for example on a full disk
            raise OSError(f"{path.name} could not be written: {str(error).splitlines()[0]}") from error
        raise


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
    program.model.metadata_props[ABOUT] = ensemble.about.as_json()
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
    path.write_bytes(save(weights, {ABOUT: ensemble.about.as_json()}))  # save_file would hide the file from other users


def read_ensemble(path: Path, trusted: bool = False) -> Ensemble:
    """Read a file of format=safetensors. trusted: allows the code of a user's own network to run."""
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {})[ABOUT]
        weights = load_file(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(not_ours(path)) from error
    about = About.parse(text, path)
    try:
        if about.calibration is not None:
            parsed(about.calibration, len(about.class_names))
    except ValueError as error:
        raise ValueError(f"{not_ours(path)}: {error}") from error
    return restored(about, trusted, weights, path)


class Program(Ensemble):
    """The ensemble of a pt2 file: a graph that predicts; its members cannot be separated."""

    def __init__(self, path: Path) -> None:
        nn.Module.__init__(self)
        extra = {ABOUT: ""}
        if not is_zipfile(path):  # torch would also log the reason
            raise ValueError(not_ours(path))
        try:
            self.exported = torch.export.load(path, extra_files=extra)
        except Exception as error:  # torch may raise anything for a damaged file
            raise ValueError(not_ours(path)) from error
        self.path, self.about = path, About.parse(extra[ABOUT], path)
        self.graph = self.exported.module()
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    def to(self, device: Any) -> Self:  # type: ignore[override]
        """Move to a device, but keep the precision of the graph. A plain `to` would not change devices in the graph."""
        self._device = torch.device(device)
        self.exported = move_to_device_pass(self.exported, self._device)
        self.graph = self.exported.module()
        return self

    def answer(self, images: Tensor) -> Outputs:
        outputs: Outputs = self.graph(images)
        if "member_labels" not in outputs:
            raise ValueError(f"{self.path} was exported by an earlier version of dicedist: export the run again")
        return outputs

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(f"{self.path} only predicts: load the run, or export it as safetensors")

    features = calibrate = evaluate = export = save = refuse

    def __getitem__(self, index: Any) -> Ensemble:
        raise ValueError(f"{self.path} holds all members in one graph: load the run, or export it as safetensors")


def read(path: Path, trusted: bool) -> Ensemble:
    if path.suffix == ".onnx":
        raise ValueError(f"{path} needs onnxruntime: load the run, or export it as safetensors or pt2")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return Program(path) if path.suffix == ".pt2" else read_ensemble(path, trusted)


FORMATS: dict[str, tuple[Callable[[Ensemble, Path, Tensor], None], Callable[[Path], Answers]]] = {
    "pt2": (write_pt2, Program),
    "onnx": (write_onnx, read_onnx),
    "safetensors": (write_safetensors, partial(read_ensemble, trusted=True)),  # its code has already run
}

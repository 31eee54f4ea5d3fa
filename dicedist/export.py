"""Write an ensemble, a member or a student as one file that needs neither the run nor, but for safetensors, dicedist.

Examples:
    python -m dicedist.export run=runs/NAME                              runs/NAME/ensemble.pt2
    python -m dicedist.export run=runs/NAME format=onnx images=float output=model.onnx
    python -m dicedist.export run=runs/NAME members=[0]                  runs/NAME/member-0.pt2
    python -m dicedist.export run=runs/NAME members=student format=safetensors

    pt2           torch.export.load(FILE).module()(images)
    onnx          onnxruntime.InferenceSession(FILE).run(None, {"images": images})
    safetensors   dicedist.export.read_ensemble(FILE)(images)

All take any number of images and answer label, probabilities, disagreement, confidence and ood_score. All carry class
names, normalisation, networks and temperature as JSON under "about". A file appears under its name when it was loaded
again and gave what the networks give.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from dicedist.checkpoint import sync
from dicedist.config import compose_typed, load_config, show_help
from dicedist.data import sources
from dicedist.ensemble import About, Ensemble, load_ensemble
from dicedist.evaluate import Trust
from dicedist.randomness import generator
from dicedist.world import command

ABOUT = "about"
DYNAMIC = {"images": {0: torch.export.Dim("N", min=1)}}
TOLERANCE = 1e-4
CHECKED_ON = 8  # images, and on the first of them alone
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Outputs = dict[str, Tensor]
Answers = Callable[[Tensor], Outputs]


@dataclass
class Request:
    run: str | None
    format: str
    members: Any  # null | [0, 2] | student
    average: str | None
    images: str
    output: str | None
    network: Trust


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "export")
        return
    request = compose_typed("export", arguments, Request)
    if request.run is None:
        raise ValueError("write run=runs/NAME")
    if request.format not in FORMATS:
        raise ValueError(f"format={request.format}: write one of {', '.join(FORMATS)}")
    if request.format == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ValueError(f"format=onnx needs {', '.join(missing)}: pip install 'dicedist[onnx]'")
    directory = Path(request.run)
    ensemble = load_ensemble(directory, request.members, request.average, request.images, request.network.trusted)
    output = Path(request.output) if request.output else directory / default_name(ensemble.about, request)
    images, described = images_to_check(directory, ensemble.about)
    difference = export(ensemble, output, request.format, images)
    print(
        f"wrote {output} ({output.stat().st_size / 1e6:,.1f} MB), members {ensemble.about.members}: "
        f"within {difference:.0e} of the networks on {described}"
    )


def default_name(about: About, request: Request) -> str:
    numbers = "-".join(map(str, about.members))
    some = "student" if request.members == "student" else f"member{'s' * (len(about.members) > 1)}-{numbers}"
    return f"{'ensemble' if request.members is None else some}.{request.format}"


def images_to_check(run: Path, about: About) -> tuple[Tensor, str]:
    """As the ensemble takes them: of the run's test set where it is at hand, else random; and which they are."""
    config = load_config(run / "config.yaml").data
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
    """The largest difference between what the file and the networks answer, on all of the images and on one."""
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
    return torch.stack(differences).max().item()  # which a NaN survives; Python's max() may drop it


def write_pt2(ensemble: Ensemble, path: Path, images: Tensor) -> None:
    program = torch.export.export(ensemble, (images,), dynamic_shapes=DYNAMIC)
    program.example_inputs = None  # the images are nobody else's business
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
    path.write_bytes(save(weights, {ABOUT: as_json(ensemble.about)}))  # save_file would keep others from reading it


def read_ensemble(path: Path, trusted: bool = False) -> Ensemble:
    """From a file of format=safetensors. trusted: may run the code of a network of the user's own."""
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


if __name__ == "__main__":
    command(run)

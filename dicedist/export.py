"""Write an ensemble, a member or a student as one file that needs neither the run nor, but for safetensors, dicedist.

Examples:
    python -m dicedist.export run=runs/NAME                              runs/NAME/ensemble.pt2
    python -m dicedist.export run=runs/NAME format=onnx images=float output=model.onnx
    python -m dicedist.export run=runs/NAME members=[0]                  runs/NAME/member-0.pt2
    python -m dicedist.export run=runs/NAME members=student format=safetensors

    pt2           torch.export.load(FILE).module()(images)
    onnx          onnxruntime.InferenceSession(FILE).run(None, {"images": images})
    safetensors   dicedist.evaluation.formats.read_ensemble(FILE)(images)

All take any number of images and answer label, probabilities, disagreement, confidence and ood_score. All carry class
names, normalisation, networks and temperature as JSON under "about". A file appears under its name when it was loaded
again and gave what the networks give.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dicedist.cluster.process import command
from dicedist.config import compose_request, show_help
from dicedist.config.requests import FORMATS, ExportRequest

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "export", ExportRequest)
        return
    request = compose_request("export", arguments, ExportRequest)
    if request.run is None:
        raise ValueError("write run=runs/NAME")
    ending = Path(request.output or "").suffix.removeprefix(".")
    if request.format is None:
        request.format = ending if ending in FORMATS else FORMATS[0]
    elif ending in FORMATS and ending != request.format:
        raise ValueError(f"output={request.output} ends otherwise than format={request.format}: leave one of them out")
    if request.format == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ValueError(f"format=onnx needs {', '.join(missing)}: pip install 'dicedist[onnx]'")
    # Not above: torch takes seconds, which help and refusals need not.
    from dicedist.evaluation.ensemble import load_ensemble
    from dicedist.evaluation.formats import export, images_to_check
    from dicedist.runs.run import Run

    source = Run.open(request.run)
    ensemble = load_ensemble(source, request.members, request.average, request.images, request.network.trusted)
    output = (
        Path(request.output) if request.output else source.directory / default_name(ensemble.about.members, request)
    )
    images, described = images_to_check(source, ensemble.about)
    difference = export(ensemble, output, request.format, images)
    print(
        f"wrote {output} ({output.stat().st_size / 1e6:,.1f} MB), members {ensemble.about.members}: "
        f"{f'within {difference:.0e} of' if difference else 'exactly as'} the networks on {described}"
    )


def default_name(members: Sequence[int], request: ExportRequest) -> str:
    numbers = "-".join(map(str, members))
    some = "student" if request.members == "student" else f"member{'s' * (len(members) > 1)}-{numbers}"
    return f"{'ensemble' if request.members is None else some}.{request.format}"


if __name__ == "__main__":
    command(run)

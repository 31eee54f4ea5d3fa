"""Export an ensemble, a member or a student as one file that needs neither the run nor (except safetensors) dicedist.

Examples:
    python -m dicedist.export run=runs/NAME                              runs/NAME/ensemble.pt2
    python -m dicedist.export run=runs/NAME format=onnx images=float output=model.onnx
    python -m dicedist.export run=runs/NAME members=[0]                  runs/NAME/member-0.pt2
    python -m dicedist.export run=runs/NAME members=student format=safetensors

    pt2           torch.export.load(FILE).module()(images), or dicedist.Ensemble.load(FILE)
    onnx          onnxruntime.InferenceSession(FILE).run(None, {"images": images})
    safetensors   dicedist.Ensemble.load(FILE).predict(images)

All take any number of images and return label, probabilities, member_logits, disagreement, confidence and ood_score.
Methods with a fused classifier (ffl, pcl) also return fused_label and fused_probabilities. All files hold class names,
normalization, networks and temperature as JSON under "about". A file gets its name only after it was loaded again and
its outputs equaled those of the networks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dicedist.cluster.process import command
from dicedist.config import compose_request, show_help
from dicedist.config.extras import require
from dicedist.config.requests import FORMATS, ExportRequest


def run(arguments: Sequence[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        show_help(__doc__, "export", ExportRequest)
        return
    request = compose_request("export", arguments, ExportRequest)
    if request.run is None:
        raise ValueError("write run=runs/NAME")
    ending = Path(request.output or "").suffix.removeprefix(".")
    format_ = request.format or (ending if ending in FORMATS else FORMATS[0])
    if ending in FORMATS and ending != format_:
        raise ValueError(f"output={request.output} has another ending than format={format_}: leave one of them out")
    if format_ == "onnx":
        require("onnx", "format=onnx", "format=pt2")
    # Not above: importing torch takes seconds.
    from dicedist.data.prepared import refuse_unwritable
    from dicedist.evaluation.formats import export, images_to_check
    from dicedist.evaluation.loading import load_requested
    from dicedist.runs.run import Run

    source = Run.open(request.run)
    refuse_unwritable(Path(request.output).parent if request.output else source.directory, "write output=FILE")
    ensemble = load_requested(source, request, request.images)
    output = Path(request.output or source.exported(default_name(ensemble.about.members, request.members, format_)))
    images, described = images_to_check(source, ensemble.about)
    difference = export(ensemble, output, format_, images)
    print(
        f"wrote {output} ({output.stat().st_size / 1e6:,.1f} MB), members {ensemble.about.members} of step "
        f"{ensemble.about.step}: "
        f"{f'within {difference:.0e} of' if difference else 'exactly as'} the networks on {described}"
    )


def default_name(members: Sequence[int], asked: Any, format_: str) -> str:
    """Return the name of the exported file. asked: the user's members=..."""
    numbers = "-".join(map(str, members))
    some = "student" if asked == "student" else f"member{'s' * (len(members) > 1)}-{numbers}"
    return f"{'ensemble' if asked is None else some}.{format_}"


if __name__ == "__main__":
    command(run)

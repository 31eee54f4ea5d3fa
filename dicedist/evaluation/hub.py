"""Ensembles on the Hugging Face Hub: one safetensors file with its model card and figures."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from dicedist import __version__
from dicedist.config.extras import require
from dicedist.data.remote import reason_of
from dicedist.evaluation import card
from dicedist.evaluation.about import VECTORS
from dicedist.evaluation.card import FIGURES, Evaluated
from dicedist.evaluation.ensemble import Ensemble

WEIGHTS = "model.safetensors"
CARD = "README.md"
REPORTED = ("accuracy", "nll", "ece")  # in the card's metadata


def save_pretrained(
    ensemble: Ensemble,
    folder: Path,
    name: str,
    run: Evaluated | None,
    model: Callable[[], nn.Module] | None,
    license: str | None,
) -> None:
    """Write the files of a hub's repository into a folder."""
    require("hub", "a model card")
    from huggingface_hub import ModelCard

    ensemble.save(folder / WEIGHTS, model)
    for file, drawn in ({} if run is None else run.figures()).items():
        (folder / FIGURES).mkdir(exist_ok=True)
        (folder / FIGURES / f"{file}.svg").write_text(drawn.svg)
    data = metadata(ensemble, name, run, license)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{card.write(ensemble.about, name, run)}").save(folder / CARD)


def metadata(ensemble: Ensemble, name: str, run: Evaluated | None, license: str | None) -> Any:
    """Return the metadata of the card, which hubs use to sort and show models."""
    from huggingface_hub import EvalResult, ModelCardData

    task = "tabular-classification" if ensemble.about.images == VECTORS else "image-classification"
    found, data = ({}, "") if run is None else (run.results["ensemble"], run.config().data.name)
    results = [
        EvalResult(task, data, data, metric, found[metric], dataset_split="test") for metric in REPORTED if found
    ]
    return ModelCardData(
        license=license, library_name="dicedist", pipeline_tag=task, model_name=name.rpartition("/")[2],
        tags=["ensemble", "uncertainty"], eval_results=results or None,
    )  # fmt: skip


def push(
    ensemble: Ensemble,
    name: str,
    run: Evaluated | None,
    model: Callable[[], nn.Module] | None,
    license: str | None,
    private: bool | None,
    token: str | None,
) -> str:
    require("hub", "push_to_hub")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token, library_name="dicedist", library_version=__version__)
    with TemporaryDirectory(prefix="dicedist-hub-") as folder:
        save_pretrained(ensemble, Path(folder), name, run, model, license)  # before the repository is created
        try:
            api.create_repo(name, private=private, exist_ok=True)
            members = len(ensemble)
            pushed = api.upload_folder(
                repo_id=name, folder_path=folder, commit_message=f"Ensemble of {members} members, by dicedist"
            )
        except (HfHubHTTPError, OSError) as error:
            raise ValueError(f"{name} was not pushed: {reason_of(error)}") from error
    return str(pushed.commit_url)


def pull(
    source: str | Path,
    revision: str | None,
    token: str | None,
    trusted: bool,
    model: Callable[[], nn.Module] | None,
) -> Ensemble:
    path = Path(source) / WEIGHTS
    if not Path(source).is_dir():
        require("hub", f"from_pretrained({str(source)!r})", "a folder")
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            path = Path(hf_hub_download(str(source), WEIGHTS, revision=revision, token=token))
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise ValueError(f"{source} is neither a folder nor on the hub: {reason_of(error)}") from error
    return Ensemble.load(path, trusted=trusted, model=model)

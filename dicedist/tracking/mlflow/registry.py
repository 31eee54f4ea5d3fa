"""The model registry: the name of a model, and the alias of its best version."""

import re
from collections.abc import Mapping
from typing import Any

from dicedist.config import names
from dicedist.console.lines import say, warn
from dicedist.runs.run import Run, whole_records

CHAMPION = "champion"
UNFIT = re.compile(r"[/:.%\"']")  # in the name of a logged model
NLL, DATA = "dicedist.validation_nll", "dicedist.data_digest"  # tags of a version


def logged_name(run: str) -> str:
    """Return a valid name for the logged model of a run."""
    return UNFIT.sub("-", run)


def name_to_register(client: Any, name: str | None, about: Mapping[str, Any]) -> str | None:
    """Return the name, or None with a warning if its last version has another signature.

    Users of the latest version would suddenly have to send other images.
    """
    import mlflow

    versions = client.search_model_versions(f"name = '{name}'") if name else []
    if not versions:
        return name
    last = max(versions, key=lambda version: int(version.version))
    known = mlflow.models.get_model_info(f"models:/{name}/{last.version}")
    lacking = [output for output in known.signature.outputs or () if output not in about["signature"].outputs]
    if inputs_of(known.metadata, known.signature) == about["metadata"]["inputs"] and not lacking:
        return name
    warn(
        f"tracking.register={name}: version {last.version} of that model has another signature (images or classes), "
        f"so the ensemble was logged but not registered; register it under another name from MLflow's page of this run"
    )
    return None


def inputs_of(metadata: Mapping[str, Any] | None, signature: Any) -> str:
    """Describe the inputs of a version. Versions of earlier releases have them in their signature only."""
    if metadata and "inputs" in metadata:
        return str(metadata["inputs"])
    (tensor,) = signature.inputs.inputs
    return described_inputs(tensor.type, tensor.shape)


def described_inputs(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype} [N, {', '.join(map(str, shape[1:]))}]"


def validation_nll(run: Run, step: int) -> float | None:
    """Return the validation NLL of the ensemble after this step; None without validation."""
    key = names.validation(names.ENSEMBLE, "nll")
    known = [record[key] for record in whole_records(run.records_file) if key in record and record["step"] <= step]
    return known[-1] if known else None


def crown(client: Any, name: str, version: Any, nll: float | None, digest: str) -> None:
    """Give the alias `champion` to this version if no version has it, or if its validation NLL is lower.

    Only runs with the same data and the same held-out inputs are compared. nll: validation NLL of this version.
    """
    from mlflow.exceptions import MlflowException

    client.set_model_version_tag(name, str(version), DATA, digest)
    if nll is not None:
        client.set_model_version_tag(name, str(version), NLL, repr(nll))
    try:
        champion = client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException:
        champion = None
    if champion is not None:
        best_nll = champion.tags.get(NLL)
        if nll is None or best_nll is None or champion.tags.get(DATA) != digest or nll >= float(best_nll):
            say(f"{name}@{CHAMPION} is still version {champion.version}, not version {version} of this run")
            return
    client.set_registered_model_alias(name, CHAMPION, str(version))

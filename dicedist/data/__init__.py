"""Where images come from, in which order they come, and how they reach a member. The values are in conf/data/."""

import functools
import logging
import math
from dataclasses import dataclass

log = logging.getLogger(__name__)

CHOICES = {
    "name": ("cifar10", "cifar100", "shapes", "folder"),
    "pipeline": ("auto", "dali", "torch"),
    "split": ("holdout", "full"),
    "augment": ("basic", "none", "cutout"),
    "on_corrupt": ("skip", "refuse"),
}


@dataclass
class DataConfig:
    name: str
    root: str | None
    download: bool
    pipeline: str
    split: str
    val_fraction: float
    split_seed: int
    train_limit: int | None  # use only so many training images, as many of each class as possible
    size: int
    augment: str
    cutout_size: int
    per_member: bool  # each member draws its own crops and flips
    num_threads: int
    on_corrupt: str


def validate(config: DataConfig) -> None:
    """ValueError of one line for the first value that cannot be."""
    for name, known in CHOICES.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"data.{name}={value}: write one of {', '.join(known)}")
    if not (math.isfinite(config.val_fraction) and 0 < config.val_fraction < 1):
        raise ValueError(f"data.val_fraction={config.val_fraction}: write a number between 0 and 1, or data.split=full")
    at_least = {"split_seed": 0, "num_threads": 1, "cutout_size": 1, "size": 8, "train_limit": 1}
    for name, least in at_least.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"data.{name}={value}: write a whole number from {least}")
    if config.name != "folder" and config.size != 32:
        raise ValueError(f"data.size={config.size}: the images of {config.name} are 32 pixels wide, write data.size=32")
    if config.name == "folder" and not config.root:
        raise ValueError("data=folder: write data.root=FOLDER that holds train/<class>/*.jpg and test/<class>/*.jpg")


def uses_dali(config: DataConfig) -> bool:
    """Whether DALI decodes and augments: where it can be imported, unless data.pipeline says torch."""
    if config.pipeline == "torch":
        return False
    obstacle = _dali_obstacle()
    if obstacle and config.pipeline == "dali":
        raise ValueError(
            f"data.pipeline=dali: DALI cannot be imported here ({obstacle}); it has wheels for Linux only "
            "(pip install nvidia-dali-cuda130), elsewhere write data.pipeline=torch"
        )
    return obstacle is None


@functools.cache
def _dali_obstacle() -> str | None:
    try:
        import nvidia.dali  # noqa: F401
    except (ImportError, OSError) as error:
        log.info("DALI cannot be imported here (%s): torch augments the images instead", error)
        return str(error)
    return None

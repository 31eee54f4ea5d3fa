"""The origin of the inputs, their order, and their way to a member. The settings are in conf/data/."""

import functools
import logging

from dicedist.config.schema import RGB, DataConfig

log = logging.getLogger(__name__)


def uses_dali(config: DataConfig) -> bool:
    """Return whether DALI may decode and augment images: yes if it can be imported, unless data.pipeline=torch.

    DALI reads three channels; torch reads any number.
    """
    if config.pipeline == "torch" or config.channels != RGB:
        return False
    obstacle = _dali_obstacle()
    if obstacle and config.pipeline == "dali":
        raise ValueError(
            f"data.pipeline=dali: DALI cannot be imported here ({obstacle}); it has wheels for Linux only (pip install "
            "'dicedist[dali]', or 'dicedist[dali-cuda12]' for CUDA 12), elsewhere write data.pipeline=torch"
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

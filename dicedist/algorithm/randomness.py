"""Every random draw of a run, keyed by (seed, purpose, ...): no generator state is carried from step to step."""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def seed_for(seed: int, purpose: str, *where: int) -> int:
    """Return a 63-bit seed for one draw: the same on every rank, every platform, every resume."""
    text = "/".join(map(str, (seed, purpose, *where)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(device: torch.device | str, seed: int, purpose: str, *where: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_for(seed, purpose, *where))


def initializing(seed: int, purpose: str, *where: int) -> contextlib.AbstractContextManager[None]:
    """Seed torch's global CPU generator by key inside the context, for layers that draw their own initial weights."""
    return drawing(torch.device("cpu"), seed, purpose, *where)


@contextlib.contextmanager
def drawing(device: torch.device, seed: int, purpose: str, *where: int) -> Iterator[None]:
    """Seed the device's global generator by key inside the context, for dropout and stochastic depth."""
    index = (device.index or 0,) if device.type == "cuda" else ()
    own = torch.cuda.default_generators[index[0]] if index else torch.random.default_generator
    with torch.random.fork_rng(devices=index):
        own.manual_seed(seed_for(seed, purpose, *where))
        yield

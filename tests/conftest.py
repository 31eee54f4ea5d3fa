"""Fixtures of all tests: one thread, the real images if they are available, and a bucket."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from omegaconf import OmegaConf

from dicedist.config.schema import DataConfig
from dicedist.data.prepared import home
from tests.support import CHECKOUT
from tests.support.servers import Between, bucket_server

torch.set_num_threads(1)
# The first backward of a process decides whether autograd keeps threads, and ranks are forked, which threads forbid.
# After torch.export it would decide for them even on a machine without GPUs.
torch.zeros((), requires_grad=True).backward()

PACKED = CHECKOUT.parent / "shared" / "data" / "unpack.py"
PUBLISHED = ("cifar-10-batches-py/test_batch", "cifar-100-python/test", "ood/svhn.npz")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder that holds CIFAR-10, CIFAR-100 and ood/*.npz, unpacked there if necessary."""
    root = home()
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "unpacking.lock"):  # two test processes may begin together
        if not all((root / file).exists() for file in PUBLISHED):
            if not PACKED.exists():
                pytest.skip(f"no CIFAR in {root}: set DICEDIST_DATA to a folder that holds {', '.join(PUBLISHED)}")
            subprocess.run([sys.executable, PACKED, root], check=True)
    return root


@pytest.fixture
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for data and for what is prepared from it."""
    monkeypatch.setenv("DICEDIST_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def data_config() -> Callable[..., DataConfig]:
    """The config of conf/data/<name>.yaml, without downloads, with the given changes."""

    def make(name: str, **changes: object) -> DataConfig:
        files = (OmegaConf.load(CHECKOUT / "conf" / "data" / f"{file}.yaml") for file in ("_common", name))
        values = OmegaConf.to_object(OmegaConf.merge(*files).data)
        return dataclasses.replace(DataConfig(**values), **{"download": False, **changes})

    return make


@pytest.fixture(scope="module")
def between() -> Iterator[Between]:
    """A proxy between the S3 server of this machine and its clients that can misbehave; its bucket is s3://runs."""
    pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch, bucket_server(patch.setenv) as found:
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setattr("s3fs.S3FileSystem.retries", 1)
        yield found

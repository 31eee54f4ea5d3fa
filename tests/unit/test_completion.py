"""A shell completes commands, keys and values."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dicedist.config.commands import available
from dicedist.config.completion import SCRIPTS, candidates


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["eva"], ["evaluate"]),
        (["train", "redundancy.del"], ["redundancy.delta=", "redundancy.delta_by_size="]),
        (["train", "method=d"], ["method=dibs", "method=dice", "method=distill", "method=dml"]),
        (
            ["train", "experiment=cifar100/resnet32-net8"],
            ["experiment=cifar100/resnet32-net8-dice", "experiment=cifar100/resnet32-net8-ind"],
        ),
        (["train", "seed=1", "structure="], ["structure=net", "structure=branch"]),
        (["train", "compile="], ["compile=false", "compile=true", "compile=graphs"]),
        (["train", "tracking.model="], ["tracking.model=uint8", "tracking.model=float", "tracking.model=null"]),
        (["export", "format=s"], ["format=safetensors"]),
        (["report", "ru"], []),
    ],
)
def test_candidates(words, found):
    assert candidates(words, available()) == found


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_asks_for_them(tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(SCRIPTS["bash"])
    (tmp_path / "dicedist").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dicedist "$@"\n')
    (tmp_path / "dicedist").chmod(0o755)
    for line, expected in (("dicedist pre", "predict"), ("dicedist train method=dic", "dice")):
        code = f"""source {script}; COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDBREAKS='=:'
            compopt() {{ :; }}; _dicedist; printf '%s\\n' "${{COMPREPLY[@]}}" """
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, env={"PATH": f"{tmp_path}:{Path('/usr/bin')}:/bin"}
        )
        assert done.stdout.split() == [expected], done.stderr

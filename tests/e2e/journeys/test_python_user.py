"""A Python user loads what was trained, as the package's own docstring shows it, and feeds it images of every kind."""

import textwrap

import pytest

import dicedist
from tests.support.journeys import SMALL, photos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained(shell):
    photos(shell.here / "photos", per_class=4)
    shell.run(f"dicedist train data=shapes {SMALL} ensemble.size=3 tracking=none run.name=mine")


def python(shell, code, expected=0):
    (shell.here / "script.py").write_text(textwrap.dedent(code))
    return shell.run("python script.py", code=expected)


def test_the_lines_of_the_docstring(shell, trained):
    lines = [line for line in dicedist.__doc__.splitlines() if line.startswith("    ")]
    small = ", ".join(f'"{word}"' for word in f"{SMALL} ensemble.size=2 tracking=none".split())
    code = "\n".join(lines).replace("runs/NAME", "runs/mine")
    code = code.replace('"experiment=quickstart"', f'"experiment=quickstart", {small}').replace("nproc=4", "nproc=2")
    assert small in code and "nproc=2" in code
    logits = "    import numpy\n    logits, labels = 5 * numpy.eye(4)[None].repeat(3, 0), numpy.arange(4)\n"
    told = python(shell, f"{logits}{code}\n    print(run, run.results['step'], found['ensemble']['accuracy'])")
    assert "tensor(" in told and told.splitlines()[-1] == "runs/quickstart 3 1.0"
    left_out = "dicedist: warning: left out photos/train/Quitten/kaputt.jpg: cannot identify image file"
    assert shell.told.splitlines() == [left_out]


def test_images_that_would_be_answered_wrongly_are_refused(shell, trained):
    code = """
    import numpy, torch
    from dicedist import Ensemble
    ensemble = Ensemble.load("runs/mine")
    for images in (
        numpy.zeros((2, 32, 32, 3), numpy.float32) + 200,
        torch.ones(2, 32, 32, 3, dtype=torch.uint8),
        numpy.zeros((2, 32, 32)),
    ):
        try:
            ensemble.predict(images)
        except ValueError as error:
            print(error)
    """
    first, second, third = python(shell, code).splitlines()
    assert "pixels lie in 200..200: give floats in 0..1" in first
    assert "were images in 0..1 turned into uint8?" in second and "give [N, H, W, 3]" in third


def test_logits_of_any_ensemble_are_measured(shell):
    code = """
    import numpy
    rng = numpy.random.default_rng(0)
    numpy.savez("theirs.npz", logits=rng.normal(size=(3, 50, 4)), labels=rng.integers(4, size=50))
    """
    python(shell, code)
    told = shell.run("dicedist evaluate logits=theirs.npz")
    assert "\ntempered " in told and told.splitlines()[-1].startswith("done: ")

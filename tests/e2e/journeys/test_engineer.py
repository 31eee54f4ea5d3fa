"""An engineer has photos in folders, trains on them, labels new ones, and ships a file."""

import json

import numpy as np
import pytest
import torch

from tests.support.journeys import documented, photos, picture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained(shell):
    """The README's command, word for word, for four steps."""
    names = photos(shell.home / "photos")
    line = documented("dicedist train data=folder data.root=~/photos")
    told = shell.run(f"{line} data.size=32 network=resnet8 batch_size=16 max_steps=4")
    assert "left out train/Quitten/kaputt.jpg: cannot identify image file" in shell.told
    assert shell.told.count("kaputt.jpg") == 1 and "[ERROR]" not in shell.told and "it/s]" not in shell.told
    assert "dice on folder: 4 x resnet8 (net), one process on cpu\n36 images of " in told
    assert "done: runs/photos/report.html" in told.splitlines()
    steps = [line.split()[1] for line in told.splitlines() if line.startswith("step ")]
    assert steps and len(steps) == len(set(steps)), "no step is told twice"
    return names


def test_the_report_shows_the_photos(shell, trained):
    page = (shell.here / "runs/photos/report.html").read_text()
    assert all(name in page for name in trained) and "data:image/png" in page


def test_new_photos_are_labeled(shell, trained):
    new = shell.home / "new_photos"
    new.mkdir()
    rng = np.random.default_rng(1)
    for number in range(3):
        picture(number, rng).save(new / f"neu é {number}.jpg")
    (new / "broken.jpg").write_bytes(b"no image")
    told = shell.run(documented("dicedist predict run=runs/photos")).splitlines()
    columns = "path label confidence disagreement ood score abstains (why): set of labels"
    assert " ".join(told[0].split()) == columns and len(told) == 5
    assert "error: cannot identify image file" in told[1] and any(name in told[2] for name in trained)
    rows = [
        json.loads(line)
        for line in shell.run("dicedist predict run=runs/photos ~/new_photos format=jsonl").splitlines()
    ]
    assert rows[1]["probabilities"].keys() == set(trained)
    assert sum(rows[1]["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert shell.run("dicedist predict run=runs/photos ~/new_photos/broken.jpg", code=2).count("\n") <= 2
    note, refusal = shell.told.splitlines()
    assert note.startswith("dicedist: members [0, 1, 2, 3] of step 4") and "no image could be read" in refusal


def test_a_black_photo_is_a_photo(shell, trained):
    picture(0, np.random.default_rng(2)).point(lambda value: 0).save(shell.home / "night.png")
    assert "night.png" in shell.run("dicedist predict run=runs/photos ~/night.png")


def test_one_file_is_shipped(shell, trained):
    told = shell.run(documented("dicedist export run=runs/photos"))
    assert told.startswith("wrote runs/photos/ensemble.pt2") and "test images of folder" in told
    answers = torch.export.load(shell.here / "runs/photos/ensemble.pt2").module()(
        torch.full((2, 32, 32, 3), 99, dtype=torch.uint8)
    )
    assert {"label", "probabilities", "confidence", "disagreement", "ood_score"} <= answers.keys()


def test_the_same_command_again_finds_the_run_finished(shell, trained):
    line = documented("dicedist train data=folder data.root=~/photos")
    told = shell.run(f"{line} data.size=32 network=resnet8 batch_size=16 max_steps=4")
    assert "runs/photos is finished, after 4 steps" in told


def test_a_folder_that_is_not_there_is_one_line(shell):
    shell.run("dicedist train data=folder 'data.root=~/keine Bilder [1]' tracking=none", code=2)
    assert shell.told == (
        f"dicedist: {shell.home}/keine Bilder [1]/train does not exist: "
        "data=folder needs train/<class>/*.jpg and test/<class>/*.jpg in data.root, or <class>/*.jpg alone\n"
    )


def test_disk_space_is_given_back(shell, trained):
    shown = shell.run(documented("python -m dicedist.clean"))
    assert "folder" in shown and "add --yes to remove it" in shown
    assert shell.run("dicedist clean --yes data").splitlines()[-1].startswith("removed ")
    assert not [*(shell.home / ".cache/dicedist/prepared").glob("folder*")]

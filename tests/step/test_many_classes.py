"""A thousand classes, some of them small: trained, measured and drawn; counts and warnings are said at the start."""

import json

import numpy as np

from dicedist import train

K = 1000


def test_a_thousand_classes(tmp_path, fresh_home, capsys):
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.arange(K).repeat(6), [7] * 30])  # of each 4 are trained on, 1 is held out, 1 tested
    np.savez(tmp_path / "all.npz", x=rng.normal(size=(len(labels), 8)).astype(np.float32), y=labels)
    train.run([
        "data=vectors", f"data.root={tmp_path / 'all.npz'}", "data.val_fraction=0.2", "data.test_fraction=0.17",
        "network.width=16", "ensemble.size=2", "redundancy.num_samples=1", "redundancy.num_steps=1", "max_steps=2",
        "batch_size=64", "data.balance=true", "tracking=none", "run.name=many", f"run.dir={tmp_path}",
        "log.verbose=true",
    ])  # fmt: skip
    told = capsys.readouterr()
    assert "(and 980 classes between them)" in told.out
    assert "999 of 1000 classes have no more training vectors than redundancy.memory=4" in told.err
    result = json.loads((tmp_path / "many" / "evaluation.json").read_text())
    assert len(result["class_names"]) == K and result["redundancy"] is not None
    page = (tmp_path / "many" / "report.html").read_text()
    assert "the 20 hardest of 1000 classes" in page and "The 100 hardest of 1,000 classes as a table" in page
    assert page.count("<tr>") < 400 and len(page) < 1_000_000

"""Settings that users may write, and the one-line errors for all others."""

import re

import pytest

from dicedist import export, train
from dicedist.config import Scope, changed_keys, choices_of, compose_config, flatten
from dicedist.runs.run import Run


def test_defaults_are_the_papers_main_job():
    config = compose_config([])
    assert (config.data.name, config.network.name, config.method.name) == ("cifar100", "resnet32", "dice")
    assert (config.epochs, config.batch_size, config.structure) == (300, 128, "net")
    assert (config.optimizer.momentum, config.optimizer.weight_decay, config.optimizer.nesterov) == (0.9, 5e-4, True)
    redundancy = config.redundancy
    assert (redundancy.tau, redundancy.num_samples, redundancy.num_steps, redundancy.negatives) == (10, 4, 4, 4)
    assert (redundancy.memory, redundancy.lr) == (4, 0.005)
    cifar10 = compose_config(["data=cifar10"]).redundancy
    assert (cifar10.negatives, cifar10.lr) == (2, 0.003)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("redundncy.delta=0.1", "redundncy.delta: there is no such key (did you mean redundancy.delta?)"),
        ("epoch=3", "epoch: there is no such key (did you mean epochs?)"),
        ("evidence=digits", "evidence: there is no such key"),
        ("+foo=1", "+foo=1: write key=value, with a key that `--help` lists"),
        ("~seed", "~seed: write key=value"),
        ("seed", "seed: write key=value"),
        ("method=dyce", "method=dyce: there is no such method (did you mean dice?)"),
        ("data=imagenet", "there is no such data; write one of arrays, breast_cancer, cifar10, cifar100, digits"),
        ("epochs=-1", "epochs=-1: write a number above 0"),
        ("epochs=many", "epochs: many is not a whole number"),
        ("batch_size=0", "batch_size=0: write a number above 0"),
        ("seed=-1", "seed=-1: write a whole number from 0"),
        ("ensemble.size=0", "ensemble.size=0: write auto or a whole number from 1 to 1000"),
        ("ensemble.size=some", "ensemble.size=some: write auto or a whole number"),
        ("ensemble.size=100000", "ensemble.size=100000: write auto or a whole number from 1 to 1000"),
        ("redundancy.delta=inf", "redundancy.delta=inf: write auto or a number"),
        ("redundancy.tau=nan", "redundancy.tau=nan: write a number above 0"),
        ("redundancy.scale=big", "redundancy.scale=big: write one of predicted, one, none, or a number above 0"),
        ("redundancy.scale=0", "redundancy.scale=0: write one of predicted, one, none, or a number above 0"),
        ("redundancy.floor=-1", "redundancy.floor=-1.0: write 0, or a number above it"),
        ("optimizer.lr=papr", "optimizer.lr=papr: write a number or one of paper, chen2020"),
        ("optimizer.lr=-1", "optimizer.lr=-1: write paper, chen2020 or a number above 0"),
        ("optimizer.momentum=1.5", "optimizer.momentum=1.5: write a number from 0 to 1"),
        ("loss.label_smoothing=1", "loss.label_smoothing=1.0: write a number from 0 to 1"),
        ("loss.mixup=-1", "loss.mixup=-1.0: write a number from 0, as 0.2 or 1"),
        ("loss.class_weights=some", "loss.class_weights=some: write balanced, null, or a number above 0"),
        ("loss.class_weights=[1,0]", "loss.class_weights=[1, 0]: write balanced, null, or a number above 0"),
        ("network.feature_dim=0", "network.feature_dim=0: write a whole number from 1"),
        ("optimizer.name=lamb", "optimizer.name=lamb: write one of sgd, adamw, adam"),
        ("optimizer.name=adamw", "optimizer.name=adamw with optimizer.lr=paper, whose rates are for SGD: write a numb"),
        ("optimizer.schedule=cosin", "cosin: write one of step, knots, linear, cosine, onecycle, constant"),
        ("optimizer.warmup_epochs=300", "optimizer.warmup_epochs=300 of epochs=300: write fewer, from 0"),
        ("optimizer.layer_decay=0", "optimizer.layer_decay=0.0: write a number above 0, at most 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: write two numbers from 0 to 1, as in [0.9, 0.999]"),
        ("optimizer.ema=1", "optimizer.ema=1.0: write a decay between 0 and 1, as 0.999, or null"),
        ("optimizer.accumulate=0", "optimizer.accumulate=0: write a whole number from 1"),
        ("optimizer.clip_norm=0", "optimizer.clip_norm=0.0: write a number above 0"),
        ("evaluate.weights=ema", "evaluate.weights=ema: there is no average of the weights, add optimizer.ema=0.999"),
        ("resume.allow=[optimizer.name]", "resume.allow=[optimizer.name]: another optimizer cannot use the state"),
        ("bottleneck.log_beta=[[5,1]]", "write auto, or [[epoch, value], ...] with epochs rising from 0"),
        ("schedules.covariance=[3]", "write [start, end] epochs"),
        ("run.name=a/b", "write a name for a folder under run.dir=runs"),
        ("structure=tree", "structure=tree: write one of net, branch"),
        ("precision=fp8", "precision=fp8: write one of fp32, bf16, fp16"),
        ("checkpoint.keep=0", "checkpoint.keep=0: write a number above 0"),
        ("data.pipeline=Dali", "data.pipeline=Dali: write one of auto, dali, torch"),
        ("data.val_fraction=1.5", "data.val_fraction=1.5: write a number between 0 and 1"),
        ("data.num_threads=0", "data.num_threads=0: write a whole number from 1"),
        ("data.train_limit=0", "data.train_limit=0: write a whole number from 1"),
        ("data.size=64", "data.size=64: images of cifar100 have 32 pixels"),
        ("data=folder", "data=folder: write data.root=FOLDER"),
    ],
)  # fmt: skip
def test_one_line_says_what_to_write(override, line):
    with pytest.raises(ValueError) as error:
        compose_config([override])
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_floor_lies_under_the_predicted_scale_only():
    with pytest.raises(ValueError, match=r"redundancy.scale=one asks for another: leave one of them out"):
        compose_config(["method=ce_cr", "redundancy.floor=0.5"])


@pytest.mark.parametrize(
    ("overrides", "ranks", "line"),
    [
        (["ensemble.size=4"], 9, "9 ranks are too many for 4 members and a discriminator: torchrun --nproc_per_node=5"),
        (["ensemble.size=1"], 1, "this method compares members, so it needs at least 2"),
        (["method=ind", "ensemble.size=2"], 3, "3 ranks are too many for 2 members: torchrun --nproc_per_node=2"),
        (["data.root=/nowhere", "data.download=false"], 1, "data=shapes"),
        (["data=folder", "data.root=/nowhere"], 1, "/nowhere"),
    ],
)
def test_what_cannot_run_stops_before_any_process_group(overrides, ranks, line, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ValueError, match="(?i)" + line) as error:
        train.run([*overrides, f"run.dir={tmp_path}"])
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_saved_config_is_read_back_and_compared(tmp_path):
    config = compose_config(["data=shapes", "ensemble.size=3"])
    run = Run(tmp_path)
    run.save_config(config)
    assert run.config() == config
    changes = {
        "log.every_steps=7": {Scope.START}, "batch_size=64": {Scope.RESULT}, "epochs=3": {Scope.LENGTH},
        "data.num_threads=2": {Scope.NODE}, "seed=3": {Scope.IDENTITY}, "tracking.uri=http://a": {Scope.NODE},
    }  # fmt: skip
    for change, scopes in changes.items():
        other = flatten(compose_config(["data=shapes", "ensemble.size=3", "run.name=a", change]))
        same = flatten(compose_config(["data=shapes", "ensemble.size=3", "run.name=a"]))
        found = {scope for scope in Scope if changed_keys(same, other, {scope})}
        assert found == scopes, change
    assert changed_keys({"batch_size": 128}, {"batch_size": 64}, {Scope.RESULT}) == ["batch_size: 128 -> 64"]
    (tmp_path / "config.yaml").write_text("[1, 2")
    with pytest.raises(ValueError, match="missing or damaged"):
        run.config()


def test_a_run_made_before_a_key_existed_did_what_the_default_does(tmp_path):
    config = compose_config(["data=shapes", "method=ind", "ensemble.size=3"])
    path = tmp_path / "config.yaml"
    Run(tmp_path).save_config(config)
    text = re.sub(r"tracking:\n(  .*\n)+", "", path.read_text()).replace("  nesterov: true\n", "")
    assert "tracking" not in text and "nesterov" not in text
    path.write_text(text)
    assert Run(tmp_path).config() == config


@pytest.mark.parametrize(
    ("words", "trackers"),
    [
        ([], ["mlflow"]),
        (["tracking=none"], []),
        (["tracking=tensorboard"], ["tensorboard"]),
        (["tracking=[mlflow,tensorboard]"], ["mlflow", "tensorboard"]),
        (["tracking=[ wandb ]", "tracking.experiment=mine"], ["wandb"]),
        (["tracking.to=mlflow"], ["mlflow"]),
    ],
)
def test_trackers(words, trackers):
    assert compose_config(["data=shapes", *words]).tracking.trackers == trackers


def test_by_default_there_is_no_tracker_without_mlflow(monkeypatch):
    config = compose_config(["data=shapes"])
    monkeypatch.setattr("dicedist.config.extras.find_spec", lambda name: None)
    assert config.tracking.trackers == [] and compose_config(["tracking=mlflow"]).tracking.trackers == ["mlflow"]


@pytest.mark.parametrize("word", ["tracking=[mlflow,mlflow]", "tracking=[none]", "tracking=[[1]]", "tracking.to=wand"])
def test_what_is_no_tracker_is_refused(word):
    with pytest.raises(ValueError, match=r"tracking.to=.*: write one of auto, none, mlflow, tensorboard, wandb, or"):
        compose_config([word])
    with pytest.raises(ValueError, match=r"tracking=wand: there is no such tracking \(did you mean wandb\?\)"):
        compose_config(["tracking=wand"])


def test_the_config_of_an_earlier_run_names_its_tracker(tmp_path):
    """Before there were several, `to` was mlflow or none, and there was no study."""
    Run(tmp_path).save_config(compose_config(["data=shapes", "tracking=mlflow"]))
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("  study: null\n", ""))
    assert "study" not in (tmp_path / "config.yaml").read_text()
    assert Run(tmp_path).config().tracking.trackers == ["mlflow"]


def test_help_shows_the_usual_keys(capsys):
    train.run(["--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 60
    for text in ("torchrun --nproc_per_node=5 -m dicedist.train", "    method=adp|", "    ensemble.size=auto  "):
        assert text in shown
    assert "evidence=" not in shown and "max_pairs" not in shown
    assert shown.endswith("dicedist train --help all lists every key.\n")


def test_help_lists_every_choice_and_key(capsys):
    train.run(["--help", "all"])
    shown = capsys.readouterr().out
    assert "evidence=" not in shown
    for text in ("torchrun --nproc_per_node=5 -m dicedist.train", "method=", "dice", "max_pairs: null", "experiment="):
        assert text in shown
    for key, remark in (
        ("compile: false", "false | true: torch.compile | graphs"),
        ("  size: auto", "number of members; auto: 4, or with more than five ranks"),
        ("  pipeline: auto", "auto: DALI to decode images"),
        ("  uri: null", "null: $MLFLOW_TRACKING_URI"),
        ("  per_member: null", "names of networks, one for each member"),
    ):
        assert re.search(f"^{key} +# {re.escape(remark)}", shown, re.MULTILINE), key
    assert re.search("^  per_member: false +# true: each member draws its own", shown, re.MULTILINE)
    export.run(["--help"])
    told = r"^format: null +# pt2: torch.export \| onnx \| safetensors; null: by the ending"
    assert re.search(told, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("recipe", choices_of("recipe"))
def test_every_recipe_can_be_composed(recipe):
    config = compose_config([f"recipe={recipe}", "data=folder", "data.root=photos", "network=torchvision/resnet18"])
    assert config.network.name == "torchvision/resnet18"
    pretrained = config.network.pretrained is not None
    assert pretrained == (recipe in ("finetune", "heads"))
    assert (config.data.size == 224) == (recipe in ("finetune", "heads", "scratch224"))


def test_the_paper_is_the_default_recipe():
    assert flatten(compose_config(["recipe=paper"])) == flatten(compose_config([]))

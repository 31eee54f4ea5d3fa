"""The plug-ins train with the real libraries what a plain loop trains, and continue from their checkpoints."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dicedist import ConditionalRedundancy, losses
from tests.support.pages import code_of

M, D, K, B = 2, 8, 3, 6


class Points(Dataset):
    """Points in the plane: dicts for the Trainer, tuples for Lightning."""

    def __init__(self, size, named):
        draws = torch.Generator().manual_seed(0)
        self.inputs, self.named = torch.randn(size, 4, generator=draws), named
        self.labels = (self.inputs[:, 0] * 2).long().abs() % K

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        found = self.inputs[index], self.labels[index]
        return dict(zip(("inputs", "labels"), found, strict=True)) if self.named else found


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoders = nn.ModuleList(nn.Linear(4, D) for _ in range(M))
        self.classifiers = nn.ModuleList(nn.Linear(D, K) for _ in range(M))

    def forward(self, inputs):
        means = [encoder(inputs) for encoder in self.encoders]
        logits = [classifier(mean) for classifier, mean in zip(self.classifiers, means, strict=True)]
        return {"member_logits": torch.stack(logits, 1), "means": torch.stack(means, 1)}


def redundancy():
    return ConditionalRedundancy(M, D, K, 0.5, negatives=2)


def plain_loop(steps, accumulated=1, repeated=False):
    """Train by hand, on other batches or on the same: the weights of the networks, and of the discriminator."""
    batches = DataLoader(Points(B * steps * accumulated, named=False), B)
    networks, own = Networks(), redundancy()
    optimizer = torch.optim.SGD(networks.parameters(), 0.1)
    for n, (inputs, labels) in enumerate([*DataLoader(Points(B, named=False), B)] * steps if repeated else batches):
        found = networks(inputs)
        means, logits = (found[name].transpose(0, 1) for name in ("means", "member_logits"))
        ((losses.cross_entropy(logits, labels) + own(means, None, labels)) / accumulated).backward()
        if (n + 1) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
        own.learn()
    return {**networks.state_dict(), **own.discriminator.state_dict()}


def assert_same(networks, own, expected):
    for name, value in {**networks.state_dict(), **own.discriminator.state_dict()}.items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning", reason="pip install lightning")


@pytest.fixture
def transformers():
    pytest.importorskip("accelerate", reason="pip install accelerate")
    return pytest.importorskip("transformers", reason="pip install transformers")


def lightning_module(lightning):
    from dicedist.plugins.lightning import RedundancyMixin

    class Members(RedundancyMixin, lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.networks, self.redundancy = Networks(), redundancy()

        def loss(self, batch):
            found = self.networks(batch[0])
            means, logits = (found[name].transpose(0, 1) for name in ("means", "member_logits"))
            return losses.cross_entropy(logits, batch[1]) + self.redundancy(means, None, batch[1])

        def training_step(self, batch, number):
            return self.loss(batch)

        def validation_step(self, batch, number):
            self.log("val", self.loss(batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)  # those of the discriminator, too

    return Members()


def lightning_trainer(lightning, folder, steps, **settings):
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, logger=False, **settings,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_trains_what_a_plain_loop_trains(lightning, tmp_path, accumulated):
    module = lightning_module(lightning)
    train, val = DataLoader(Points(B * 2 * accumulated, named=False), B), DataLoader(Points(B, named=False), B)
    trainer = lightning_trainer(lightning, tmp_path, 2, accumulate_grad_batches=accumulated)
    trainer.fit(module, train, val)
    assert_same(module.networks, module.redundancy, plain_loop(2, accumulated))
    assert {"redundancy_nats", "discriminator/accuracy", "val"} <= trainer.logged_metrics.keys() | (
        trainer.callback_metrics.keys()
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning_keeps_the_discriminator_in_its_checkpoints(lightning, tmp_path):
    first, second = (lightning_module(lightning) for _ in range(2))
    data = DataLoader(Points(B, named=False), B)
    trainer = lightning_trainer(lightning, tmp_path, 1)
    trainer.fit(first, data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer = lightning_trainer(lightning, tmp_path, 2)
    trainer.fit(second, data, ckpt_path=tmp_path / "one.ckpt")
    assert second.redundancy.steps == trainer.global_step == 2
    expected = plain_loop(2, repeated=True)
    assert_same(second.networks, second.redundancy, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_trainer_of_transformers_trains_what_a_plain_loop_trains(transformers, tmp_path, accumulated):
    trainer, plugin = huggingface(transformers, tmp_path, 2, gradient_accumulation_steps=accumulated)
    trainer.train()
    assert_same(trainer.model, plugin.redundancy, plain_loop(2, accumulated))
    before = plugin.redundancy.steps
    assert trainer.evaluate(Points(B, named=True))["eval_loss"] > 0 and plugin.redundancy.steps == before


def huggingface(transformers, folder, steps, callback=True, **settings):
    from dicedist.plugins.transformers import RedundancyPlugin

    plugin = RedundancyPlugin(redundancy())
    accumulated = settings.get("gradient_accumulation_steps", 1)
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=B, learning_rate=0.1, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0, report_to=[], disable_tqdm=True, use_cpu=True,
        train_sampling_strategy="sequential", save_steps=1, label_names=["labels"], **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(
        Networks(), args, train_dataset=Points(2 * B * accumulated, named=True), compute_loss_func=plugin,
        callbacks=[plugin] if callback else [],
    )  # fmt: skip
    return trainer, plugin


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_resumes(transformers, tmp_path):
    huggingface(transformers, tmp_path, 2)[0].train()
    trainer, plugin = huggingface(transformers, tmp_path, 2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same(trainer.model, plugin.redundancy, plain_loop(2))
    assert plugin.redundancy.steps == 2


@pytest.mark.filterwarnings("ignore")
def test_a_forgotten_callback_is_named(transformers, tmp_path):
    with pytest.raises(ValueError, match=r"write callbacks=\[plugin\], too"):
        huggingface(transformers, tmp_path, 2, callback=False)[0].train()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_the_pages_run_as_they_stand(library, request, tmp_path, monkeypatch):
    request.getfixturevalue(library)
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in code_of("plugins.md") if f"dicedist.plugins.{library}" in block]
    names = {}
    exec(code, names)
    assert names["redundancy"].steps == 2

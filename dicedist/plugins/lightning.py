"""Conditional redundancy in a LightningModule. Imports neither lightning nor pytorch_lightning, and works with both."""

from typing import Any

from dicedist.algorithm.conditional_redundancy import ConditionalRedundancy


class RedundancyMixin:
    """Mixin that trains the discriminator in `self.redundancy` after each batch, and logs its values.

        class Members(RedundancyMixin, LightningModule):
            def __init__(self):
                super().__init__()
                self.redundancy = ConditionalRedundancy(num_members, feature_dim, num_classes)

            def training_step(self, batch, number):
                ...
                return own_losses + self.redundancy(means, scales, labels)

    The discriminator also learns after batches whose gradients are accumulated. The trainer's checkpoints hold the
    discriminator, its optimizer and its class memory. In `validation_step`, `self.redundancy` changes no state.
    """

    redundancy: ConditionalRedundancy
    trainer: Any

    def on_fit_start(self) -> None:
        super().on_fit_start()  # type: ignore[misc]
        if self.trainer.world_size > 1:
            raise ValueError(
                f"{self.trainer.world_size} processes would train as many discriminators: write devices=1, or "
                "distribute the members with dicedist train or DistributedRedundancy"
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        if self.redundancy.lesson is None:
            return  # training_step skipped the batch
        size = len(self.redundancy.lesson.labels_B)
        self.log_dict(self.redundancy.learn(), batch_size=size)  # type: ignore[attr-defined]

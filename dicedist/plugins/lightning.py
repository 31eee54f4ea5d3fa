"""Conditional redundancy in a LightningModule. Nothing is imported: it fits lightning and pytorch_lightning alike."""

from typing import Any

from dicedist.algorithm.conditional_redundancy import ConditionalRedundancy


class RedundancyMixin:
    """Let `self.redundancy` of a LightningModule learn after each batch, and log its values.

        class Members(RedundancyMixin, LightningModule):
            def __init__(self):
                super().__init__()
                self.redundancy = ConditionalRedundancy(num_members, feature_dim, num_classes)

            def training_step(self, batch, number):
                ...
                return own_losses + self.redundancy(means, scales, labels)

    It learns also after batches whose gradients are accumulated. Checkpoints of the trainer hold the discriminator, its
    optimizer and its class memory. `validation_step` may call `self.redundancy`, which then only reads.
    """

    redundancy: ConditionalRedundancy
    trainer: Any

    def on_fit_start(self) -> None:
        super().on_fit_start()  # type: ignore[misc]
        if self.trainer.world_size > 1:
            raise ValueError(
                f"{self.trainer.world_size} processes would train as many discriminators: write devices=1, or spread "
                "the members by dicedist train or DistributedRedundancy"
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        if self.redundancy.lesson is None:
            return  # training_step left the batch out
        size = len(self.redundancy.lesson.labels_B)
        self.log_dict(self.redundancy.learn(), batch_size=size)  # type: ignore[attr-defined]

"""Conditional redundancy in the Trainer of Hugging Face transformers: its loss function and its callback in one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dicedist.algorithm.conditional_redundancy import ConditionalRedundancy
from dicedist.algorithm.losses import cross_entropy

FIELDS = ("member_logits", "means", "scales")
SAVED = "redundancy.pt"  # in the Trainer's checkpoints


class RedundancyPlugin(TrainerCallback):
    """Loss function (cross-entropies and redundancy of the members) and callback that trains the discriminator.

        plugin = RedundancyPlugin(ConditionalRedundancy(num_members, feature_dim, num_classes))
        Trainer(model, args, compute_loss_func=plugin, callbacks=[plugin], ...)

    The model returns a dict: member_logits [B, M, K], means [B, M, D] and, for stochastic members, scales [B, M, D].
    TrainingArguments need label_names=["labels"], unless the model's `forward` has an argument `labels`. The
    discriminator also learns after batches whose gradients are accumulated. The Trainer's checkpoints hold the
    discriminator, and training resumes from a checkpoint in args.output_dir. Evaluation does not change it.
    """

    def __init__(self, redundancy: ConditionalRedundancy) -> None:
        self.redundancy = redundancy

    def __call__(
        self, outputs: Mapping[str, Tensor], labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the loss. num_items_in_batch: inputs of all accumulated batches, by which this method must divide."""
        if labels is None:
            raise ValueError('the Trainer passed no labels: write TrainingArguments(label_names=["labels"], ...)')
        if torch.is_grad_enabled() and self.redundancy.lesson is not None:
            raise ValueError("the discriminator did not learn from the previous batch: write callbacks=[plugin], too")
        by_member = {name: outputs[name].transpose(0, 1) for name in FIELDS if name in outputs}
        loss = cross_entropy(by_member["member_logits"], labels)
        loss = loss + self.redundancy(by_member["means"], by_member.get("scales"), labels)
        return loss if num_items_in_batch is None else loss * (len(labels) / num_items_in_batch)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if (ranks := max(args.world_size, args.n_gpu)) > 1:
            raise ValueError(
                f"{ranks} devices would share or copy the discriminator: use one, or distribute the members with "
                "dicedist train or DistributedRedundancy"
            )
        self.redundancy.to(args.device)
        if state.global_step:
            saved = self.file(args, state)
            if not saved.is_file():
                raise ValueError(f"{saved} is missing: resume from a checkpoint in args.output_dir")
            self.redundancy.load_state_dict(torch.load(saved, map_location=args.device, weights_only=True))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.redundancy.learn()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.redundancy.learn()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        torch.save(self.redundancy.state_dict(), self.file(args, state))

    def file(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / SAVED

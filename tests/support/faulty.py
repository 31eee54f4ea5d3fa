"""`dicedist.train` with an injected fault: python -m tests.support.faulty FAULT RANK STEP key=value ...

raise: an exception; hang: a step without end; nan: a NaN in a member's weights; skip: another batch than other ranks;
slow: a validation of many small pieces; impatient: a finished training waits for MLflow or a bucket only for
some seconds.
The fault occurs only in the first attempt.
"""

import os
import sys
import time
from dataclasses import replace

import torch

from dicedist.algorithm.step import Step
from dicedist.cluster.process import command
from dicedist.train import run


def slow_reading():
    """Every few images of validation take a second longer: more than twenty seconds in all."""
    from dicedist.evaluation import readings

    original = readings.evaluation_batches

    def batches(split, source, batch_size, device):
        slow = len(split) < 300  # the validation images
        for batch in original(split, source, 8 if slow else batch_size, device):
            time.sleep(1.2 if slow else 0)
            yield batch

    readings.evaluation_batches = batches


def impatient():
    from dicedist.runs import uploads
    from dicedist.tracking import tracker

    tracker.MIRROR_LIMIT = uploads.LIMIT = 30.0


def faulty(fault, rank, step):
    if fault in ("slow", "impatient"):
        return slow_reading() if fault == "slow" else impatient()
    original = Step.__call__

    def call(self, batch):
        done = batch.epoch * self.steps_per_epoch + batch.step_in_epoch
        if (os.environ.get("RANK", "0"), done) == (rank, int(step)):
            if fault == "raise":
                raise RuntimeError("something that nobody thought of")
            if fault == "hang":
                time.sleep(3600)
            if fault == "nan":
                with torch.no_grad():
                    next(iter(self.hosted.members.values())).module.classifier.weight[0, 0] = float("nan")
            if fault == "skip":
                batch = replace(batch, checksum=batch.checksum + 1)
        return original(self, batch)

    Step.__call__ = call


if __name__ == "__main__":
    fault, rank, step, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        faulty(fault, rank, step)
    command(run)

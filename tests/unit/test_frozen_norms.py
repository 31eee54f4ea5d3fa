"""Batch norms that are frozen normalize by their running statistics wherever a network is in training mode."""

import torch
from torch import nn

from dicedist.algorithm.networks.freezing import frozen_norms, to_training
from dicedist.algorithm.trajectories.swag import renew_statistics
from tests.support.steps import batch_at, build_step, configured


def test_the_averaged_teacher_of_pcl_keeps_them():
    settings = ("method=pcl", "structure=branch", "network.freeze=stage1", "optimizer.ema=0.9")
    step = build_step(configured(2, *settings))
    step(batch_at(0))
    trunk = step.encoders.hosted.trunk
    modes = {
        name: norm.training for name, norm in trunk.average.module.named_modules() if "BatchNorm" in str(type(norm))
    }
    frozen = frozen_norms(trunk.module).keys()
    assert frozen and modes == {name: name not in frozen for name in modes} and any(modes.values())


def test_samples_of_swag_keep_their_statistics():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    network[1].requires_grad_(False)
    to_training(network, frozen_norms(network))
    for norm in (network[1], network[3]):
        norm.running_mean.fill_(1.0)
    renew_statistics(network, lambda: iter([torch.randn(8, 3, 8, 8)]))
    assert (network[1].running_mean == 1).all() and not (network[3].running_mean == 1).any()

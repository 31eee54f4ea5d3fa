"""How much two members' features share beyond the class, in nats: the full two-term estimate on held-out features.

Legend: M members, N inputs, B inputs of a batch, D features, P pairs of members, X rows.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dicedist.algorithm.adversary import Features
from dicedist.algorithm.build import build_adversary
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.randomness import generator, initialising
from dicedist.algorithm.schedules import Moment
from dicedist.config.schema import Config, RedundancyConfig
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import Checkpoint

BATCH = 500
BINS = 10
PREDICTED = Moment(
    learning_rate=0.0, log_beta=0.0, ramp_up=1.0, covariance=1.0
)  # z is drawn with the predicted scale, as at the end of training


@dataclass
class Estimate:
    nats_P: list[float]  # per pair of members
    accuracy: float  # of the discriminator w at telling joint from product pairs
    calibration: list[dict[str, float]]  # per bin of w: count, mean w, share of joint pairs


@torch.no_grad()
def estimate(w: Discriminator, features: Features, labels_N: Tensor, pairs_P2: Tensor) -> Estimate:
    """E_joint[log f] - log E_product[f], unclipped; the ratio of product to joint pairs cancels between the terms."""
    draws = generator(labels_N.device, w.seed, "estimate")
    order_N = torch.randperm(len(labels_N), generator=draws, device=labels_N.device)
    joint, product = [], []
    for rows in order_N.split(BATCH):
        compared = w.compare(
            features.means_MBD[:, rows], features.scales_MBD[:, rows], w.classes(labels_N[rows]),
            pairs_P2, w.config.negatives, PREDICTED, draws,
        )  # fmt: skip
        joint_XB, product_XB = w.logits(compared).tensor_split([compared.plan.num_joint])
        joint.append(joint_XB.unflatten(0, (len(pairs_P2), -1)).flatten(1))
        product.append(product_XB[:, compared.found_B].unflatten(0, (len(pairs_P2), -1)).flatten(1))
    joint_PX, product_PX = torch.cat(joint, 1).double(), torch.cat(product, 1).double()
    nats_P = joint_PX.mean(1) - (product_PX.logsumexp(1) - math.log(product_PX.shape[1]))
    right = (joint_PX > 0).sum() + (product_PX <= 0).sum()
    accuracy = right / (joint_PX.numel() + product_PX.numel())
    return Estimate(nats_P.tolist(), float(accuracy), calibration(joint_PX.flatten(), product_PX.flatten()))


def calibration(joint_X: Tensor, product_X: Tensor) -> list[dict[str, float]]:
    """The share of joint pairs in each bin of w: on the diagonal if w is calibrated."""
    w_X = torch.cat([joint_X, product_X]).sigmoid()
    is_joint_X = torch.cat([torch.ones_like(joint_X), torch.zeros_like(product_X)])
    bins_X = (w_X * BINS).long().clamp_max(BINS - 1)
    counts, sums, shares = (
        torch.zeros(BINS, dtype=torch.float64, device=w_X.device).index_add_(0, bins_X, values.double())
        for values in (torch.ones_like(w_X), w_X, is_joint_X)
    )
    return [
        {"count": int(count), "mean": float(total / count), "joint": float(share / count)}
        for count, total, share in zip(counts, sums, shares, strict=True)
        if count
    ]


def fit(
    config: RedundancyConfig,
    features: Features,
    labels_N: Tensor,
    num_classes: int,
    seed: int,
    num_steps: int = 1500,
    batch_size: int = 256,
    lr: float = 1e-3,
) -> Discriminator:
    """Trains a new discriminator, in the same way for any features; its learning rate falls to zero."""
    num_members, _, feature_dim = features.means_MBD.shape
    with initialising(seed, "estimator"):
        settings = replace(config, num_steps=1, num_samples=1, delta=0.0)
        w = Discriminator(settings, num_members, feature_dim, num_classes, True, seed)
    w.to(labels_N.device)
    optimizer = torch.optim.Adam(w.network.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    draws = generator(labels_N.device, seed, "estimator order")
    for step in range(num_steps):
        rows = torch.randint(len(labels_N), (batch_size,), generator=draws, device=labels_N.device)
        batch = Features(features.means_MBD[:, rows], features.scales_MBD[:, rows])
        w.learn(optimizer, batch, labels_N[rows], PREDICTED, (0, step))
        schedule.step()
    return w


def load_discriminator(config: Config, method: Method, num_classes: int, found: Checkpoint) -> Discriminator | None:
    """The w that a run has trained; None if its method uses none."""
    if method.adversarial is None:
        return None
    w = build_adversary(config, method, config.num_members, num_classes)
    assert isinstance(w, Discriminator)
    checkpoint.load_weights(w, checkpoint.load_part(found, "discriminator", w))
    return w

"""Redundancy of two members' features given the class, in nats: the full two-term estimate on held-out features.

Legend: M members, N inputs, B inputs of a batch, D features, P pairs of members, X rows, R draws.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dicedist.algorithm.build import build_counterpart
from dicedist.algorithm.counterpart import Features
from dicedist.algorithm.discriminator import Discriminator
from dicedist.algorithm.memory import ClassMemory
from dicedist.algorithm.objectives import Method
from dicedist.algorithm.pairs import Partners
from dicedist.algorithm.randomness import generator, initializing
from dicedist.algorithm.schedules import ScheduleValues
from dicedist.cluster.heartbeat import advance
from dicedist.config.plan import Plan
from dicedist.config.schema import Config, RedundancyConfig
from dicedist.console.progress import Stage, silent
from dicedist.runs import checkpoint
from dicedist.runs.checkpoint import Checkpoint

BATCH, LEARNED_AT_ONCE = 500, 256
BINS = 10
READ_BY_W = 1000  # held-out inputs, at every validation
DRAWS = 5  # draws of partners and noise for one estimate
# z is drawn with the predicted scale, as at the end of training.
PREDICTED = ScheduleValues(learning_rate=0.0, log_beta=0.0, ramp_up=1.0, covariance=1.0)
# The estimator of `fresh_estimates`, the same for every run: one sample, noise of variance 1 on standardized features.
FRESH = RedundancyConfig(
    delta=0.0, delta_by_size=[], tau=10.0, num_samples=1, num_steps=1, negatives=4, max_pairs=None, memory=4, lr=1e-3,
    scale="one", terms="lhs",
)  # fmt: skip
Labeled = tuple[Features, Tensor]  # inputs' features, and their labels [N]


@dataclass
class Estimate:
    nats_P: list[float]  # per pair of members, the mean over draws of partners and noise
    deviation_P: list[float]  # of a single draw
    accuracy: float  # of the discriminator w on joint and product pairs
    calibration: list[dict[str, float]]  # per bin of w: count, mean w, share of joint pairs


@torch.no_grad()
def estimate(
    w: Discriminator, features: Features, labels_N: Tensor, pairs_P2: Tensor, num_draws: int = DRAWS
) -> Estimate | None:
    """Return E_joint[log f] - log E_product[f], unclipped; the ratio of product to joint pairs cancels out.

    Partners come from these inputs only, not from w's memory of training features. None if no input has a partner of
    its class.
    """
    kept, found = w.memory, []
    try:
        for nth in range(num_draws):
            w.memory = ClassMemory(w.num_members, features.means_MBD.shape[2], w.num_classes, kept.capacity)
            w.memory.to(labels_N.device)
            found.append(draw_logits(w, features, labels_N, pairs_P2, nth))
    finally:
        w.memory = kept
    if any(product_PX.shape[1] == 0 for _, product_PX in found):
        return None
    nats_RP = torch.stack([two_terms(joint_PX, product_PX) for joint_PX, product_PX in found])
    joint_X, product_X = (torch.cat([draw[side].flatten() for draw in found]) for side in (0, 1))
    right = (joint_X > 0).sum() + (product_X <= 0).sum()
    accuracy = right / (joint_X.numel() + product_X.numel())
    deviation_P = nats_RP.std(0, correction=min(1, num_draws - 1))
    return Estimate(nats_RP.mean(0).tolist(), deviation_P.tolist(), float(accuracy), calibration(joint_X, product_X))


def draw_logits(
    w: Discriminator, features: Features, labels_N: Tensor, pairs_P2: Tensor, nth: int
) -> tuple[Tensor, Tensor]:
    """Return log f of the joint and product pairs [P, X] of one draw, on the CPU.

    Later batches find partners in earlier batches. Every device uses the CPU's draws, so estimates agree.
    """
    draws = generator("cpu", w.seed, "estimate", nth)
    order_N = torch.randperm(len(labels_N), generator=draws).to(labels_N.device)
    joint, product = [], []
    for rows in order_N.split(BATCH):
        means_MBD, scales_MBD = features.means_MBD[:, rows], features.scales_MBD[:, rows]
        classes_B = w.classes(labels_N[rows])
        partners, read = Partners.of(classes_B, w.memory), Features(means_MBD, scales_MBD)
        (compared,) = w.comparisons(read, classes_B, partners, [pairs_P2], PREDICTED, [draws])
        joint_XB, product_XB = w.logits(compared).tensor_split([compared.plan.num_joint])
        joint.append(joint_XB.unflatten(0, (len(pairs_P2), -1)).flatten(1))
        product.append(product_XB[:, partners.found_B].unflatten(0, (len(pairs_P2), -1)).flatten(1))
        w.memory.write(means_MBD, scales_MBD, classes_B)
        advance()
    return torch.cat(joint, 1).cpu().double(), torch.cat(product, 1).cpu().double()


def two_terms(joint_PX: Tensor, product_PX: Tensor) -> Tensor:
    return joint_PX.mean(1) - (product_PX.logsumexp(1) - math.log(product_PX.shape[1]))


def fresh_estimates(train: Labeled, held_out: Labeled, num_classes: int, stage: Stage = silent) -> dict[str, Estimate]:
    """Return I(Zi; Zj | Y) and I(Zi; Zj) in nats, estimated in the same way for the features of any method.

    Features are standardized by the training set and get noise of variance 1, independent of the method's own noise. A
    new discriminator of each kind learns on the training features and is evaluated on the held-out features.
    """
    (learned, learned_labels_N), (read, labels_N) = train, held_out
    mean_M1D, std_M1D = learned.means_MBD.mean(1, keepdim=True), learned.means_MBD.std(1, keepdim=True).clamp_min(1e-6)
    alike = [Features((of.means_MBD - mean_M1D) / std_M1D, torch.ones_like(of.means_MBD)) for of in (learned, read)]
    found = {}
    for kind, conditional in (("conditional", True), ("unconditional", False)):
        w = fit(FRESH, alike[0], learned_labels_N, num_classes, conditional, stage=stage)
        if (estimated := estimate(w, alike[1], labels_N, w.pairs_P2)) is not None:
            found[kind] = estimated
    return found


def calibration(joint_X: Tensor, product_X: Tensor) -> list[dict[str, float]]:
    """Return the share of joint pairs in each bin of w: on the diagonal if w is calibrated."""
    w_X = torch.cat([joint_X, product_X]).sigmoid()
    is_joint_X = torch.cat([torch.ones_like(joint_X), torch.zeros_like(product_X)])
    bins_X = (w_X * BINS).long().clamp_max(BINS - 1)
    weights = (torch.ones_like(w_X), w_X, is_joint_X)
    counts, sums, shares = (torch.bincount(bins_X, values.double(), BINS) for values in weights)
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
    conditional: bool = True,
    num_steps: int = 1500,
    stage: Stage = silent,
) -> Discriminator:
    """Train a new discriminator, in the same way for any features; its learning rate falls to zero."""
    num_members, _, feature_dim = features.means_MBD.shape
    settings, seed = replace(config, num_steps=1, num_samples=1, delta=0.0), 0
    with initializing(seed, "estimator"):
        w = Discriminator(settings, num_members, feature_dim, num_classes, conditional, seed)
    w.to(labels_N.device)
    optimizer = torch.optim.Adam(w.network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    draws = generator(labels_N.device, seed, "estimator order")
    progress = stage(num_steps, "steps of an estimator")
    for step in range(num_steps):
        rows = torch.randint(len(labels_N), (LEARNED_AT_ONCE,), generator=draws, device=labels_N.device)
        batch = Features(features.means_MBD[:, rows], features.scales_MBD[:, rows])
        w.learn(optimizer, batch, labels_N[rows], PREDICTED, (0, step))
        schedule.step()
        advance()
        progress.show(step + 1)
    progress.clear()
    return w


def saved_w(config: Config, method: Method, plan: Plan, found: Checkpoint, num_classes: int) -> Discriminator | None:
    """Load the w of a checkpoint, averaged over its last steps; None if the method has none."""
    if method.estimator is None:
        return None
    w = build_w(config, method, plan, num_classes)
    w.network.load_state_dict(weights_of_w(checkpoint.tensors_of(found, "discriminator")))
    return w


def build_w(config: Config, method: Method, plan: Plan, num_classes: int) -> Discriminator:
    w = build_counterpart(config, method, plan, num_classes)
    assert isinstance(w, Discriminator)
    return w


def weights_of_w(tensors: checkpoint.Tensors) -> checkpoint.Tensors:
    """Return the weights of w's network: the average, or in older runs, which lack it, the last weights."""
    averaged = checkpoint.of_kind(checkpoint.AVERAGED_WEIGHTS, tensors)
    return averaged or checkpoint.of_kind(f"{checkpoint.WEIGHTS}network.", tensors)

"""The paper's pseudo-code, written out plainly in one process: the oracle of the distributed step, for tests only.

Random numbers come from the generators that are passed in, in the order in which the code below uses them.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class LiteralDiscriminator(nn.Module):
    """M slots, all zero except two; the class embedded at the inputs of layers 1 and 2; K outputs, one is used."""

    def __init__(self, num_members, feature_dim, num_classes):
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 64)
        self.first = nn.Linear(num_members * feature_dim + 64, 256)
        self.second = nn.Linear(256 + 64, 256)
        self.third = nn.Linear(256, 100)
        self.last = nn.Linear(100, num_classes)

    def forward(self, slots, y):
        e = self.embedding(y)
        h = F.leaky_relu(self.first(torch.cat([slots, e], 1)), 0.2)
        h = F.leaky_relu(self.second(torch.cat([h, e], 1)), 0.2)
        h = F.leaky_relu(self.third(h), 0.2)
        return self.last(h).gather(1, y[:, None])[:, 0]


class Algorithm1:
    def __init__(self, members, w, num_classes, delta, tau=10.0, num_samples=4, num_steps=4, negatives=4, kept=4):
        self.members, self.w, self.delta, self.tau = members, w, delta, tau
        self.num_samples, self.num_steps, self.negatives, self.kept = num_samples, num_steps, negatives, kept
        self.memory = [[] for _ in range(num_classes)]  # per class, (slot, means, scales) of the last inputs
        self.written = [0] * num_classes
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4) for m in members
        ]
        self.w_optimizer = torch.optim.RMSprop(w.parameters(), lr=0.005)

    def step(self, x, y, beta, lr, ramp_up, covariance, z_draws, redundancy_draws, w_draws):
        M = len(self.members)
        means, scales, losses = [], [], []
        for member, draws in zip(self.members, z_draws, strict=True):  # Step 1: classification with CEB
            mean = member.encoder(x)
            scale = F.softplus(member.bottleneck.scale(mean))
            z = mean + torch.randn(mean.shape, generator=draws) * scale
            b = member.bottleneck.prior_KD[y]
            kl = (0.5 * (scale**2 - torch.log(scale**2) - 1 + (mean - b) ** 2)).sum(1)
            losses.append((kl / beta - F.log_softmax(member.classifier(z), 1)[range(len(y)), y]).mean())
            means.append(mean)
            scales.append(scale)
        redundancy = 0.0  # Step 2: conditional redundancy
        z = self.sample(means, scales, covariance, redundancy_draws)
        for i in range(M):
            for j in range(i + 1, M):
                log_f = torch.cat([self.compare(i, z[i][s], j, z[j][s], y) for s in range(self.num_samples)])
                redundancy = redundancy + (self.tau * torch.tanh(log_f / self.tau)).mean()
        total = sum(losses) + self.delta * ramp_up / (M - 1) * redundancy
        for member in self.members:
            member.zero_grad()
        total.backward()
        gradients = [{n: p.grad.clone() for n, p in member.named_parameters()} for member in self.members]
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        means, scales = [m.detach() for m in means], [s.detach() for s in scales]
        for draws in w_draws:  # Step 3: adversarial training
            w_loss = self.adversarial_loss(means, scales, y, covariance, draws)
            self.w_optimizer.zero_grad()
            w_loss.backward()
            self.w_optimizer.step()
        for n, label in enumerate(y.tolist()):
            slot = self.written[label] % self.kept
            entry = (slot, [m[n] for m in means], [s[n] for s in scales])
            self.memory[label] = sorted([e for e in self.memory[label] if e[0] != slot] + [entry], key=lambda e: e[0])
            self.written[label] += 1
        return [loss.item() for loss in losses], redundancy.item() / math.comb(M, 2), w_loss.item(), gradients

    def sample(self, means, scales, covariance, draws):
        noise = torch.randn(len(means), self.num_samples, *means[0].shape, generator=draws)
        return [
            [mean + noise[i, s] * (1 - covariance + covariance * scale.detach()) for s in range(self.num_samples)]
            for i, (mean, scale) in enumerate(zip(means, scales, strict=True))
        ]

    def compare(self, i, z_i, j, z_j, y):
        slots = [torch.zeros_like(z_i) for _ in self.members]
        slots[i], slots[j] = z_i, z_j
        return self.w(torch.cat(slots, 1), y)

    def adversarial_loss(self, means, scales, y, covariance, draws):
        M, B, S, R = len(means), len(y), self.num_samples, self.negatives
        z = self.sample(means, scales, covariance, draws)
        chance = torch.rand(B, S * R, generator=draws)
        noise = torch.randn(M, S * R, *means[0].shape, generator=draws)
        moved = torch.randint(2, (math.comb(M, 2), S, R), generator=draws)
        joint, product, pair = [], [], 0
        for i in range(M):
            for j in range(i + 1, M):
                for s in range(S):
                    joint.append(self.compare(i, z[i][s], j, z[j][s], y))
                    for r in range(R):
                        stays, moves = (j, i) if moved[pair, s, r] == 0 else (i, j)
                        for n in range(B):
                            others = [k for k in range(B) if k != n and y[k] == y[n]]
                            pool = [(means[moves][k], scales[moves][k]) for k in others]
                            pool += [(e[1][moves], e[2][moves]) for e in self.memory[y[n]]]
                            if pool:
                                mean, scale = pool[int(chance[n, s * R + r] * len(pool))]
                                std = 1 - covariance + covariance * scale
                                partner = mean + noise[moves, s * R + r, n] * std
                                product.append((stays, z[stays][s][n], moves, partner, y[n]))
                pair += 1
        joint = torch.cat(joint)
        loss = F.softplus(-joint).sum()
        if product:
            slots = torch.zeros(len(product), M, means[0].shape[1])
            for row, (stays, kept, moves, partner, _) in enumerate(product):
                slots[row, stays], slots[row, moves] = kept, partner
            loss = loss + F.softplus(self.w(slots.flatten(1), torch.stack([p[4] for p in product]))).sum()
        return loss / (len(joint) + len(product))

"""Every method's loss, written out plainly (docs/methods.md): one process, one autograd graph, for tests only.

A loss is a function of `given`: per member, its outputs for the batch (mean, scale, z, logits, pooled), with
gradients. It returns named parts: a list has one value per member, a tensor is a joint part that every member reports.
"""

import math
from itertools import combinations
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from tests.support.steps import teacher_of_three


class Ensemble:
    """Copies of an ensemble's weights, trained on one method's loss by plain autograd."""

    def __init__(self, members, trunk, shared, w, config, companions=(), averaged=None):
        """averaged: an ensemble of the members' averaged weights, for PCL."""
        self.members, self.trunk, self.shared, self.w, self.config = members, trunk, shared, w, config
        self.companions, self.averaged = companions, averaged

    def encode(self, x, noise):
        given = []
        self.x = x = x.detach().clone().requires_grad_()
        stem = self.trunk(x) if self.trunk else None
        for member, draws in zip(self.members, noise, strict=True):
            split = stem if self.trunk else member.encoder.trunk(x)
            last = member.encoder.tail(split)
            mean = member.encoder.pool(last) if member.encoder.pool else last
            scale, z = torch.ones_like(mean), mean
            if member.bottleneck:
                scale = F.softplus(member.bottleneck.scale(mean))
                z = mean + torch.randn(mean.shape, generator=draws) * scale
            pooled = split if split.dim() == 2 else split.mean(3).mean(2)
            given.append(
                SimpleNamespace(mean=mean, scale=scale, z=z, logits=member.classifier(z), pooled=pooled, map=last)
            )
        return given

    def parts(self, given, y, now, draws):
        """The named parts of the loss from all terms, and the redundancy, which is not a named part."""
        parts, redundancy = {}, 0.0
        for term, options in self.config.method.terms.items():
            if term == "redundancy":
                redundancy = self.redundancy(given, y, now, options["conditional"], draws)
            elif term == "dibs":
                parts |= dibs_parts(self, given, y, now, **options)
                redundancy = self.dibs(given, now, draws, **options)
            else:
                parts |= TERMS[term](self, given, y, now, **options)
        return parts, redundancy

    def gradients(self, x, y, now, noise, draws):
        """The named parts, and d(total)/d(every parameter) by part of the ensemble."""
        given = self.encode(x, noise)
        parts, redundancy = self.parts(given, y, now, draws)
        total = sum(sum(part) if isinstance(part, list) else part for part in parts.values()) + redundancy
        modules = {f"member-{i}": member for i, member in enumerate(self.members)}
        modules |= {name: module for name, module in (("trunk", self.trunk), ("shared", self.shared)) if module}
        if "ffl" in self.config.method.terms:  # the fusion is trained by the same loss as members
            modules["fusion"] = self.w
        named = {(part, name): p for part, module in modules.items() for name, p in module.named_parameters()}
        found = torch.autograd.grad(total, list(named.values()))
        share = len(self.members) if "cl_ilr" in self.config.method.terms else 1
        return parts, {key: g / share if key[0] == "trunk" else g for key, g in zip(named, found, strict=True)}

    def lessons(self, x, noise):
        """Of AFD: by member, L_G and L_D, and their gradients by every parameter of encoder and discriminator."""
        given, found = self.encode(x, noise), []
        for i, (member, judge) in enumerate(zip(self.members, self.companions, strict=True)):
            own, peer = given[i].map, given[i - 1].map.detach()
            fool = ((1 - judge_of(judge, own)) ** 2).mean()
            tell = ((1 - judge_of(judge, peer)) ** 2).mean() + (judge_of(judge, own.detach()) ** 2).mean()
            taught, learning = dict(member.encoder.named_parameters()), dict(judge.named_parameters())
            gradients = torch.autograd.grad(fool, list(taught.values()), retain_graph=True)
            of_judge = torch.autograd.grad(tell, list(learning.values()))
            found.append(
                (fool, dict(zip(taught, gradients, strict=True)), tell, dict(zip(learning, of_judge, strict=True)))
            )
        return found

    def redundancy(self, given, y, now, conditional, draws):
        """delta r / (M' - 1) * sum over pairs of the chosen terms; a student is not among the M' compared."""
        settings, S, R = self.config.redundancy, self.config.redundancy.num_samples, self.config.redundancy.negatives
        compared = (
            given[:-1] if self.config.method.terms.get("okddip", {"leader": False}).get("leader", True) else given
        )
        M, (B, D) = len(compared), compared[0].mean.shape
        y = y if conditional else torch.zeros_like(y)

        def sample(mean, scale, noise):
            blend = now.covariance * torch.maximum(scale.detach(), torch.tensor(settings.floor))
            std = {"predicted": 1 - now.covariance + blend, "one": 1.0, "none": 0.0}
            return mean + noise * std.get(settings.scale, settings.scale)

        def log_f(i, z_i, j, z_j, labels):
            slots = torch.zeros(len(z_i), M, D)
            slots[:, i], slots[:, j] = z_i, z_j
            return settings.tau * torch.tanh(plain_w(self.w.network, slots.flatten(1), labels) / settings.tau)

        noisy = settings.scale != "none"
        noise = torch.randn(M, S, B, D, generator=draws) if noisy else torch.zeros(M, S, B, D)
        z = [[sample(told_i.mean, told_i.scale, noise[i, s]) for s in range(S)] for i, told_i in enumerate(compared)]
        pairs, total = list(combinations(range(M), 2)), 0.0
        if settings.terms != "rhs":
            total = sum(torch.cat([log_f(i, z[i][s], j, z[j][s], y) for s in range(S)]).mean() for i, j in pairs)
        if settings.terms != "lhs":
            chance = torch.rand(B, S * R, generator=draws)
            noise = torch.randn(M, S * R, B, D, generator=draws) if noisy else torch.zeros(M, S * R, B, D)
            moved = torch.randint(2, (len(pairs), S, R), generator=draws)
            for p, (i, j) in enumerate(pairs):
                rows = []
                for s in range(S):
                    for r in range(R):
                        stays, moves = (j, i) if moved[p, s, r] == 0 else (i, j)
                        for n in range(B):
                            pool = self.partners(compared[moves], moves, y, n)
                            if pool:
                                mean, scale = pool[int(chance[n, s * R + r] * len(pool))]
                                partner = sample(mean, scale, noise[moves, s * R + r, n])
                                rows.append((stays, z[stays][s][n], moves, partner, y[n]))
                log_fs = torch.cat([log_f(a, za[None], b, zb[None], label[None]) for a, za, b, zb, label in rows])
                total = total - torch.log(torch.exp(log_fs).mean())
        return self.w.delta * now.ramp_up / (M - 1) * total

    def dibs(self, given, now, draws, kl):
        """delta r / (M - 1) * sum over pairs of L_G, with D of two vectors side by side."""
        settings, M, S = self.config.redundancy, len(given), self.config.redundancy.num_samples
        shape = (S, M, *given[0].mean.shape)

        def log_d(first, second, sign):
            rest = self.w.network.rest
            left, right = self.w.network.halves
            weight = torch.cat([left.weight, right.weight], 1)
            logits = rest(torch.cat([first, second], -1) @ weight.T + left.bias)
            return F.logsigmoid(sign * settings.tau * torch.tanh(logits / settings.tau))

        def samples():
            noise = torch.randn(shape, generator=draws)
            return [[t.mean + t.scale * noise[s, i] for i, t in enumerate(given)] for s in range(S)]

        z, again = samples(), samples()
        apart = [log_d(z[s][i], z[s][j], 1) for s in range(S) for i in range(M) for j in range(M) if i != j]
        alike = [log_d(a, b, -1) for s in range(S) for i in range(M)
                 for a, b in ((z[s][i], again[s][i]), (again[s][i], z[s][i]))]  # fmt: skip
        loss = torch.cat(apart).mean() + torch.cat(alike).mean()
        if kl == "adversarial":
            e = torch.randn(shape, generator=draws)
            noisy = [log_d(a, b, -1) for s in range(S) for i in range(M)
                     for a, b in ((e[s, i], z[s][i]), (z[s][i], e[s, i]))]  # fmt: skip
            loss = loss + torch.cat(noisy).mean()
        return self.w.delta * now.ramp_up / (M - 1) * (M * (M - 1) / 2) * loss

    def partners(self, told_i, i, y, n):
        """Other inputs of the class: first from the batch, then from the memory."""
        memory, label = self.w.memory, int(y[n])
        found = [(told_i.mean[k], told_i.scale[k]) for k in range(len(y)) if k != n and y[k] == label]
        kept = range(label * memory.capacity, label * memory.capacity + min(memory.capacity, memory.written_K[label]))
        return found + [(memory.means_MQD[i, row], memory.scales_MQD[i, row]) for row in kept]


def plain_w(network, slots, y):
    e = network.embedding_KE[y]
    h = slots @ network.slots_MDH.flatten(0, 1) + e @ network.embedding_first_EH + network.first_bias
    h = F.leaky_relu(h, 0.2)
    h = F.leaky_relu(network.second(h) + e @ network.embedding_second_EH, 0.2)
    return network.last(F.leaky_relu(network.third(h), 0.2))[range(len(y)), y]


def ce(logits, y):
    return -torch.log_softmax(logits, 1)[range(len(y)), y].mean()


def kl(p, q):
    return (p * (p.log() - q.log())).sum(1).mean()


def kd(student, teacher, T):
    return T**2 * kl(torch.softmax(teacher / T, 1), torch.softmax(student / T, 1))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def cross_entropy(ensemble, given, y, now):
    return {"cross_entropy": [ce(t.logits, y) for t in given]}


def bottleneck(ensemble, given, y, weight, row):
    kls = []
    for member, t in zip(ensemble.members, given, strict=True):
        b = torch.stack([member.bottleneck.prior_KD[row(label)] for label in y])
        kls.append((0.5 * (t.scale**2 - torch.log(t.scale**2) - 1 + (t.mean - b) ** 2)).sum(1).mean())
    return cross_entropy(ensemble, given, y, None) | {"compression": [weight * value for value in kls]}


def vceb(ensemble, given, y, now):
    return bottleneck(ensemble, given, y, 1 / math.exp(now.log_beta), lambda label: label)


def vib(ensemble, given, y, now):
    return bottleneck(ensemble, given, y, 1 / (math.exp(now.log_beta) + 1), lambda label: 0)


def adp(ensemble, given, y, now, alpha, beta, ramp_up=False):
    r = now.ramp_up if ramp_up else 1.0
    entropies, volumes = [], []
    for n, label in enumerate(y.tolist()):
        p = [torch.softmax(t.logits[n], 0) for t in given]
        average = mean(p)
        entropies.append(-(average * torch.log(average + 1e-20)).sum())
        rows = [torch.cat([q[:label], q[label + 1 :]]) for q in p]
        N = torch.stack([row / row.norm() for row in rows])
        volumes.append(torch.log(torch.det(N @ N.T + 1e-6 * torch.eye(len(given)))))
    return {"entropy": -r * alpha * mean(entropies), "volume": -r * beta * mean(volumes)}


def dml(ensemble, given, y, now, ramp_up=False):
    r = now.ramp_up if ramp_up else 1.0
    p = [torch.softmax(t.logits, 1) for t in given]
    return {"mutual": [r * mean(kl(p[j].detach(), p[i]) for j in range(len(p)) if j != i) for i in range(len(p))]}


def cl_ilr(ensemble, given, y, now, temperature):
    """Dividing the trunk's gradient by M at the branching point divides the gradients of the whole trunk by M."""
    teachers = [mean(t.logits for t in given if t is not own).detach() for own in given]
    losses = [kd(t.logits, teacher, temperature) for t, teacher in zip(given, teachers, strict=True)]
    return {"distillation": [now.ramp_up * loss for loss in losses]}


def one(ensemble, given, y, now, temperature):
    gate = ensemble.shared["gate"]
    if ensemble.trunk:
        opened = given[0].pooled @ gate.linear.weight.T + gate.linear.bias
    else:
        columns = [t.pooled @ gate.linear.weight[i] + gate.linear.bias[i] for i, t in enumerate(given)]
        opened = torch.stack(columns, 1)
    normal = (opened - opened.mean(0)) / torch.sqrt(opened.var(0, unbiased=False) + 1e-5)
    g = torch.softmax(torch.relu(normal * gate.norm.weight + gate.norm.bias), 1)
    z_e = sum(g[:, i : i + 1] * t.logits for i, t in enumerate(given))
    distilled = [now.ramp_up * kd(t.logits, z_e.detach(), temperature) for t in given]
    return {"ensemble_cross_entropy": ce(z_e, y), "distillation": distilled}


def okddip(ensemble, given, y, now, temperature, leader=True):
    """A joint part, of which the student reports only its own share."""
    q, k = ensemble.shared["query"], ensemble.shared["key"]
    peers, student = (given[:-1], given[-1]) if leader else (given, None)
    among = 0.0
    for a in peers:
        energy = torch.stack([(q(a.mean) * k(b.mean)).sum(1) for b in peers], 1)
        A = torch.softmax(energy, 1)
        among = among + kd(a.logits, sum(A[:, [i]] * b.logits for i, b in enumerate(peers)), temperature)
    taught = kd(student.logits, mean(a.logits for a in peers), temperature) if leader else 0.0
    return {"distillation": now.ramp_up * (among + taught)}


def kdcl(ensemble, given, y, now, temperature, teacher, weight=1.0, ramp_up=True):
    z, rows = [t.logits.detach() for t in given], []
    for n, label in enumerate(y.tolist()):
        if teacher == "naive":
            rows.append(min((z_i[n] for z_i in z), key=lambda row: float(-torch.log_softmax(row, 0)[label])))
        elif teacher == "minlogit":
            rows.append(torch.stack([z_i[n] - z_i[n, label] for z_i in z]).min(0).values)
        else:
            weights = ensemble.shared["weights"].weights_M
            rows.append(sum(w * z_i[n] for w, z_i in zip(weights, z, strict=True)))
    factor = weight * (now.ramp_up if ramp_up else 1.0)
    return {"distillation": [factor * kd(t.logits, torch.stack(rows), temperature) for t in given]}


def pixel_gradients(ensemble, given, y):
    """By member, [B, pixels], each differentiable."""
    losses = [ce(t.logits, y) * len(y) for t in given]
    return [torch.autograd.grad(loss, ensemble.x, create_graph=True)[0].flatten(1) for loss in losses]


def gal(ensemble, given, y, now, weight):
    g, logs = pixel_gradients(ensemble, given, y), []
    for n in range(len(y)):
        cosines = [a[n] @ b[n] / (a[n].norm() * b[n].norm()) for a, b in combinations(g, 2)]
        logs.append(torch.log(sum(torch.exp(cosine) for cosine in cosines) + 1e-20))
    return {"alignment": len(given) * weight * mean(logs)}


def gpmr(ensemble, given, y, now, phase, magnitude):
    g, M, phases, magnitudes = pixel_gradients(ensemble, given, y), len(given), [], []
    for n in range(len(y)):
        cosines = [a[n] @ b[n] / (a[n].norm() * b[n].norm()) for a, b in combinations(g, 2)]
        phases.append(mean((cosine + 1 / (M - 1)) ** 2 for cosine in cosines))
        average = mean(a[n].norm() for a in g)
        magnitudes.append(mean((a[n].norm() / average - 1) ** 2 for a in g))
    return {"phase": phase * mean(phases), "magnitude": magnitude * mean(magnitudes)}


def pcl(ensemble, given, y, now, temperature):
    dense, M = ensemble.shared["fusion"].dense, len(given)
    z_e = torch.cat([t.mean for t in given], 1) @ dense.weight.T + dense.bias
    z = [t.logits.detach() for t in ensemble.averaged.encode(ensemble.x, given)]
    return {
        "ensemble_cross_entropy": ce(z_e, y),
        "distillation": [now.ramp_up * kd(t.logits, z_e.detach(), temperature) for t in given],
        "peers": [
            now.ramp_up * mean(kd(t.logits, z[j], temperature) for j in range(M) if j != i) for i, t in enumerate(given)
        ],
    }


def ffl(ensemble, given, y, now, temperature, weight_decay):
    """The fusion in plain lines: depthwise 3x3, 1x1, each with batch norm and ReLU, mean over pixels, dense."""
    depth, norm_1, _, point, norm_2, _, _, _, dense = ensemble.w.network.layers
    h = torch.cat([t.map for t in given], 1)
    h = torch.relu(normalized(F.conv2d(h, depth.weight, padding=1, groups=h.shape[1]), norm_1))
    h = torch.relu(normalized(torch.einsum("bchw,oc->bohw", h, point.weight[:, :, 0, 0]), norm_2))
    z_f = h.mean((2, 3)) @ dense.weight.T + dense.bias
    z = mean(t.logits for t in given)
    return {
        "distillation": [now.ramp_up * kd(t.logits, z_f.detach(), temperature) for t in given],
        "fusion/cross_entropy": ce(z_f, y),
        "fusion/distillation": now.ramp_up * kd(z_f, z.detach(), temperature),
    }


def afd(ensemble, given, y, now, temperature, rates, weight_decay, spares_norms, ramp_up):
    """The loss of the run's own optimizer; the other losses are in `lessons`."""
    r = now.ramp_up if ramp_up else 1.0
    return {"distillation": [r * kd(t.logits, given[i - 1].logits.detach(), temperature) for i, t in enumerate(given)]}


def judge_of(judge, h):
    first, norm, _, last, _ = judge.layers
    h = F.leaky_relu(normalized(F.conv2d(h, first.weight, stride=2, padding=1), norm), 0.2)
    return torch.sigmoid((h * last.weight).sum((1, 2, 3)) + last.bias)


def normalized(h, norm):
    """By the batch, as in training."""
    centered = h - h.mean((0, 2, 3), keepdim=True)
    scaled = centered / torch.sqrt((centered**2).mean((0, 2, 3), keepdim=True) + 1e-5)
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


def dibs_parts(ensemble, given, y, now, kl):
    parts = cross_entropy(ensemble, given, y, now)
    if kl == "explicit":
        weight = 1 / (math.exp(now.log_beta) + 1)
        kls = [(0.5 * (t.scale**2 - torch.log(t.scale**2) - 1 + t.mean**2)).sum(1).mean() for t in given]
        parts["compression"] = [weight * value for value in kls]
    return parts


def distill(ensemble, given, y, now, temperature, labels, target):
    """Input by input: the teacher's mean probabilities, or those of its member of the same number."""
    tau, taught, parts = temperature, teacher_of_three(ensemble.x.detach()), []
    for i, t in enumerate(given):
        total = 0.0
        for n in range(len(y)):
            p = [torch.softmax(z / tau, 0) for z in taught[n]]
            p, q = p[i] if target == "members" else sum(p) / len(p), torch.softmax(t.logits[n] / tau, 0)
            total = total + (p * (torch.log(p) - torch.log(q))).sum()
        parts.append((1 - labels) * tau**2 * total / len(y))
    own = {"cross_entropy": [labels * F.cross_entropy(t.logits, y) for t in given]} if labels else {}
    return {"distillation": parts, **own}


TERMS = {
    "distill": distill,
    "cross_entropy": cross_entropy,
    "vib": vib,
    "vceb": vceb,
    "adp": adp,
    "dml": dml,
    "cl_ilr": cl_ilr,
    "one": one,
    "okddip": okddip,
    "kdcl": kdcl,
    "gal": gal,
    "gpmr": gpmr,
    "pcl": pcl,
    "ffl": ffl,
    "afd": afd,
}

"""Variational inference with a fully factorized Gaussian, as in Ashukha et al., 2020, starting from a trained network.

The weights of convolutions and dense layers become W = mu + exp(rho) e; biases and batch norms stay as they are. The
loss gains (beta/N) sum over weights of 0.5 (sigma^2/s^2 - 1 - log(sigma^2/s^2)) with the prior's variance
s^2 = 1/(N weight_decay). The mean's part of the KL is the weight decay, which beta does not scale: a cold posterior,
and no bound. All inputs of a batch share one e; the dense layer draws its outputs instead (local reparameterization).
rho has its own Adam optimizer. A sample has one e for all inputs, so that it does not depend on batches.

Legend: B inputs, K classes.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dicedist.algorithm.member import Encode, Encoding, Member
from dicedist.algorithm.schedules import Knots
from dicedist.algorithm.trajectories import Collector, Kind, Surroundings, TrainingSet, device_of

RHO = (-5.1, -5.0)  # the range of the initial rho
DENSE = "classifier.weight"


class Trajectory(Kind):
    def __init__(self, samples: int, learning_rate: Knots, start: float, beta: float, rho_lr: float):
        """start: the epoch at which variational training begins."""
        super().__init__(samples, learning_rate)
        self.start, self.beta, self.rho_lr, self.restart = start, beta, rho_lr, start

    def collector(self, member: Member, surroundings: Surroundings) -> Collector:
        return Posterior(member, self.start, self.beta, self.rho_lr, surroundings)


class Posterior(Collector):
    def __init__(self, member: Member, start: float, beta: float, rho_lr: float, surroundings: Surroundings):
        super().__init__()
        layers = (nn.Conv2d, nn.Linear)
        self.names = [f"{path}.weight" for path, module in member.named_modules() if isinstance(module, layers)]
        weights = dict(member.named_parameters())
        draws = torch.Generator().manual_seed(0)  # all members start with the same spread
        starts = {name: torch.empty(weights[name].shape).uniform_(*RHO, generator=draws) for name in self.names}
        self.rhos = nn.ParameterList([rho.to(weights[name].device) for name, rho in starts.items()])
        self.start, self.rho_lr = start, rho_lr
        self.weight = beta / surroundings.num_images
        self.prior_variance = 1 / (surroundings.num_images * surroundings.weight_decay)
        self.noise: dict[str, Tensor] | None = None  # of this step; None before variational training begins
        self.dense_draws: torch.Generator | None = None

    def build_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.rhos.parameters(), lr=self.rho_lr)

    def encoder(self, member: Member) -> nn.Module:
        return SampledEncode(member, self)

    def before_step(self, epoch: float, draws: torch.Generator) -> None:
        self.noise, self.dense_draws = (self.draw(draws), draws) if epoch >= self.start else (None, None)

    def draw(self, draws: torch.Generator) -> dict[str, Tensor]:
        return {
            name: torch.randn(rho.shape, generator=draws, device=draws.device)
            for name, rho in zip(self.names, self.rhos, strict=True)
        }

    def drawn(self, member: Member, noise: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = dict(member.named_parameters())
        return {
            name: weights[name] + rho.exp() * noise[name].to(rho.device)
            for name, rho in zip(self.names, self.rhos, strict=True)
        }

    def divergence(self) -> Tensor:
        """Return the part of the KL that beta scales: zero, with zero gradient, if sigma^2 is the prior's variance."""
        ratios = [(2 * rho).exp() / self.prior_variance for rho in self.rhos]
        return torch.stack([(0.5 * (ratio - 1 - ratio.log())).sum() for ratio in ratios]).sum()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.noise is None:
            return
        (self.weight * self.divergence()).backward()  # added to the gradients of the members' losses
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def samples(self, member: Member, draws: Sequence[torch.Generator], data: TrainingSet) -> list[Member]:
        found = []
        for one in draws:
            sample = copy.deepcopy(member)
            weights = dict(sample.named_parameters())
            for name, value in self.drawn(member, self.draw(one)).items():
                weights[name].copy_(value)
            found.append(sample)
        return found


class SampledEncode(Encode):
    def __init__(self, member: Member, posterior: Posterior):
        super().__init__(member)
        self.posterior = [posterior]  # in a list, so that it does not become a submodule

    def forward(self, inputs: Tensor, noise_BD: Tensor | None) -> Encoding:
        (posterior,) = self.posterior
        if posterior.noise is None:
            return super().forward(inputs, noise_BD)
        drawn = {f"member.{name}": value for name, value in posterior.drawn(self.member, posterior.noise).items()}
        del drawn[f"member.{DENSE}"]
        own = functional_call(Encode(self.member), drawn, (inputs, noise_BD))
        variance_KD = (2 * posterior.rhos[posterior.names.index(DENSE)]).exp()
        assert posterior.dense_draws is not None
        xi_BK = torch.randn(own.logits_BK.shape, generator=posterior.dense_draws, device=device_of(self.member))
        own.logits_BK = own.logits_BK + (own.z_BD.square() @ variance_KD.T + 1e-8).sqrt() * xi_BK
        return own

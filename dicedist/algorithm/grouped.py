"""Members that share a device as one network: their layers side by side, a group of channels for each member.

Small networks leave a GPU waiting for the next kernel; a grouped layer launches one kernel for all members. The weights
stay in the members, and a grouped layer reads them when it runs. So optimizers, moving averages, checkpoints and
evaluation need not know about it.

Legend: M members, B inputs, C channels, I and O widths of a layer, D features.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dicedist.algorithm.member import Encode, Encoding, Member
from dicedist.algorithm.networks import Network

Module = TypeVar("Module", bound=nn.Module)
TRIED = 4  # inputs on which a grouped network is compared with its members


class Together(nn.Module):
    """Encodes a batch with several members at once, each with its own inputs and noise."""

    def __init__(self, members: Sequence[Member], keeps: Sequence[str] = ()):
        super().__init__()
        self.count, self.encode = len(members), Encode(grouped(members), keeps)

    def forward(self, inputs: Sequence[Tensor], noise: Sequence[Tensor | None]) -> list[Encoding]:
        drawn = [noise_BD for noise_BD in noise if noise_BD is not None]
        encoding = self.encode(torch.cat([*inputs], 1), torch.cat(drawn, 1) if drawn else None)
        return encoding.apart(self.count)


class Grouped(nn.Module):
    """One layer of all members. Settings that members share (mode, stride, momentum) come from the first member."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def first(self) -> Any:
        return self.layers[0]

    def each(self, name: str) -> list[Tensor]:
        return [getattr(layer, name) for layer in self.layers]

    def joined(self, name: str) -> Tensor | None:
        return None if getattr(self.first, name) is None else torch.cat(self.each(name))


class GroupedConv(Grouped):
    def forward(self, inputs_BCHW: Tensor) -> Tensor:
        weight, first = self.joined("weight"), self.first
        assert weight is not None
        groups = first.groups * len(self.layers)
        return F.conv2d(inputs_BCHW, weight, self.joined("bias"), first.stride, first.padding, first.dilation, groups)


class GroupedNorm(Grouped):
    """Batch norm treats each channel separately, so it needs no groups. Every member keeps its own statistics."""

    def forward(self, inputs: Tensor) -> Tensor:
        first, mean, variance = self.first, self.joined("running_mean"), self.joined("running_var")
        moves = first.training and mean is not None
        by_batch = first.training or mean is None
        weight, bias = self.joined("weight"), self.joined("bias")
        outputs = F.batch_norm(inputs, mean, variance, weight, bias, by_batch, first.momentum, first.eps)
        if moves:
            assert mean is not None and variance is not None
            torch._foreach_copy_(self.each("running_mean"), [*mean.chunk(len(self.layers))])
            torch._foreach_copy_(self.each("running_var"), [*variance.chunk(len(self.layers))])
            if first.num_batches_tracked is not None:
                torch._foreach_add_(self.each("num_batches_tracked"), 1)
        return outputs


class GroupedLinear(Grouped):
    def forward(self, inputs_BI: Tensor) -> Tensor:
        inputs_MBI = inputs_BI.unflatten(1, (len(self.layers), -1)).transpose(0, 1)
        weight_MIO = torch.stack(self.each("weight")).transpose(1, 2)
        if self.first.bias is None:
            outputs_MBO = torch.bmm(inputs_MBI, weight_MIO)
        else:
            outputs_MBO = torch.baddbmm(torch.stack(self.each("bias")).unsqueeze(1), inputs_MBI, weight_MIO)
        return outputs_MBO.transpose(0, 1).flatten(1)


KINDS: dict[type[nn.Module], type[Grouped]] = {
    nn.Conv2d: GroupedConv,
    nn.BatchNorm1d: GroupedNorm,
    nn.BatchNorm2d: GroupedNorm,
    nn.Linear: GroupedLinear,
}


def grouped(members: Sequence[Module]) -> Module:
    """Return one module for all members: it maps [B, M C, ...] to [B, M D], one slice for each member."""
    named = [dict(member.named_modules()) for member in members]
    twins: dict[int, Any] = {
        id(layer): KINDS[type(layer)]([modules[name] for modules in named])
        for name, layer in named[0].items()
        if type(layer) in KINDS
    }
    others = {id(parameter): parameter for parameter in members[0].parameters()}  # outside of layers, unused
    return copy.deepcopy(members[0], others | twins)


def why_not_grouped(networks: Sequence[Network], shape: tuple[int, ...]) -> str | None:
    """Return why these members cannot run as one network, in a few words; None if they can.

    networks: at least two, which cannot be used afterwards. shape: of an input. Code between the layers may treat
    channels differently, which the modules do not show. So the outputs of both ways are compared for a few inputs.
    """
    if len({repr(network) for network in networks}) > 1:
        return "members have different networks"
    for layer in networks[0].modules():
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if own and type(layer) not in KINDS:
            return f"{type(layer).__name__} has no grouped form"
    with torch.random.fork_rng(devices=()):
        inputs = torch.randn(TRIED, *shape, dtype=torch.float64)
        before = torch.get_rng_state()
        expected = [network.double().train()(inputs) for network in networks]
        if not torch.equal(torch.get_rng_state(), before):
            return "layers of members draw random numbers (dropout, stochastic depth)"
        try:
            found = grouped(networks)(torch.cat([inputs] * len(networks), 1))
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return f"its code works for a single member only ({' '.join(str(error).split())[:100]})"
    together = torch.cat(expected, 1)
    same = found.shape == together.shape and torch.allclose(found, together, rtol=1e-6, atol=1e-6)
    return None if same else "its code mixes channels of different members"

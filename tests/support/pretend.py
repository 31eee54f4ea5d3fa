"""A GPU that does not exist: CPU tensors that say they are on cuda:0 and are held to the rules of a GPU.

    with PretendGpu() as gpu:              # torch.randn(2, device="cuda") works in here, and computes on the CPU
        step(batch)                        # raises where a GPU would: tensors of two devices in one operation
        with gpu.hot(): ...                # raises where the host would wait for the GPU

Torch's fake tensors cannot run backward on a CUDA device without a driver, and have no values. These tensors do both,
so a step on the pretended GPU is compared with the same step on the CPU. What each stream reads and writes is recorded
with vector clocks: an access that is not ordered after the last write to the same memory is a hazard, whether or not
it did harm this time.
"""

import contextlib
import functools
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from dicedist.algorithm.networks.batch_norm import SyncBatchNorm, synchronize
from dicedist.cluster import exchange
from dicedist.cluster.exchange import Exchange

CUDA = torch.device("cuda", 0)
GIB = 2**30
aten = torch.ops.aten
# Operations whose result, or its shape, the host must wait for.
WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_consecutive.default,
}  # fmt: skip
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}  # wait if the index is a mask
FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}  # numbers of the host are copied
ACROSS = {aten.copy_.default, aten._to_copy.default}  # that may read a tensor of the host


class MixedDevices(AssertionError):
    pass


class HostWaits(AssertionError):
    pass


class Hazard(AssertionError):
    pass


class OnGpu(Tensor):
    """A CPU tensor on the pretended GPU. For torch's own code it is on the CPU, for ours on cuda:0."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=inner.device, requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner.detach()
        PretendGpu.present.holds(made)
        return made

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict) -> "OnGpu":
        """In memory of its own, which is held as that of any other tensor."""
        made = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made
        return memo[id(self)]

    def record_stream(self, stream: "Stream") -> None:
        PretendGpu.present.memory(self).recorded.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return PretendGpu.present.run(func, args, kwargs or {})


class Generator(torch.Generator):
    """A generator of the CPU that says it is the GPU's, so that both draw the same numbers."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu")
        made.of = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return CUDA if self.of.type == "cuda" else self.of


class Stream:
    """A queue of the GPU, with what it is known to come after: for each stream, how many of its operations."""

    def __init__(self) -> None:
        self.clock: Counter = Counter()

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock


class Graph:
    """A CUDA graph. The recording computes nothing; every replay computes the recorded calls on the same memory.

    Numbers of Python stay as they were. A generator that the graph does not know is an error, as on a GPU.
    """

    def __init__(self) -> None:
        self.calls: list[tuple] = []  # function, arguments, results
        self.generators: list[torch.Generator] = []
        self.before: dict[int, tuple] = {}  # storages that the recording wrote to, and what they held

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def note(self, func, args, kwargs, out) -> None:
        drawn_from = kwargs.get("generator")
        assert drawn_from is None or any(drawn_from is known for known in self.generators), "an unknown generator"
        self.calls.append((func, args, kwargs, out))

    def keep(self, tensor: "OnGpu") -> None:
        storage = tensor.inner.untyped_storage()
        self.before.setdefault(key(tensor.inner), (storage, storage.clone()))

    def replay(self) -> None:
        gpu = PretendGpu.present
        for func, args, kwargs, out in self.calls:
            written, read = accessed(func, args, kwargs) if hasattr(func, "_schema") else ([], [])
            result = func(*mapped(inside, args), **{name: mapped(inside, value) for name, value in kwargs.items()})
            for found, made in zip(tensors_in(result), tensors_in(out), strict=True):
                if key(found) != key(made.inner):
                    made.inner.copy_(found)
            gpu.access(func, read, written + tensors_in(out))


class Memory:
    """One piece of the GPU's memory: who wrote it last, who has read it since, and from which stream it came."""

    def __init__(self, stream: Stream):
        self.home, self.holders = stream, 0
        self.recorded: set[Stream] = set()  # by Tensor.record_stream
        self.made_by = "a copy to the GPU"
        self.written: tuple[Stream, int] | None = None
        self.read: dict[Stream, int] = {}


class PretendGpu(TorchFunctionMode):
    present: "PretendGpu"

    def __init__(self):
        super().__init__()
        self.stream, self.is_hot, self.is_on = Stream(), False, False
        self.streams = weakref.WeakSet([self.stream])
        self.free: list[Memory] = []  # given back, and not yet asked for
        self.leaked: list[str] = []  # what was given to somebody else while another stream used it
        self.memories: dict[int, Memory] = {}
        self.dtypes: set[torch.dtype] = set()  # of floating-point results, in steps that are hot
        self.patches = contextlib.ExitStack()
        self.recording: Graph | None = None

    def __enter__(self):
        PretendGpu.present, self.is_on = self, True
        for owner, name, value in (
            (torch, "Generator", Generator),
            (torch, "autocast", autocast),
            (torch.cuda, "Stream", self.new_stream),
            (torch.cuda, "current_stream", lambda device=None: self.stream),
            (torch.cuda, "stream", self.on),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", self.record),
            (torch.cuda, "default_generators", (torch.random.default_generator,)),
            (torch.cuda, "get_rng_state", lambda device: torch.get_rng_state()),
            (torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state)),
            (torch.cuda, "synchronize", lambda device=None: self.host_waits("torch.cuda.synchronize")),
            (torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB)),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        ):
            self.patches.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        self.patches.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error):
        self.is_on = False
        self.patches.close()
        return super().__exit__(*error)

    @contextlib.contextmanager
    def hot(self):
        """In here, a wait of the host for the GPU is an error."""
        self.is_hot = True
        try:
            yield
        finally:
            self.is_hot = False

    def new_stream(self, device=None) -> Stream:
        made = Stream()
        self.streams.add(made)
        return made

    @contextlib.contextmanager
    def on(self, stream: Stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def record(self, graph: Graph, capture_error_mode: str = "global"):
        """Run on a stream of its own. What the recording wrote to older memory is taken back."""
        apart = self.new_stream()
        self.host_waits("torch.cuda.graph")
        self.recording, was_hot, self.is_hot = graph, self.is_hot, True
        with self.on(apart):
            yield
        self.recording, self.is_hot = None, was_hot
        self.stream.wait_stream(apart)
        for storage, content in graph.before.values():
            storage.copy_(content)

    # Where tensors come from and go to: calls of torch's functions.

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is Tensor.to:
            return self.to(*args, **kwargs)
        if func is Tensor.pin_memory:
            return pinned(args[0])
        if func in (Tensor.cpu, Tensor.tolist, Tensor.numpy) and isinstance(args[0], OnGpu):
            self.host_waits(name)
            return func(args[0].detach().inner.clone(), *args[1:], **kwargs)
        if func in FROM_PYTHON and (is_gpu(kwargs.get("device")) or args and isinstance(args[0], OnGpu)):
            self.host_waits(f"{name} of numbers of the host")
        if func is Tensor.cuda:
            return self.to(args[0], CUDA, *args[2:], **kwargs)
        if "device" in kwargs and is_gpu(kwargs["device"]):
            kwargs["device"] = "cpu"
            out = mapped(on_gpu, func(*args, **kwargs))
            if self.recording is not None:
                self.recording.note(func, args, kwargs, out)
            return out
        return func(*args, **kwargs)

    def to(self, tensor: Tensor, *args, copy=False, **kwargs):
        if args and isinstance(args[0], Tensor):  # like another tensor
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and is_gpu(device) != isinstance(tensor, OnGpu):
            tensor = self.to_gpu(tensor, non_blocking) if is_gpu(device) else self.to_host(tensor, non_blocking)
        wanted = {"dtype": dtype, "memory_format": memory_format, "copy": copy or None}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return Tensor.to(tensor, **wanted) if wanted else tensor

    def to_gpu(self, tensor: Tensor, non_blocking: bool) -> OnGpu:
        if not (non_blocking and getattr(tensor, "is_pinned_here", False)):
            self.host_waits("a copy to the GPU from memory that is not pinned")
        return on_gpu(tensor.detach().clone())

    def to_host(self, tensor: OnGpu, non_blocking: bool) -> Tensor:
        if not non_blocking:
            self.host_waits("a copy to the host")
        return tensor.detach().inner.clone()

    def host_waits(self, why: str) -> None:
        if self.is_hot:
            raise HostWaits(f"the host waits for the GPU: {why}")
        for stream in self.streams:  # whatever is queued from now on comes after
            stream.wait_stream(self.stream)

    # What operations do: every call that reaches a kernel, those of backward included.

    def run(self, func, args, kwargs):
        self.refuse(func, [*tensors_in(args), *tensors_in(list(kwargs.values()))])
        written, read = accessed(func, args, kwargs)
        for tensor in written if self.recording is not None else ():
            self.recording.keep(tensor)
        result = func(*mapped(inside, args), **{name: mapped(inside, value) for name, value in kwargs.items()})
        out = mapped(on_gpu, result)
        if self.is_hot:
            self.dtypes.update(tensor.dtype for tensor in tensors_in(out) if tensor.is_floating_point())
        is_alias = any(returned.alias_info is not None for returned in func._schema.returns)
        if not is_alias:
            self.reuse()
        self.access(func, read, written + ([] if is_alias else tensors_in(out)))
        if self.recording is not None and not is_pure_view(func):
            self.recording.note(func, args, kwargs, out)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def refuse(self, func, given) -> None:
        on_host = [tensor for tensor in given if not isinstance(tensor, OnGpu)]
        by_mask = func in INDEXING and any(tensor.dtype == torch.bool for tensor in given[1:])
        fills = by_mask and func is not aten.index.Tensor and given[-1].numel() == 1  # torch calls masked_fill_
        if func in WAITING or by_mask and not fills:
            self.host_waits(str(func))
        if func not in ACROSS and any(tensor.dim() > 0 for tensor in on_host):
            raise MixedDevices(f"{func} mixes tensors of the GPU and of the host")
        if func in ACROSS and on_host:
            self.host_waits(f"{func} between host and GPU")

    def access(self, func, read, written) -> None:
        clock = self.stream.clock
        clock[self.stream] += 1
        now = clock[self.stream]
        for tensor in read:
            memory = self.memory(tensor)
            self.ordered(func, memory.written, "reads what another stream writes")
            memory.read[self.stream] = now
        for tensor in written:
            memory = self.memory(tensor)
            self.ordered(func, memory.written, "writes what another stream writes")
            for access in memory.read.items():
                self.ordered(func, access, "writes what another stream reads")
            memory.made_by = memory.made_by if memory.written else str(func)
            memory.written, memory.read = (self.stream, now), {}

    def ordered(self, what, before: tuple[Stream, int] | None, complaint: str) -> None:
        if before is not None and self.stream.clock[before[0]] < before[1]:
            raise Hazard(f"{what} {complaint}, and no wait orders them")

    def memory(self, tensor: OnGpu) -> Memory:
        return self.memories.setdefault(key(tensor.inner), Memory(self.stream))

    def holds(self, tensor: OnGpu) -> None:
        memory = self.memory(tensor)
        memory.holders += 1
        weakref.finalize(tensor, self.release, key(tensor.inner), memory)

    def release(self, where: int, memory: Memory) -> None:
        memory.holders -= 1
        if memory.holders == 0 and self.memories.get(where) is memory:
            del self.memories[where]
            self.free.append(memory)

    def reuse(self) -> None:
        """A request for memory on this stream may be given whatever was given back on it: all of that must be done."""
        mine = [memory for memory in self.free if memory.home is self.stream]
        self.free = [memory for memory in self.free if memory.home is not self.stream]
        for memory in mine:
            used = [*memory.read.items(), *([memory.written] if memory.written else [])]
            if any(self.stream.clock[stream] < time and stream not in memory.recorded for stream, time in used):
                self.leaked.append(f"given away while another stream uses it: memory of {memory.made_by}")


def accessed(func, args, kwargs):
    """The tensors on the GPU that an operation writes to, and those that it reads."""
    written, read = [], []
    for given, argument in zip([*args, *kwargs.values()], func._schema.arguments, strict=False):
        tensors = [tensor for tensor in tensors_in(given) if isinstance(tensor, OnGpu)]
        (written if argument.alias_info is not None and argument.alias_info.is_write else read).extend(tensors)
    return written, [] if is_pure_view(func) else read


def is_pure_view(func) -> bool:
    """Views touch no memory."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def tensors_in(value) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


def mapped(function, value):
    """The same lists and tuples, with the function applied to every tensor."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def inside(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, OnGpu) else tensor


def key(inner: Tensor) -> int:
    return inner.untyped_storage()._cdata


def on_gpu(tensor: Tensor) -> OnGpu:
    return tensor if isinstance(tensor, OnGpu) else OnGpu(tensor)


def is_gpu(device) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


def pinned(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.is_pinned_here = True
    return copy


class autocast(torch.autocast):
    """The CPU's autocast in place of the GPU's; their lists of operations differ a little."""

    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu", *args, **kwargs)


def as_on_a_cpu(exchange, module, frozen):
    synchronize(module, lambda norm: SyncBatchNorm(norm, exchange.sum_over_replicas), frozen)


class PretendNccl:
    """Carries tensors of the pretended GPU over gloo, in the manner of NCCL, and records what this rank posts.

    NCCL works on a stream of its own, which waits for the current one; a group of messages is one piece of work, and
    waiting for it orders streams.
    """

    def __init__(self, gpu: PretendGpu):
        self.gpu, self.stream = gpu, gpu.new_stream()
        self.posted: list[Any] = []  # messages that are posted together, or (ranks, bytes) of an all-reduce
        self.patches = contextlib.ExitStack()

    def __enter__(self):
        self.batch_isend_irecv, self.all_reduce = dist.batch_isend_irecv, dist.all_reduce
        for owner, name, value in (
            (dist, "batch_isend_irecv", self.post_messages),
            (dist, "all_reduce", self.post_all_reduce),
            (exchange, "DistributedDataParallel", functools.partial(Replicated, self)),
            # torch's own has kernels on GPUs only
            (Exchange, "synchronize", as_on_a_cpu),
        ):
            self.patches.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        return self

    def __exit__(self, *error):
        self.patches.close()

    def post_messages(self, operations):
        sends = [operation.tensor for operation in operations if operation.op is dist.isend]
        receives = [operation.tensor for operation in operations if operation.op is dist.irecv]
        assert all(isinstance(tensor, OnGpu) for tensor in sends + receives), "NCCL carries tensors of the GPU only"
        self.posted.append([Message(o.op is dist.isend, o.peer, o.tensor.nbytes) for o in operations])
        self.touch("send and receive", sends, receives)
        works = self.batch_isend_irecv([dist.P2POp(o.op, o.tensor.inner, o.peer) for o in operations])
        return [Work(self, works)]

    def post_all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not isinstance(tensor, OnGpu):  # records and agreements, on the host
            return self.all_reduce(tensor, op, group, async_op)
        assert not async_op and op == dist.ReduceOp.SUM
        self.posted.append((tuple(dist.get_process_group_ranks(group)), tensor.nbytes))
        self.touch("all_reduce", [tensor], [tensor])
        self.all_reduce(tensor.inner, op, group)
        self.gpu.stream.wait_stream(self.stream)

    def touch(self, what, read, written):
        self.stream.wait_stream(self.gpu.stream)
        with self.gpu.on(self.stream):
            self.gpu.access(what, read, written)


@dataclass(frozen=True)
class Message:
    sends: bool
    peer: int
    bytes: int


@dataclass(frozen=True)
class Work:
    nccl: PretendNccl
    works: list

    def wait(self):
        for work in self.works:
            work.wait()
        self.nccl.gpu.stream.wait_stream(self.nccl.stream)


class Replicated(torch.nn.Module):
    """In place of DistributedDataParallel, whose buckets are made in C++: every gradient becomes the mean of all."""

    def __init__(self, nccl, module, process_group, **options):
        super().__init__()
        self.module = module
        size = dist.get_world_size(process_group)

        def average(parameter):
            nccl.post_all_reduce(parameter.grad, group=process_group)
            parameter.grad /= size

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(average)

    def forward(self, *inputs):
        return self.module(*inputs)


def what_waits_for_ever(posted):
    """Follow the queues of all ranks as NCCL would, and return what is left where no rank can go on; [] if all end.

    posted: for each rank what it posts, in order. A rank's next entry begins when the one before it is done; a message
    goes through when both ends have begun; messages between two ranks match in their order and must be of one size.
    """
    queues = [deque(entries) for entries in posted]
    begun: list[Any] = [None] * len(queues)  # for each rank, the messages of its entry that have not gone through
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            if begun[rank] is None and queue:
                begun[rank] = list(queue[0]) if isinstance(queue[0], list) else queue[0]
                progress = True
        for rank, entry in enumerate(begun):
            if isinstance(entry, tuple) and all(begun[peer] == entry for peer in entry[0]):
                for peer in entry[0]:
                    begun[peer] = None
                    queues[peer].popleft()
                progress = True
            for message in list(entry) if isinstance(entry, list) else ():
                progress |= goes_through(begun, rank, message)
            if begun[rank] == []:
                begun[rank] = None
                queues[rank].popleft()
                progress = True
    return [(rank, entry) for rank, entry in enumerate(begun) if entry is not None]


def goes_through(begun, rank, message):
    """Return whether the other end has begun; then both ends are done."""
    other = begun[message.peer]
    first = next((m for m in begun[rank] if (m.sends, m.peer) == (message.sends, message.peer)), None)
    if not isinstance(other, list) or first is not message:
        return False
    matching = next((m for m in other if m.peer == rank and m.sends != message.sends), None)
    if matching is None:
        return False
    assert matching.bytes == message.bytes, (
        f"rank {rank} and {message.peer}: {message.bytes} and {matching.bytes} bytes"
    )
    begun[rank].remove(message)
    other.remove(matching)
    return True

"""Checks of the GPUs, the links between them, and DALI. Without a GPU most of these checks are skipped."""

import io
from itertools import permutations

import torch

from dicedist.cluster.devices import GIB, LEAST_GPU, why_unusable
from dicedist.diagnosis.finding import FAILED, OK, SKIPPED, Finding, judged

NO_GPU = "there is no GPU that torch can use"


def driver() -> Finding:
    if torch.cuda.is_available():
        return judged(f"CUDA {torch.version.cuda} of the wheel runs on it")
    if unusable := why_unusable():
        what, _, remedy = unusable.rpartition(": ")
        return judged(what, remedy, state=FAILED)
    return Finding(SKIPPED, f"{NO_GPU}; training uses the CPU")


def devices(ranks: int) -> Finding:
    if not torch.cuda.is_available():
        return Finding(SKIPPED, NO_GPU)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    free = [torch.cuda.mem_get_info(index)[0] for index in range(len(found))]
    what = ", ".join(
        f"{index}: {gpu.name} {room / GIB:.1f} of {gpu.total_memory / GIB:.1f} GiB free"
        for index, (gpu, room) in enumerate(zip(found, free, strict=True))
    )
    taken = [str(index) for index, room in enumerate(free) if room < LEAST_GPU]
    if taken:
        remedy = f"end what uses GPU {', '.join(taken)} (nvidia-smi), or choose others with CUDA_VISIBLE_DEVICES"
        return judged(what, remedy, state=FAILED)
    if ranks > len(found):
        remedy = f"start {len(found)} ranks, over which members are dealt: --nproc_per_node={len(found)}"
        return judged(what, remedy, state=FAILED)
    mixed = len({gpu.name for gpu in found}) > 1
    return judged(what, "the slowest kind sets the pace: CUDA_VISIBLE_DEVICES picks one kind" if mixed else "")


def peers() -> Finding:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return Finding(SKIPPED, f"{count} GPUs")
    apart = [pair for pair in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)]
    what = f"{count * (count - 1) - len(apart)} of {count * (count - 1)} directions"
    shown = ", ".join(f"{one}->{other}" for one, other in apart[:6])
    return judged(what, f"NCCL goes through the host for {shown}: slower, not wrong" if apart else "")


def nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding(SKIPPED, NO_GPU)
    try:
        return judged("version " + ".".join(map(str, torch.cuda.nccl.version())))
    except (AttributeError, RuntimeError):  # torch was built without NCCL
        remedy = "install torch's own wheel for Linux, which carries NCCL; or train in one process, on one GPU"
        return judged("this torch was built without it", remedy, state=FAILED)


def dali() -> Finding:
    """Decode an image, on the GPU if there is one."""
    try:
        from nvidia.dali import Pipeline, fn, types
    except (ImportError, OSError) as error:
        remedy = "pip install nvidia-dali-cuda130 (Linux); training uses torch's pipeline meanwhile"
        return judged(f"cannot be imported: {error}", remedy)
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 100, 50)).save(file, "JPEG")
    gpu = 0 if torch.cuda.is_available() else None
    pipe = Pipeline(1, 1, gpu)
    with pipe:
        encoded = fn.external_source(source=lambda: [np.frombuffer(file.getvalue(), np.uint8)])
        device = "cpu" if gpu is None else "mixed"
        pipe.set_outputs(fn.decoders.image(encoded, device=device, output_type=types.DALIImageType.RGB))
    pipe.build()
    (images,) = pipe.run()
    pixel = np.asarray(images.as_cpu().as_tensor())[0, 15, 20]
    if abs(pixel.astype(int) - [200, 100, 50]).max() > 4:
        return judged(f"decodes wrongly: {pixel.tolist()}", "write data.pipeline=torch", state=FAILED)
    where = "on the CPU" if gpu is None else "with nvJPEG"
    return Finding(OK, f"decodes a JPEG {where}")

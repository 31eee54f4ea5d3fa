"""The precision of the parts on one rank: autocast and the loss scale of fp16."""

import torch

AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """With fp16 the parts of a rank share one loss scale, because their losses run backward together."""

    def __init__(self, name: str, device: torch.device):
        self.device, self.dtype = device, AUTOCAST[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def for_members(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def for_discriminator(self) -> torch.autocast:
        """bf16 on a GPU if members use it. Never fp16: log f may leave its range, and the gradients of log f do.

        Without the cache of weights in bf16: w takes several steps inside one context, and would read old ones.
        """
        halved = self.device.type == "cuda" and self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=halved, cache_enabled=False)

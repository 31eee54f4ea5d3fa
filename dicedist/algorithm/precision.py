"""The precision of the parts on one rank: autocast and the loss scale of fp16."""

import torch

AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The autocast contexts of a rank, and its loss scale: one for all parts, as their losses run backward together."""

    def __init__(self, name: str, device: torch.device):
        self.device, self.dtype = device, AUTOCAST[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def for_members(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def for_discriminator(self) -> torch.autocast:
        """Return bf16 on a GPU if members use bf16. fp16 is too narrow for log f and its gradients.

        The cache of weights is off: w takes several steps inside one context, and would read old weights.
        """
        halved = self.device.type == "cuda" and self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=halved, cache_enabled=False)

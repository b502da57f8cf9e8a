"""Tensors of the host to a device, for which nobody waits: a copy out of pageable memory would have the host wait for all that the device does."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x, of the host's memory, on a device."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

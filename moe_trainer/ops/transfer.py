"""Asynchronous host-to-device copies: from pageable memory a copy would block the host until the device is done."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device; a tensor that is on the device stays as it is."""
    return (x.pin_memory() if device.type == "cuda" and not x.is_cuda else x).to(device, non_blocking=True)

"""Asynchronous host-to-device copies: from pageable memory a copy would block the host until the device is done."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x, of the host's memory, on a device."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

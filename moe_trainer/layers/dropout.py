"""Dropout that knows whether its tensor is cut over the tensor-parallel group."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_trainer.parallel.rng import ShardStream


class Dropout(nn.Module):
    """Zero elements with probability p and scale the others by 1 / (1 - p), in training.

    stream: where the random numbers come from when the tensor is cut over the tensor-parallel group (its rows, under sequence
    parallelism); None means torch's global generator, so that a replicated tensor loses the same elements on every rank.
    """

    def __init__(self, p: float, stream: ShardStream | None = None):
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        with drawing(self.stream, x.device):
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"{self.p}, {'replicated' if self.stream is None else 'cut over tp'}"


def drawing(stream: ShardStream | None, device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, operators draw from the stream; with None from torch's global generator, as always."""
    return contextlib.nullcontext() if stream is None else stream.drawing(device)

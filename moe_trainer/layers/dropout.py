"""Dropout that knows whether its tensor is sharded over the tensor-parallel group."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_trainer.parallel.rng import ShardRNG


class Dropout(nn.Module):
    """Dropout that supports tensors sharded over the tensor-parallel group.

    Args:
        stream: random stream of a sharded tensor (its tokens, under sequence parallelism). None uses torch's global
            generator, so that a replicated tensor loses the same elements on every rank.
    """

    def __init__(self, p: float, stream: ShardRNG | None = None):
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        with rng_context(self.stream, x.device):
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"{self.p}, {'replicated' if self.stream is None else 'cut over tp'}"


def rng_context(stream: ShardRNG | None, device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which operators draw from the stream; None keeps torch's global generator."""
    return contextlib.nullcontext() if stream is None else stream.fork_rng(device)

"""Dispatch by HybridEP (--moe-token-dispatcher-type flex, backend hybridep): the library moves tokens and sorts them by expert.

Design: the library takes the dense routing map and probabilities, sends each token once to every rank that needs it, and lays the rows
out by local expert there; on the way back it adds the rows of a token, on the rank and between ranks. What is left to this file is
the gradient: that of a dispatch is a combine and that of a combine a dispatch along the same way (the handle). The rows are those of
the all-to-all, in its order.

All ranks must dispatch equally many tokens; --moe-hybridep-pad-uneven-dispatch-inputs fills up with tokens that no expert takes.
With expert tensor parallelism every rank that holds a piece of an expert counts as one that holds an expert of its own.

Shape letters: T local tokens, E experts, V experts counted once per rank of etp that holds a piece, e local experts, R rows, H hidden.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.moe.dispatch import deepep
from moe_trainer.moe.dispatch.base import Dispatched, Hints, Members, Once, TokenDispatcher, at_once
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import ParallelState

INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@hybrid-ep"


class _Way:
    """The way of one dispatch: the library's buffer and handle, and rows of each local expert once they are known."""

    def __init__(self, buffer: Any, num_local: int, fused: bool):
        self.buffer, self.num_local = buffer, num_local
        self.dispatch_options = {"fuse_permute_dispatch": True} if fused else {}
        self.combine_options = {"fuse_unpermute_combine": True} if fused else {}
        self.handle: Any = None
        self.counts_e: list[int] = []

    def dispatch(self, hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Along the way taken before."""
        return self.buffer.dispatch_with_permute(
            hidden=hidden.contiguous(), probs=probs, num_of_experts_per_rank=self.num_local, num_permuted_tokens=sum(self.counts_e),
            handle=self.handle, **self.dispatch_options)[:2]

    def combine(self, hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.buffer.combine_with_unpermute(hidden=hidden.contiguous(), probs=probs, handle=self.handle, **self.combine_options)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, once, x_TH, probs_TV, routing_TV):
        ctx.way, found = way, []

        def ask() -> tuple[Any, list[int]]:
            x_RH, probs_R, _, counts_e, handle = way.buffer.dispatch_with_permute(
                hidden=x_TH, routing_map=routing_TV, probs=probs_TV, num_of_experts_per_rank=way.num_local, **way.dispatch_options)
            found.extend((x_RH, probs_R))
            return handle, counts_e.tolist()

        way.handle, way.counts_e = once(ask)
        return tuple(found) or way.dispatch(x_TH, probs_TV)  # the host need not be told again

    @staticmethod
    def backward(ctx, grad_RH, grad_R):
        grad_TH, grad_TV = ctx.way.combine(grad_RH, grad_R.float().contiguous())
        return None, None, grad_TH, grad_TV, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, y_RH):
        ctx.way = way
        return way.combine(y_RH)[0]

    @staticmethod
    def backward(ctx, grad_TH):
        return None, ctx.way.dispatch(grad_TH)[0]


@dataclass(frozen=True)
class _Sent:
    """What the phases of one dispatch tell each other: the routing, the way, how many tokens there were before padding, and whom to ask
    for what reaches the host."""

    routing_TV: Tensor
    way: _Way
    num_tokens: int
    once: Once = at_once


class HybridEPDispatcher(TokenDispatcher):
    """Tokens once to every rank of tp_ep that holds one of their experts, sorted by the library."""

    def __init__(self, ps: ParallelState, buffer: Any, *, fused: bool = False, pad_uneven: bool = False):
        self.group = ps.tp_ep
        self.members = Members(ps)
        self.buffer, self.fused, self.pad_uneven = buffer, fused, pad_uneven

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Bring routing and probabilities into the library's form; fill up to the longest rank if asked to."""
        num_tokens = x_TH.shape[0]
        probs_TV, routing_TV = self.members.columns(probs_TE).float(), self.members.columns(routing_TE)
        if self.pad_uneven:
            longest = all_reduce(torch.tensor([num_tokens], device=x_TH.device), self.group, op="max").item()
            x_TH, probs_TV, routing_TV = (F.pad(table, (0, 0, 0, longest - num_tokens)) for table in (x_TH, probs_TV, routing_TV))
        way = _Way(self.buffer, routing_TV.shape[1] // self.group.size, self.fused)
        return Dispatched(x_TH.contiguous(), probs_TV.contiguous(), [], _Sent(routing_TV.contiguous(), way, num_tokens))

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """Nothing yet."""
        return replace(sent, handle=replace(sent.handle, once=once))

    def finish_exchange(self, sent: Dispatched) -> Dispatched:
        """Send, receive and sort. Counts reach the host in here; in a region that is recomputed the second pass takes the way of the first."""
        record: _Sent = sent.handle
        x_RH, probs_R = _Dispatch.apply(record.way, record.once, sent.x_RH, sent.probs_R, record.routing_TV)
        return Dispatched(x_RH, probs_R, record.way.counts_e, record)

    def finish_exchange_back(self, y_RH: Tensor, under_way: Any, sent: Dispatched) -> Tensor:
        """Bring the rows home; those of one token are added."""
        return _Combine.apply(sent.handle.way, y_RH)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Tokens are in their order already; padding goes."""
        return y_RH[:sent.handle.num_tokens]


def problem() -> str | None:
    """What stands in the way of using the library; None if nothing does."""
    return deepep.problem("HybridEPBuffer")


def make_dispatcher(ps: ParallelState, *, hidden_size: int, num_experts: int, max_tokens: int, num_sms: int | None,
                    num_sms_preprocessing: int | None, num_blocks_permute: int | None, num_blocks_unpermute: int | None,
                    fused: bool, pad_uneven: bool) -> HybridEPDispatcher:
    """A dispatcher with a communication buffer of its own. Collective over ps.tp_ep; on CUDA devices. None: the library's choice."""
    deep_ep = importlib.import_module("deep_ep")
    options = {
        "num_sms_dispatch_api": num_sms, "num_sms_combine_api": num_sms, "num_sms_preprocessing_api": num_sms_preprocessing,
        "num_blocks_permute": num_blocks_permute, "num_blocks_unpermute": num_blocks_unpermute,
    }
    buffer = deep_ep.HybridEPBuffer(
        group=ps.tp_ep.handle, hidden_dim=hidden_size, max_num_of_tokens_per_rank=max_tokens,
        num_local_experts=num_experts // ps.ep.size, **{name: value for name, value in options.items() if value is not None})
    return HybridEPDispatcher(ps, buffer, fused=fused, pad_uneven=pad_uneven)

"""Dispatch by HybridEP (--moe-token-dispatcher-type flex, backend hybridep): the library moves tokens and sorts them by expert.

Design: the library takes the dense routing map and probabilities, sends each token once to every rank that needs it, and lays the rows
out by local expert there; on the way back it adds the rows of a token, on the rank and between ranks. What is left to this file is
the gradient: that of a dispatch is a combine and that of a combine a dispatch along the same way (the handle). The rows are those of
the all-to-all, in its order.

Given a buffer's size beforehand, the library leaves the counts on the device and nothing waits for the host. It drops the rows that find
no room and sets a flag, which the training loop reads once per iteration (training/step.py).

All ranks must dispatch equally many tokens; --moe-hybridep-pad-uneven-dispatch-inputs fills up with tokens that no expert takes, to the
number that the buffer was made for, which all ranks know: Megatron-Core asks for the largest number of the moment, and waits for it.
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
from moe_trainer.parallel.state import ParallelState

FUSED_NEEDS_COUNTS = "the fused combine of --moe-permute-fusion-into-hybridep waits forever for a token of which all rows were dropped"
INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@hybrid-ep"


@dataclass(frozen=True)
class _Found:
    """What the library tells of a way. rows: that it gives, counts_e and overflow: of Dispatched."""

    handle: Any
    rows: int
    counts_e: list[int] | Tensor
    overflow: Tensor | None = None


class _Way:
    """The way of one dispatch: the library's buffer and, once it is found, what the library tells of it.

    buffer_rows: to receive into, without telling the host; None: as many as there are.
    """

    def __init__(self, buffer: Any, num_local: int, fused: bool, buffer_rows: int | None):
        self.buffer, self.num_local, self.buffer_rows = buffer, num_local, buffer_rows
        self.dispatch_options = {"fuse_permute_dispatch": True} if fused else {}
        self.combine_options = {"fuse_unpermute_combine": True} if fused else {}
        if buffer_rows is not None:
            self.dispatch_options["non_blocking"] = True
        self.found: _Found | None = None

    def open(self, hidden: Tensor, probs: Tensor, routing: Tensor) -> tuple[_Found, Tensor, Tensor]:
        """Dispatch on a new way. Without a buffer the host waits in here."""
        size = {} if self.buffer_rows is None else {"num_permuted_tokens": self.buffer_rows}
        x_RH, probs_R, _, counts_e, handle = self.buffer.dispatch_with_permute(
            hidden=hidden, routing_map=routing, probs=probs, num_of_experts_per_rank=self.num_local, **size, **self.dispatch_options)
        if self.buffer_rows is not None:
            return _Found(handle, self.buffer_rows, counts_e, handle[-1]), x_RH, probs_R
        counts_e = counts_e.tolist()
        return _Found(handle, sum(counts_e), counts_e), x_RH, probs_R

    def dispatch(self, hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Along the way taken before."""
        return self.buffer.dispatch_with_permute(
            hidden=hidden.contiguous(), probs=probs, num_of_experts_per_rank=self.num_local, num_permuted_tokens=self.found.rows,
            handle=self.found.handle, **self.dispatch_options)[:2]

    def combine(self, hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.buffer.combine_with_unpermute(hidden=hidden.contiguous(), probs=probs, handle=self.found.handle, **self.combine_options)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, once, x_TH, probs_TV, routing_TV):
        ctx.way, tables = way, []

        def ask() -> _Found:
            found, *given = way.open(x_TH, probs_TV, routing_TV)
            tables.extend(given)
            return found

        way.found = once(ask)
        return tuple(tables) or way.dispatch(x_TH, probs_TV)  # the host need not be told again

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

    def __init__(self, ps: ParallelState, buffer: Any, *, fused: bool = False, pad_to: int | None = None):
        """pad_to: a number of tokens to fill up to, the same on all ranks."""
        self.group = ps.tp_ep
        self.members = Members(ps)
        self.buffer, self.fused, self.pad_to = buffer, fused, pad_to
        self.takes_buffer_rows = not fused  # FUSED_NEEDS_COUNTS

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Bring routing and probabilities into the library's form; fill up with tokens that no expert takes if asked to."""
        num_tokens = x_TH.shape[0]
        probs_TV, routing_TV = self.members.columns(probs_TE).float(), self.members.columns(routing_TE)
        if self.pad_to is not None and num_tokens < self.pad_to:
            x_TH, probs_TV, routing_TV = (F.pad(table, (0, 0, 0, self.pad_to - num_tokens)) for table in (x_TH, probs_TV, routing_TV))
        way = _Way(self.buffer, routing_TV.shape[1] // self.group.size, self.fused, hints.buffer_rows)
        return Dispatched(x_TH.contiguous(), probs_TV.contiguous(), [], _Sent(routing_TV.contiguous(), way, num_tokens))

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """Nothing yet."""
        return replace(sent, handle=replace(sent.handle, once=once))

    def finish_exchange(self, sent: Dispatched) -> Dispatched:
        """Send, receive and sort. Without a buffer's size counts reach the host in here. In a region that is recomputed the second pass
        takes the way of the first."""
        record: _Sent = sent.handle
        x_RH, probs_R = _Dispatch.apply(record.way, record.once, sent.x_RH, sent.probs_R, record.routing_TV)
        found = record.way.found
        return Dispatched(x_RH, probs_R, found.counts_e, record, found.overflow)

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
    return HybridEPDispatcher(ps, buffer, fused=fused, pad_to=max_tokens if pad_uneven else None)

"""Dispatch by HybridEP (--moe-token-dispatcher-type flex, backend hybridep), which also sorts tokens by expert.

The library takes the dense routing map and probabilities, sends each token once to every rank that needs it, and
sorts what it receives by local expert; combine sums a token's results on the rank and between ranks. This file adds
the gradients: that of a dispatch is a combine, and that of a combine a dispatch with the same handle. The order of
tokens is the all-to-all's.

With a fixed receive buffer the counts stay on the device and nothing waits for the host. Tokens that do not fit are
dropped and set a flag, which the training loop reads once per iteration (training/step.py).

All ranks must dispatch equally many tokens. --moe-hybridep-pad-uneven-dispatch-inputs pads with tokens that no expert
takes, to the size for which the buffer was made, which all ranks know; Megatron-Core exchanges the largest current
number and waits for it. With expert tensor parallelism every shard of an expert counts as an expert.

Shape letters: T local tokens, E experts, V experts counted once per rank of etp that holds a shard, e local experts,
R routed tokens, H hidden.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.moe.dispatch import deepep
from moe_trainer.moe.dispatch.base import (
    NO_HINTS,
    CacheFn,
    DispatchHints,
    DispatchState,
    EtpExpansion,
    TokenDispatcher,
    no_cache,
)
from moe_trainer.parallel.state import ParallelState

FUSED_NEEDS_COUNTS = (
    "the fused combine of --moe-permute-fusion-into-hybridep waits forever for a token that was dropped everywhere"
)
INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@hybrid-ep"


@dataclass(frozen=True)
class _LibraryHandle:
    """Handle of the library, number of routed tokens that it returns, counts and overflow as in DispatchState."""

    handle: Any
    num_received: int
    counts_e: list[int] | Tensor
    overflow: Tensor | None = None


class _Exchange:
    """One dispatch and its combine: the library's buffer and, after the dispatch, its handle.

    With a buffer_size the counts stay on the device; with None the library returns as many tokens as it receives.
    """

    def __init__(self, buffer: Any, num_local: int, fused: bool, buffer_size: int | None):
        self.buffer, self.num_local, self.buffer_size = buffer, num_local, buffer_size
        self.dispatch_options = {"fuse_permute_dispatch": True} if fused else {}
        self.combine_options = {"fuse_unpermute_combine": True} if fused else {}
        if buffer_size is not None:
            self.dispatch_options["non_blocking"] = True
        self.library: _LibraryHandle | None = None

    def dispatch(self, hidden: Tensor, probs: Tensor, routing: Tensor) -> tuple[_LibraryHandle, Tensor, Tensor]:
        """Dispatch by a routing map. Without a fixed buffer the host waits for the counts."""
        size = {} if self.buffer_size is None else {"num_permuted_tokens": self.buffer_size}
        x_RH, probs_R, _, counts_e, handle = self.buffer.dispatch_with_permute(
            hidden=hidden,
            routing_map=routing,
            probs=probs,
            num_of_experts_per_rank=self.num_local,
            **size,
            **self.dispatch_options,
        )
        if self.buffer_size is not None:
            return _LibraryHandle(handle, self.buffer_size, counts_e, handle[-1]), x_RH, probs_R
        counts_e = counts_e.tolist()
        return _LibraryHandle(handle, sum(counts_e), counts_e), x_RH, probs_R

    def dispatch_with_handle(self, hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Dispatch along the routes of the earlier dispatch."""
        return self.buffer.dispatch_with_permute(
            hidden=hidden.contiguous(),
            probs=probs,
            num_of_experts_per_rank=self.num_local,
            num_permuted_tokens=self.library.num_received,
            handle=self.library.handle,
            **self.dispatch_options,
        )[:2]

    def combine(self, hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.buffer.combine_with_unpermute(
            hidden=hidden.contiguous(), probs=probs, handle=self.library.handle, **self.combine_options
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, cache_fn, x_TH, probs_TV, routing_TV):
        ctx.exchange, outputs = exchange, []

        def dispatch() -> _LibraryHandle:
            library, *tensors = exchange.dispatch(x_TH, probs_TV, routing_TV)
            outputs.extend(tensors)
            return library

        exchange.library = cache_fn(dispatch)
        # without outputs this is a recomputed region: the host knows the counts already
        return tuple(outputs) or exchange.dispatch_with_handle(x_TH, probs_TV)

    @staticmethod
    def backward(ctx, grad_RH, grad_R):
        grad_TH, grad_TV = ctx.exchange.combine(grad_RH, grad_R.float().contiguous())
        return None, None, grad_TH, grad_TV, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, y_RH):
        ctx.exchange = exchange
        return exchange.combine(y_RH)[0]

    @staticmethod
    def backward(ctx, grad_TH):
        return None, ctx.exchange.dispatch_with_handle(grad_TH)[0]


@dataclass(frozen=True)
class _HybridEPState:
    """State of one dispatch: routing, exchange, number of tokens before padding, cache of host reads."""

    routing_TV: Tensor
    exchange: _Exchange
    num_tokens: int
    cache_fn: CacheFn = no_cache


class HybridEPDispatcher(TokenDispatcher):
    """Send each token once to every rank of tp_ep that holds one of its experts; the library sorts."""

    def __init__(self, ps: ParallelState, buffer: Any, *, fused: bool = False, pad_to: int | None = None):
        """Store the buffer; inputs are padded to `pad_to` tokens, the same number on all ranks."""
        self.group = ps.tp_ep
        self.etp_expansion = EtpExpansion(ps)
        self.buffer, self.fused, self.pad_to = buffer, fused, pad_to
        self.supports_fixed_buffer = not fused  # FUSED_NEEDS_COUNTS

    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Expand routing and probabilities over etp; pad with tokens that no expert takes."""
        num_tokens = x_TH.shape[0]
        probs_TV, routing_TV = self.etp_expansion.expand(probs_TE).float(), self.etp_expansion.expand(routing_TE)
        if self.pad_to is not None and num_tokens < self.pad_to:
            x_TH, probs_TV, routing_TV = (
                F.pad(table, (0, 0, 0, self.pad_to - num_tokens)) for table in (x_TH, probs_TV, routing_TV)
            )
        exchange = _Exchange(self.buffer, routing_TV.shape[1] // self.group.size, self.fused, hints.buffer_size)
        handle = _HybridEPState(routing_TV.contiguous(), exchange, num_tokens)
        return DispatchState(x_TH.contiguous(), probs_TV.contiguous(), [], handle)

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Note the cache; the library communicates in finish_token_dispatch."""
        return replace(state, handle=replace(state.handle, cache_fn=cache_fn))

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Send, receive, sort; wait for the counts unless the buffer is fixed. A recomputed pass reuses the handle."""
        hybrid: _HybridEPState = state.handle
        x_RH, probs_R = _Dispatch.apply(hybrid.exchange, hybrid.cache_fn, state.x_RH, state.probs_R, hybrid.routing_TV)
        library = hybrid.exchange.library
        return DispatchState(x_RH, probs_R, library.counts_e, hybrid, library.overflow)

    def finish_token_combine(self, y_RH: Tensor, handle: Any, state: DispatchState) -> Tensor:
        """Return the results to the ranks of their tokens; those of one token are summed."""
        return _Combine.apply(state.handle.exchange, y_RH)

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Remove the padding; the results are in token order."""
        return y_RH[: state.handle.num_tokens]


def problem() -> str | None:
    """Return why the library cannot be used; None if it can."""
    return deepep.problem("HybridEPBuffer")


def make_dispatcher(
    ps: ParallelState,
    *,
    hidden_size: int,
    num_experts: int,
    max_tokens: int,
    num_sms: int | None,
    num_sms_preprocessing: int | None,
    num_blocks_permute: int | None,
    num_blocks_unpermute: int | None,
    fused: bool,
    pad_uneven: bool,
) -> HybridEPDispatcher:
    """Build a dispatcher and its communication buffer, on CUDA devices; options that are None are left to the library.

    Communication: collective over ps.tp_ep.
    """
    deep_ep = importlib.import_module("deep_ep")
    options = {
        "num_sms_dispatch_api": num_sms,
        "num_sms_combine_api": num_sms,
        "num_sms_preprocessing_api": num_sms_preprocessing,
        "num_blocks_permute": num_blocks_permute,
        "num_blocks_unpermute": num_blocks_unpermute,
    }
    buffer = deep_ep.HybridEPBuffer(
        group=ps.tp_ep.handle,
        hidden_dim=hidden_size,
        max_num_of_tokens_per_rank=max_tokens,
        num_local_experts=num_experts // ps.ep.size,
        **{name: value for name, value in options.items() if value is not None},
    )
    return HybridEPDispatcher(ps, buffer, fused=fused, pad_to=max_tokens if pad_uneven else None)

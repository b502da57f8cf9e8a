"""Dispatch by HybridEP (--moe-token-dispatcher-type flex, backend hybridep), which also sorts tokens by expert.

The library takes the dense routing map and probabilities, sends each token once to every rank that needs it, and
sorts what it receives by local expert; combine sums a token's results on the rank and between ranks. This file adds
the gradients: that of a dispatch is a combine, and that of a combine a dispatch with the same handle. The order of
tokens is the all-to-all's. Dispatches carry MXFP8 where asked (mxfp8_transport.py); the library combines bf16 only.
It works on the current stream; its calls run here on a separate stream, so that other work overlaps with them from
start_* to finish_*, in backward too.

With a fixed receive buffer the counts stay on the device and nothing waits for the host. Tokens that do not fit are
dropped and set a flag, which the training loop reads once per iteration (training/step.py).

All ranks must dispatch equally many tokens. --moe-hybridep-pad-uneven-dispatch-inputs pads with tokens that no expert
takes, to the size for which the buffer was made, which all ranks know; Megatron-Core exchanges the largest current
number and waits for it. With expert tensor parallelism every shard of an expert counts as an expert.

Shape letters: T local tokens, E experts, V experts counted once per rank of etp that holds a shard, e local experts,
R routed tokens, H hidden.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arguments.mechanisms.dispatchers import HYBRIDEP
from moe_trainer.memory.side_stream import SideStream, wait_for
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
from moe_trainer.moe.dispatch.flex import LibrarySettings
from moe_trainer.moe.dispatch.mxfp8_transport import HIGH_PRECISION, Mxfp8Transport
from moe_trainer.ops.fixed_slots import padded_size
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.collectives import Exchange, finish_exchange, start_exchange
from moe_trainer.parallel.state import ParallelState

FUSED_NEEDS_COUNTS = (
    "the fused combine of --moe-permute-fusion-into-hybridep, unlike the fused dispatch, has no argument for a fixed "
    "buffer, and waits forever for a token that was dropped everywhere"
)
INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP@hybrid-ep"


@dataclass(frozen=True)
class _LibraryHandle:
    """Handle of the library, number of routed tokens that it returns, counts and overflow as in DispatchState."""

    handle: Any
    num_received: int
    counts_e: list[int] | Tensor
    overflow: Tensor | None = None


class _Calls:
    """The library's calls for one dispatch and its combine, and the handle that they share.

    With a buffer_size the counts stay on the device, unless even_counts are given, those of the experts; with None the
    library returns as many tokens as it receives.

    Attributes:
        library: set by the dispatch.
    """

    def __init__(
        self,
        buffer: Any,
        num_local: int,
        fused: bool,
        buffer_size: int | None,
        pad_multiple: int,
        mxfp8: Mxfp8Transport,
        even_counts: list[int] | None,
    ):
        self.buffer, self.num_local, self.mxfp8 = buffer, num_local, mxfp8
        self.buffer_size = None if buffer_size is None else padded_size(buffer_size, num_local, pad_multiple)
        self.dispatch_options: dict[str, Any] = {"fuse_permute_dispatch": True} if fused else {}
        self.combine_options: dict[str, Any] = {"fuse_unpermute_combine": True} if fused else {}
        if buffer_size is not None:
            self.dispatch_options["non_blocking"] = True
        if pad_multiple > 1:  # the library pads with zeros while it sorts
            self.dispatch_options["pad_multiple"] = self.combine_options["pad_multiple"] = pad_multiple
        self.even_counts = even_counts
        self.library: _LibraryHandle

    def dispatch(self, hidden: Tensor, probs: Tensor, routing: Tensor) -> tuple[Tensor, Tensor]:
        """Dispatch by a routing map. Without a fixed buffer the host waits for the counts."""
        size = {} if self.buffer_size is None else {"num_permuted_tokens": self.buffer_size}
        is_rounded = self.mxfp8.dispatch
        x_RH, probs_R, scales, counts_e, handle = self.buffer.dispatch_with_permute(
            **self._payload(hidden, is_rounded),
            routing_map=routing,
            probs=probs,
            num_of_experts_per_rank=self.num_local,
            use_fp8=is_rounded,
            **size,
            **self.dispatch_options,
        )
        x_RH = self._received(x_RH, scales, hidden.dtype)
        if self.buffer_size is None:
            counts_e = counts_e.tolist()
            self.library = _LibraryHandle(handle, sum(counts_e), counts_e)
        elif self.even_counts is not None:
            self.library = _LibraryHandle(handle, self.buffer_size, self.even_counts)
        else:
            self.library = _LibraryHandle(handle, self.buffer_size, counts_e, handle[-1])
        return x_RH, probs_R

    def dispatch_with_handle(
        self, hidden: Tensor, probs: Tensor | None = None, *, is_rounded: bool
    ) -> tuple[Tensor, Any]:
        """Dispatch along the routes of the earlier dispatch, also probabilities if given; 8 bits if `is_rounded`."""
        handle = self.library.handle
        if is_rounded != self.mxfp8.dispatch:
            handle = self._handle_of(hidden, is_rounded)
        x_RH, probs_R, scales, *_ = self.buffer.dispatch_with_permute(
            **self._payload(hidden, is_rounded),
            probs=probs,
            num_of_experts_per_rank=self.num_local,
            num_permuted_tokens=self.library.num_received,
            handle=handle,
            **self.dispatch_options,
        )
        return self._received(x_RH, scales, hidden.dtype), probs_R

    def _handle_of(self, hidden: Tensor, is_rounded: bool) -> tuple:
        """Return the handle with the kernels for the other element type; routes do not depend on it."""
        *routes, _, overflow = self.library.handle
        config = self.buffer.update_template_config(
            hidden_dim=hidden.shape[1],
            num_of_tokens_per_rank=hidden.shape[0],
            num_local_experts=self.num_local,
            use_fp8=is_rounded,
            fuse_permute_dispatch=self.dispatch_options.get("fuse_permute_dispatch", False),
        )
        return *routes, config, overflow

    def combine(self, hidden: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the sums of each token's results along the routes of the dispatch, and of probabilities if given."""
        return self.buffer.combine_with_unpermute(
            hidden=hidden, probs=probs, handle=self.library.handle, **self.combine_options
        )

    def _payload(self, hidden: Tensor, is_rounded: bool) -> dict[str, Tensor]:
        """Return the library's arguments for tokens: in 8 bits their bytes and scales."""
        if not is_rounded:
            return {"hidden": hidden}
        values, scales = self.mxfp8.casts.split(hidden)
        return {"hidden": values.view(torch.uint8), "scaling_factor": scales}

    def _received(self, x_RH: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the tokens of what the library has received."""
        return x_RH if scales is None else self.mxfp8.casts.join(x_RH, scales, dtype)


class _TokenExchange(Exchange):
    """A call of the library in flight on the side stream."""

    num_tensors: int  # that are exchanged: tokens, and probabilities if it is 2

    def __init__(self, calls: _Calls, stream: SideStream):
        self.calls, self._stream = calls, stream
        self._in_flight: list[tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]] = []  # one call at most

    def _run(self, call: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        """Start call(*inputs), which returns tokens and probabilities, if any; the inputs live until `wait`."""
        outs, event = self._stream.run(lambda: call(*inputs), inputs[0].device)
        self._in_flight.append((event, outs[: self.num_tensors], inputs))

    def wait(self, is_backward: bool) -> tuple[Tensor, ...]:
        event, outs, inputs = self._in_flight.pop()
        wait_for(event, inputs[0].device)
        return outs

    def placeholders(self) -> tuple[Tensor, ...]:
        return self._in_flight[-1][1]


class _DispatchExchange(_TokenExchange):
    """Dispatch of tokens and probabilities; backward combines their gradients."""

    num_tensors = 2

    def __init__(self, calls: _Calls, stream: SideStream, routing_TV: Tensor, cache_fn: CacheFn):
        super().__init__(calls, stream)
        self._inputs: Any = routing_TV, cache_fn  # until the dispatch: backward needs none of them

    def start(self, tensors: Sequence[Tensor], is_backward: bool) -> None:
        x, probs = tensors
        if is_backward:
            self._run(self.calls.combine, x.contiguous(), probs.float().contiguous())
            return
        (routing_TV, cache_fn), self._inputs = self._inputs, None

        def dispatch() -> _LibraryHandle:
            self._run(self.calls.dispatch, x, probs, routing_TV)
            return self.calls.library

        self.calls.library = cache_fn(dispatch)
        if not self._in_flight:  # a recomputed region: the host knows the counts already
            self._run(partial(self.calls.dispatch_with_handle, is_rounded=self.calls.mxfp8.dispatch), x, probs)


class _CombineExchange(_TokenExchange):
    """Combine of results; backward dispatches their gradients with the same handle."""

    num_tensors = 1

    def start(self, tensors: Sequence[Tensor], is_backward: bool) -> None:
        again = partial(self.calls.dispatch_with_handle, is_rounded=self.calls.mxfp8.gradients)
        self._run(again if is_backward else self.calls.combine, tensors[0].contiguous())


@dataclass(frozen=True)
class _HybridEPState:
    """State of one dispatch: routing, number of tokens before padding, calls, the exchange."""

    routing_TV: Tensor
    num_tokens: int
    calls: _Calls
    exchange: Any = None


class HybridEPDispatcher(TokenDispatcher):
    """Send each token once to every rank of tp_ep that holds one of its experts; the library sorts."""

    declaration = HYBRIDEP

    def __init__(
        self,
        ps: ParallelState,
        buffer: Any,
        *,
        fused: bool = False,
        pad_to: int | None = None,
        mxfp8: Mxfp8Transport = HIGH_PRECISION,
        high_priority: bool = False,
        permutation: Permutation | None = None,
    ):
        """Store the buffer; inputs are padded to `pad_to` tokens, the same number on all ranks."""
        self.group, self.mxfp8, self.permutation = ps.tp_ep, mxfp8, permutation or Permutation()
        self.etp_expansion = EtpExpansion(ps)
        self.buffer, self.fused, self.pad_to = buffer, fused, pad_to
        self._stream = SideStream(priority=-1 if high_priority else 0)
        self.fixed_buffer_problem = FUSED_NEEDS_COUNTS if fused else None

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
        num_local = routing_TV.shape[1] // self.group.size
        even_counts, buffer_size, known = None, hints.buffer_size, hints.known
        if known is not None and known.per_expert is not None and not self.fused:  # experts are padded to capacity
            even_counts = [self.group.size * known.per_expert] * num_local
            buffer_size = sum(even_counts)
        calls = _Calls(self.buffer, num_local, self.fused, buffer_size, hints.pad_multiple, self.mxfp8, even_counts)
        handle = _HybridEPState(routing_TV.contiguous(), num_tokens, calls)
        return DispatchState(x_TH.contiguous(), probs_TV.contiguous(), [], handle)

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Start to send; wait for the counts unless the buffer is fixed. A recomputed pass reuses the handle."""
        hybrid: _HybridEPState = state.handle
        exchange = _DispatchExchange(hybrid.calls, self._stream, hybrid.routing_TV, cache_fn)
        x_RH, probs_R = start_exchange(exchange, state.x_RH, state.probs_R)
        library = hybrid.calls.library
        return DispatchState(x_RH, probs_R, library.counts_e, replace(hybrid, exchange=exchange), library.overflow)

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Wait for the tokens, which the library has sorted."""
        x_RH, probs_R = finish_exchange(state.handle.exchange, (state.x_RH, state.probs_R))
        return replace(state, x_RH=x_RH, probs_R=probs_R)

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Make the results as wide as tokens: the library sums nothing else."""
        return self.permutation.widen(y_RH, state.tokens_per_expert_e)

    def start_token_combine(self, y_RH: Tensor, state: DispatchState) -> tuple[Tensor, Any]:
        """Start to return the results to the ranks of their tokens; those of one token are summed."""
        exchange = _CombineExchange(state.handle.calls, self._stream)
        return start_exchange(exchange, y_RH)[0], exchange

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Remove the padding; the results are in token order."""
        return y_RH[: state.handle.num_tokens]


def problem() -> str | None:
    """Return why the library cannot be used; None if it can."""
    return deepep.problem("HybridEPBuffer")


def make_dispatcher(settings: LibrarySettings) -> HybridEPDispatcher:
    """Build a dispatcher and its communication buffer, on CUDA devices; options that are None are left to the library.

    Communication: collective over ps.tp_ep.
    """
    deep_ep = importlib.import_module("deep_ep")
    ps, moe, spec = settings.ps, settings.moe, settings.buffer
    options = {
        "num_sms_dispatch_api": moe.moe_flex_dispatcher_num_sms,
        "num_sms_combine_api": moe.moe_flex_dispatcher_num_sms,
        "num_sms_preprocessing_api": moe.moe_hybridep_num_sms_preprocessing,
        "num_blocks_permute": moe.moe_hybridep_num_blocks_permute,
        "num_blocks_unpermute": moe.moe_hybridep_num_blocks_unpermute,
    }
    buffer = deep_ep.HybridEPBuffer(
        group=ps.tp_ep.handle,
        hidden_dim=spec.hidden_size,
        max_num_of_tokens_per_rank=spec.max_tokens,
        num_local_experts=settings.num_experts // ps.ep.size,
        **{name: value for name, value in options.items() if value is not None},
    )
    return HybridEPDispatcher(
        ps,
        buffer,
        fused=moe.moe_permute_fusion_into_hybridep,
        pad_to=spec.max_tokens if moe.moe_hybridep_pad_uneven_dispatch_inputs else None,
        mxfp8=settings.mxfp8,
        high_priority=spec.high_priority,
        permutation=settings.permutation,
    )

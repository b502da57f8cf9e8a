"""Dispatch by DeepEP (--moe-token-dispatcher-type flex, backend deepep): each token once to each rank that needs it.

A token is sent with the indices and weights of its experts, [T, K] with -1 for a dropped or missing choice, once to
every rank that holds at least one of them. The receiver gets its experts' indices counted from 0 and -1 for the
others, copies each token for its local experts, and sums their results before they go back; results of several ranks
are summed on the way. So experts see the tokens of the all-to-all, bit for bit (with version 2 in another order,
unless runs are deterministic); a token's results are summed rank by rank, which for two experts is the same sum. The
backward of a dispatch is a combine of the gradients, and that of a combine a dispatch with the same handle. Start and
finish are separate autograd nodes, so work overlaps the exchange in backward too.

Dispatches carry MXFP8 where asked (mxfp8_transport.py): the library takes elements of one byte with 4-byte scales. It
combines bf16 only.

DeepEP up to version 1.2 (`Buffer`) and version 2 (`ElasticBuffer`) are adapted by `BufferV1` and `BufferV2`. Only
this file and hybridep.py import deep_ep, and only when it is selected.

Shape letters: T local tokens, E experts, V experts counted once per rank of etp that holds a shard, e local experts,
K choices per token, N tokens received (each once), R routed tokens (token, local expert), H hidden.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_trainer.backends import import_problem
from moe_trainer.moe.dispatch.base import (
    NO_HINTS,
    CacheFn,
    DispatchHints,
    DispatchState,
    EtpExpansion,
    TokenDispatcher,
    no_cache,
)
from moe_trainer.moe.dispatch.mxfp8_transport import (
    HIGH_PRECISION,
    Mxfp8Transport,
    Payload,
    placeholder,
)
from moe_trainer.ops.permute import Permutation, dense_to_topk, topk_to_dense
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import Group, ParallelState

INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"
V2_HIDDEN_MULTIPLE = 256  # kernels of version 2 exist for hidden sizes that are multiples of it


@dataclass(frozen=True)
class DispatchOutput:
    """Received tokens, their local experts and weights, and the routed tokens of each local expert.

    Valid after event.current_stream_wait(). `handle` is the library's, for combine and for later dispatches.
    """

    x_NH: Payload
    idx_NK: Tensor
    weights_NK: Tensor
    counts_e: list[int]
    handle: Any
    event: Any


class BufferV1:
    """DeepEP up to 1.2: `deep_ep.Buffer`."""

    def __init__(self, buffer: Any):
        self.buffer = buffer

    def dispatch(self, x_TH: Payload, idx_TK: Tensor, weights_TK: Tensor, num_experts: int) -> DispatchOutput:
        """Start to send every token to the ranks of its experts."""
        per_rank, per_rdma_rank, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            idx_TK, num_experts, previous_event=self.buffer.capture(), async_finish=True, allocate_on_comm_stream=True
        )
        x_NH, idx_NK, weights_NK, counts_e, handle, event = self.buffer.dispatch(
            x_TH,
            topk_idx=idx_TK,
            topk_weights=weights_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return DispatchOutput(x_NH, idx_NK, weights_NK, list(counts_e), handle, event)

    def dispatch_with_handle(self, x_TH: Payload, handle: Any) -> tuple[Payload, Any]:
        """Start to send tokens with the handle of an earlier dispatch. Return x_NH and the event to wait for."""
        x_NH, _, _, _, _, event = self.buffer.dispatch(
            x_TH, handle=handle, previous_event=self.buffer.capture(), async_finish=True, allocate_on_comm_stream=True
        )
        return x_NH, event

    def combine(self, x_NH: Tensor, handle: Any, weights_NK: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        """Start to return results and sum those of a token. Return x_TH, weights_TK and the event to wait for."""
        return self.buffer.combine(
            x_NH,
            handle,
            topk_weights=weights_NK,
            previous_event=self.buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )


class BufferV2:
    """DeepEP 2: `deep_ep.ElasticBuffer`; with num_sms 0 the library estimates it."""

    def __init__(self, buffer: Any, num_sms: int = 0):
        self.buffer, self.num_sms = buffer, num_sms

    def dispatch(self, x_TH: Payload, idx_TK: Tensor, weights_TK: Tensor, num_experts: int) -> DispatchOutput:
        x_NH, idx_NK, weights_NK, handle, event = self.buffer.dispatch(
            x_TH,
            topk_idx=idx_TK,
            topk_weights=weights_TK,
            num_experts=num_experts,
            num_sms=self.num_sms,
            expert_alignment=1,
            previous_event=self.buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
            do_cpu_sync=True,
        )
        return DispatchOutput(x_NH, idx_NK, weights_NK, list(handle.num_recv_tokens_per_expert_list), handle, event)

    def dispatch_with_handle(self, x_TH: Payload, handle: Any) -> tuple[Payload, Any]:
        x_NH, _, _, _, event = self.buffer.dispatch(
            x_TH,
            num_experts=handle.num_experts,
            num_sms=handle.num_sms,
            previous_event=self.buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
            handle=handle,
        )
        return x_NH, event

    def combine(self, x_NH: Tensor, handle: Any, weights_NK: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        return self.buffer.combine(
            x_NH,
            handle,
            topk_weights=weights_NK,
            previous_event=self.buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )


class _DispatchHandle:
    """State of one dispatch: the library's handle, what arrived besides the tokens, and the event in flight."""

    def __init__(self, buffer: BufferV1 | BufferV2, num_experts: int, mxfp8: Mxfp8Transport):
        self.buffer, self.num_experts, self.mxfp8 = buffer, num_experts, mxfp8
        self.library_handle: Any = None
        self.idx_NK: Tensor | None = None
        self.counts_e: list[int] = []
        self.event: Any = None
        self.received: Payload | None = None
        self.gradients: tuple[Any, ...] = ()

    def wait(self) -> None:
        self.event.current_stream_wait()
        self.event = None


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, cache_fn, x_TH, weights_TK, idx_TK):
        ctx.handle, outputs, sent = handle, [], handle.mxfp8.to_payload(x_TH, handle.mxfp8.dispatch)

        def dispatch() -> tuple[Any, Tensor, Tensor, list[int]]:
            outputs.append(handle.buffer.dispatch(sent, idx_TK, weights_TK, handle.num_experts))
            return outputs[0].handle, outputs[0].idx_NK, outputs[0].weights_NK, outputs[0].counts_e

        handle.library_handle, handle.idx_NK, weights_NK, handle.counts_e = cache_fn(dispatch)
        if outputs:
            handle.received, handle.event = outputs[0].x_NH, outputs[0].event
        else:  # a recomputed region: the host knows the counts already
            handle.received, handle.event = handle.buffer.dispatch_with_handle(sent, handle.library_handle)
            weights_NK = weights_NK.detach()
        return placeholder(handle.received, x_TH.dtype), weights_NK

    @staticmethod
    def backward(ctx, *_):
        handle = ctx.handle  # _FinishDispatch.backward has started the combine of the gradients
        handle.wait()
        (grad_x, grad_weights), handle.gradients = handle.gradients, ()
        return None, None, grad_x, grad_weights, None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, x_NH, weights_NK):
        ctx.handle = handle
        handle.wait()
        received, handle.received = handle.received, None
        x_NH = x_NH.view_as(x_NH) if isinstance(received, Tensor) else handle.mxfp8.from_payload(received, x_NH.dtype)
        return x_NH, weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx, grad_x, grad_weights):
        handle = ctx.handle
        *handle.gradients, handle.event = handle.buffer.combine(
            grad_x.contiguous(), handle.library_handle, grad_weights.float().contiguous()
        )
        return None, grad_x, grad_weights


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, y_NH):
        ctx.handle, ctx.dtype = handle, y_NH.dtype
        y_TH, _, handle.event = handle.buffer.combine(y_NH, handle.library_handle)
        return y_TH

    @staticmethod
    def backward(ctx, *_):
        handle = ctx.handle  # _FinishCombine.backward has started the dispatch of the gradient
        handle.wait()
        (received,), handle.gradients = handle.gradients, ()
        return None, handle.mxfp8.from_payload(received, ctx.dtype)


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle, y_TH):
        ctx.handle = handle
        handle.wait()
        return y_TH.view_as(y_TH)

    @staticmethod
    def backward(ctx, grad_TH):
        handle = ctx.handle
        sent = handle.mxfp8.to_payload(grad_TH.contiguous(), handle.mxfp8.gradients)
        *handle.gradients, handle.event = handle.buffer.dispatch_with_handle(sent, handle.library_handle)
        return None, grad_TH


@dataclass(frozen=True)
class _DeepEPState:
    """State of one dispatch: top-k indices, the handle, the local permutation."""

    idx_TK: Tensor
    dispatch: _DispatchHandle
    routes: Any = None


class DeepEPDispatcher(TokenDispatcher):
    """Send each token once to every rank of tp_ep that holds one of its experts."""

    supports_routing_padding = False  # the library takes top-k experts per token

    def __init__(
        self,
        ps: ParallelState,
        buffer: BufferV1 | BufferV2,
        topk: int,
        permutation: Permutation,
        mxfp8: Mxfp8Transport = HIGH_PRECISION,
    ):
        self.permutation, self.mxfp8 = permutation, mxfp8
        self.etp_expansion = EtpExpansion(ps)
        self.topk = topk * ps.etp.size
        self.buffer = buffer

    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Convert the routing to top-k indices."""
        routing_TV = self.etp_expansion.expand(routing_TE)
        idx_TK, weights_TK = dense_to_topk(self.etp_expansion.expand(probs_TE), routing_TV, self.topk)
        handle = _DispatchHandle(self.buffer, routing_TV.shape[1], self.mxfp8)
        return DispatchState(x_TH.contiguous(), weights_TK, [], _DeepEPState(idx_TK, handle))

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Start to send the tokens and wait for the counts; a recomputed pass reuses the handle of the first."""
        record: _DeepEPState = state.handle
        x_NH, weights_NK = _StartDispatch.apply(record.dispatch, cache_fn, state.x_RH, state.probs_R, record.idx_TK)
        return DispatchState(x_NH, weights_NK, record.dispatch.counts_e, record)

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Wait for the tokens."""
        x_NH, weights_NK = _FinishDispatch.apply(state.handle.dispatch, state.x_RH, state.probs_R)
        return replace(state, x_RH=x_NH, probs_R=weights_NK)

    def dispatch_postprocess(self, state: DispatchState) -> DispatchState:
        """Copy every token for each of its local experts."""
        record: _DeepEPState = state.handle
        counts_e = state.tokens_per_expert_e
        probs_Ne, routing_Ne = topk_to_dense(record.dispatch.idx_NK, state.probs_R, len(counts_e))
        x_RH, probs_R, routes = self.permutation.permute(state.x_RH, probs_Ne, routing_Ne, num_rows=sum(counts_e))
        return DispatchState(x_RH, probs_R, counts_e, replace(record, routes=routes))

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum the local experts' results of every received token."""
        return self.permutation.unpermute(y_RH, state.handle.routes)

    def start_token_combine(self, y_RH: Tensor, state: DispatchState) -> tuple[Tensor, Any]:
        """Start to return the results; those of several ranks are summed on the way."""
        return _StartCombine.apply(state.handle.dispatch, y_RH.contiguous()), None

    def finish_token_combine(self, y_RH: Tensor, handle: Any, state: DispatchState) -> Tensor:
        return _FinishCombine.apply(state.handle.dispatch, y_RH)

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Return the results, which are in token order."""
        return y_RH


def problem(name: str = "") -> str | None:
    """Return why the library, or a class of it, cannot be used; None if it can."""
    if missing := import_problem("deep_ep"):
        return missing
    if name and not hasattr(importlib.import_module("deep_ep"), name):
        return f"the installed deep_ep has no {name}"
    return None


def make_dispatcher(
    ps: ParallelState,
    *,
    topk: int,
    hidden_size: int,
    max_tokens: int,
    num_sms: int | None,
    num_sms_asked: bool,
    deterministic: bool,
    device: torch.device,
    permutation: Permutation,
    mxfp8: Mxfp8Transport = HIGH_PRECISION,
) -> DeepEPDispatcher:
    """Build a dispatcher and its communication buffer, on CUDA devices.

    Args:
        ps: parallel state.
        topk: experts per token.
        hidden_size: width of the dispatched tokens.
        max_tokens: maximum of tokens that a rank dispatches at a time.
        num_sms: multiprocessors that the library may occupy (--moe-flex-dispatcher-num-sms).
        num_sms_asked: the user gave num_sms; otherwise version 2 estimates it.
        deterministic: receive tokens in the same order every time (version 1 always does).
        device: of the model.
        permutation: local permutation.
        mxfp8: what is sent in 8 bits. The buffers are for bf16, which is also sent.

    Raises:
        ValueError: if the library does not support the hidden size.

    Communication: collective over ps.tp_ep.
    """
    deep_ep = importlib.import_module("deep_ep")
    group = ps.tp_ep
    if hasattr(deep_ep, "ElasticBuffer"):
        if hidden_size % V2_HIDDEN_MULTIPLE:
            raise ValueError(
                "--moe-flex-dispatcher-backend deepep: version 2 of the library needs a token size that is a multiple "
                f"of {V2_HIDDEN_MULTIPLE}, this one is {hidden_size}; use --moe-token-dispatcher-type alltoall or "
                "version 1 of the library"
            )
        # the constructor reads the group's communicator, which exists only after a first collective
        all_reduce(torch.zeros(1, device=device), group)
        buffer = deep_ep.ElasticBuffer(
            group.handle,
            num_max_tokens_per_rank=max_tokens,
            hidden=hidden_size,
            num_topk=topk * ps.etp.size,
            deterministic=deterministic,
        )
        return DeepEPDispatcher(ps, BufferV2(buffer, num_sms if num_sms_asked else 0), topk, permutation, mxfp8)
    if num_sms is not None:
        deep_ep.Buffer.set_num_sms(num_sms)
    buffer = deep_ep.Buffer(group.handle, *_buffer_bytes(deep_ep.Buffer, group, 2 * hidden_size))
    return DeepEPDispatcher(ps, BufferV1(buffer), topk, permutation, mxfp8)


def _buffer_bytes(library: Any, group: Group, token_bytes: int) -> tuple[int, int]:
    """Return the NVLink and RDMA bytes that the library needs for this group."""
    configs = (library.get_dispatch_config(group.size), library.get_combine_config(group.size))
    return (
        max(config.get_nvl_buffer_size_hint(token_bytes, group.size) for config in configs),
        max(config.get_rdma_buffer_size_hint(token_bytes, group.size) for config in configs),
    )

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arguments.mechanisms.dispatchers import DEEPEP
from moe_trainer.backends import import_problem, nccl_problem
from moe_trainer.moe.dispatch.base import (
    NO_HINTS,
    CacheFn,
    DispatchHints,
    DispatchState,
    EtpExpansion,
    TokenDispatcher,
    no_cache,
    permute_received,
)
from moe_trainer.moe.dispatch.flex import MIN_NCCL_VERSION, NCCL_INSTALL, LibrarySettings
from moe_trainer.moe.dispatch.mxfp8_transport import (
    HIGH_PRECISION,
    Mxfp8Transport,
    Payload,
    placeholder,
)
from moe_trainer.ops.permute import Permutation, dense_to_topk, topk_to_dense
from moe_trainer.parallel.collectives import Exchange, all_reduce, finish_exchange, start_exchange
from moe_trainer.parallel.state import Group, ParallelState

INSTALL = f"pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP, and {NCCL_INSTALL}"
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


class _TokenExchange(Exchange):
    """A call of the library in flight. Tokens are received first; some are sent in MXFP8."""

    def __init__(self, buffer: BufferV1 | BufferV2, mxfp8: Mxfp8Transport):
        self.buffer, self.mxfp8 = buffer, mxfp8
        self._received: Sequence[Any] = ()
        self._event: Any = None
        self._dtype = torch.bfloat16

    def wait(self, is_backward: bool) -> tuple[Tensor, ...]:
        self._event.current_stream_wait()
        (tokens, *others), self._received, self._event = self._received, (), None
        return self.mxfp8.from_payload(tokens, self._dtype), *others

    def placeholders(self) -> tuple[Tensor, ...]:
        tokens, *others = self._received
        return placeholder(tokens, self._dtype), *others


class _DispatchExchange(_TokenExchange):
    """Dispatch of tokens and weights; backward combines their gradients.

    Attributes:
        handle: of the library; set by the dispatch, as the others.
        idx_NK: local experts of the received tokens.
        counts_e: routed tokens of each local expert.
    """

    def __init__(
        self, buffer: BufferV1 | BufferV2, mxfp8: Mxfp8Transport, num_experts: int, idx_TK: Tensor, cache_fn: CacheFn
    ):
        super().__init__(buffer, mxfp8)
        self._inputs: Any = num_experts, idx_TK, cache_fn  # until the dispatch: backward needs none of them
        self.handle: Any = None
        self.idx_NK: Tensor | None = None
        self.counts_e: list[int] = []

    def start(self, tensors: Sequence[Tensor], is_backward: bool) -> None:
        x_TH, weights_TK = tensors
        if is_backward:
            *self._received, self._event = self.buffer.combine(
                x_TH.contiguous(), self.handle, weights_TK.float().contiguous()
            )
            return
        (num_experts, idx_TK, cache_fn), self._inputs = self._inputs, None
        self._dtype, sent = x_TH.dtype, self.mxfp8.to_payload(x_TH, self.mxfp8.dispatch)

        def dispatch() -> tuple[Any, Tensor, Tensor, list[int]]:
            out = self.buffer.dispatch(sent, idx_TK, weights_TK, num_experts)
            self._received, self._event = (out.x_NH, out.weights_NK), out.event
            return out.handle, out.idx_NK, out.weights_NK, out.counts_e

        self.handle, self.idx_NK, weights_NK, self.counts_e = cache_fn(dispatch)
        if self._event is None:  # a recomputed region: the host knows the counts already
            x_NH, self._event = self.buffer.dispatch_with_handle(sent, self.handle)
            self._received = x_NH, weights_NK.detach()


class _CombineExchange(_TokenExchange):
    """Combine of results; backward dispatches their gradients with the same handle."""

    def __init__(self, dispatch: _DispatchExchange):
        super().__init__(dispatch.buffer, dispatch.mxfp8)
        self._handle = dispatch.handle

    def start(self, tensors: Sequence[Tensor], is_backward: bool) -> None:
        x, self._dtype = tensors[0].contiguous(), tensors[0].dtype
        received: Payload
        if is_backward:
            sent = self.mxfp8.to_payload(x, self.mxfp8.gradients)
            received, self._event = self.buffer.dispatch_with_handle(sent, self._handle)
        else:
            received, _, self._event = self.buffer.combine(x, self._handle)
        self._received = (received,)


@dataclass(frozen=True)
class _DeepEPState:
    """State of one dispatch: experts with every shard counted, top-k indices, the exchange, the local permutation."""

    num_experts: int
    idx_TK: Tensor
    exchange: Any = None
    routes: Any = None


class DeepEPDispatcher(TokenDispatcher):
    """Send each token once to every rank of tp_ep that holds one of its experts."""

    declaration = DEEPEP

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
        return DispatchState(x_TH.contiguous(), weights_TK, [], _DeepEPState(routing_TV.shape[1], idx_TK))

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Start to send the tokens and wait for the counts; a recomputed pass reuses the handle of the first."""
        record: _DeepEPState = state.handle
        exchange = _DispatchExchange(self.buffer, self.mxfp8, record.num_experts, record.idx_TK, cache_fn)
        x_NH, weights_NK = start_exchange(exchange, state.x_RH, state.probs_R)
        return DispatchState(x_NH, weights_NK, exchange.counts_e, replace(record, exchange=exchange))

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Wait for the tokens."""
        x_NH, weights_NK = finish_exchange(state.handle.exchange, (state.x_RH, state.probs_R))
        return replace(state, x_RH=x_NH, probs_R=weights_NK)

    def dispatch_postprocess(self, state: DispatchState) -> DispatchState:
        """Copy every token for each of its local experts."""
        probs_Ne, routing_Ne = topk_to_dense(
            state.handle.exchange.idx_NK, state.probs_R, len(state.tokens_per_expert_e)
        )
        return permute_received(self.permutation, replace(state, probs_R=probs_Ne), routing_Ne)

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum the local experts' results of every received token."""
        return self.permutation.unpermute(y_RH, state.handle.routes)

    def start_token_combine(self, y_RH: Tensor, state: DispatchState) -> tuple[Tensor, Any]:
        """Start to return the results; those of several ranks are summed on the way."""
        exchange = _CombineExchange(state.handle.exchange)
        return start_exchange(exchange, y_RH)[0], exchange


def problem(name: str = "") -> str | None:
    """Return why the library, or a class of it, cannot be used; None if it can."""
    if missing := import_problem("deep_ep"):
        return missing
    deep_ep = importlib.import_module("deep_ep")
    if name and not hasattr(deep_ep, name):
        return f"the installed deep_ep has no {name}"
    is_v2 = name in ("", "ElasticBuffer") and hasattr(deep_ep, "ElasticBuffer")
    return nccl_problem(MIN_NCCL_VERSION) if is_v2 else None


def make_dispatcher(settings: LibrarySettings) -> DeepEPDispatcher:
    """Build a dispatcher and its communication buffer, on CUDA devices.

    Version 1 always receives tokens in the same order.

    Raises:
        ValueError: if the library does not support the hidden size.

    Communication: collective over ps.tp_ep.
    """
    deep_ep = importlib.import_module("deep_ep")
    ps, moe, spec = settings.ps, settings.moe, settings.buffer
    group, topk, num_sms = ps.tp_ep, moe.moe_router_topk, moe.moe_flex_dispatcher_num_sms
    buffer: BufferV1 | BufferV2
    if hasattr(deep_ep, "ElasticBuffer"):
        if spec.hidden_size % V2_HIDDEN_MULTIPLE:
            raise ValueError(
                "--moe-flex-dispatcher-backend deepep: version 2 of the library needs a token size that is a multiple "
                f"of {V2_HIDDEN_MULTIPLE}, this one is {spec.hidden_size}; use --moe-token-dispatcher-type alltoall or "
                "version 1 of the library"
            )
        # the constructor reads the group's communicator, which exists only after a first collective
        all_reduce(torch.zeros(1, device=spec.device), group)
        elastic = deep_ep.ElasticBuffer(
            group.handle,
            num_max_tokens_per_rank=spec.max_tokens,
            hidden=spec.hidden_size,
            num_topk=topk * ps.etp.size,
            deterministic=spec.deterministic,
        )
        is_typed = "moe_flex_dispatcher_num_sms" in settings.typed or "moe_deepep_num_sms" in settings.typed
        buffer = BufferV2(elastic, num_sms if is_typed and num_sms else 0)
    else:
        if num_sms is not None:
            deep_ep.Buffer.set_num_sms(num_sms)
        buffer = BufferV1(deep_ep.Buffer(group.handle, *_buffer_bytes(deep_ep.Buffer, group, 2 * spec.hidden_size)))
    return DeepEPDispatcher(ps, buffer, topk, settings.permutation, settings.mxfp8)


def _buffer_bytes(library: Any, group: Group, token_bytes: int) -> tuple[int, int]:
    """Return the NVLink and RDMA bytes that the library needs for this group."""
    configs = (library.get_dispatch_config(group.size), library.get_combine_config(group.size))
    return (
        max(config.get_nvl_buffer_size_hint(token_bytes, group.size) for config in configs),
        max(config.get_rdma_buffer_size_hint(token_bytes, group.size) for config in configs),
    )

"""Dispatch by NCCL's token exchange (--moe-token-dispatcher-type flex, backend ncclep), which also sorts by expert.

TransformerEngine's `transformer_engine.pytorch.ep` wraps the library with autograd. A token is sent with the indices
and weights of its experts, [T, K] with -1 for a dropped choice, once to every rank that holds one of them; what arrives
is sorted by local expert. Combine sums a token's results.

The library has one context per process, in one of two modes. Without a fixed receive buffer the host waits for the
number of tokens and what arrives is as long as needed. With one (--moe-expert-rank-capacity-factor) the size is part of
the context, counts stay on the device, and tokens that do not fit are dropped and set a flag, which the training loop
reads once per iteration (training/step.py). Evaluations and repeated iterations use the first mode, so the context is
made again when they begin and end, while nothing is in flight; its size is then the largest budget of all layers and
ranks. Megatron-Core makes it again for a repeated iteration only, and evaluates with the fixed size.

Zero copy (--moe-ncclep-zero-copy), with a fixed buffer: tokens and gradients arrive in memory that is registered with
NCCL, without a copy from its staging buffers. What this rank sends from the experts is copied there once.

Shape letters: T local tokens, K choices per token, E experts, V experts counted once per rank of etp that holds a
shard, e local experts, R routed tokens, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from arguments.mechanisms.dispatchers import NCCLEP
from moe_trainer.backends import nccl_problem
from moe_trainer.layers import te
from moe_trainer.moe.dispatch.base import (
    NO_HINTS,
    CacheFn,
    DispatchHints,
    DispatchState,
    EtpExpansion,
    TokenDispatcher,
    no_cache,
)
from moe_trainer.moe.dispatch.flex import MIN_NCCL_VERSION, NCCL_INSTALL, LibrarySettings
from moe_trainer.moe.receive.budget import ReceiveBudget
from moe_trainer.ops.block_sizes import expert_buffer_tokens
from moe_trainer.ops.permute import Permutation, dense_to_topk
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import ParallelState

INSTALL = f"NVTE_WITH_NCCL_EP=1 {te.INSTALL}, and {NCCL_INSTALL}"
CHUNK = 64
"""The library's kernels dispatch tokens in chunks; the maximum per rank must be a multiple."""


@dataclass(frozen=True)
class ContextSettings:
    """Arguments of the library's context that do not change."""

    num_experts: int
    max_tokens_per_rank: int
    hidden_dim: int
    num_topk: int
    max_num_sms: int


class Context:
    """The library's context of this process.

    Attributes:
        budgets: of all MoE layers; set by NcclEPDispatcher.set_budgets.
        capacity: tokens of the fixed receive buffer; None in the mode without one.
    """

    def __init__(self, library: ModuleType, ps: ParallelState, settings: ContextSettings, zero_copy: bool):
        self.library, self.group, self.settings, self.zero_copy = library, ps.tp_ep, settings, zero_copy
        self.budgets: Sequence[ReceiveBudget] = ()
        self.capacity: int | None = None
        self._is_open = False

    def enter(self, has_fixed_buffer: bool, device: torch.device) -> None:
        """Make the context unless it is in this mode. Collective over tp_ep; nothing may be in flight."""
        if self._is_open and has_fixed_buffer == (self.capacity is not None):
            return
        self.library.ep_finalize()  # also one that an earlier model of this process made
        self.capacity = self._largest_budget(device) if has_fixed_buffer else None
        self.library.ep_bootstrap(
            self.group.handle,
            num_experts=self.settings.num_experts,
            max_tokens_per_rank=self.settings.max_tokens_per_rank,
            hidden_dim=self.settings.hidden_dim,
            num_topk=self.settings.num_topk,
            recv_capacity_per_rank=self.capacity,
            max_num_sms=self.settings.max_num_sms,
            zero_copy=self.copies_nothing,
            drop_on_overflow=has_fixed_buffer,
        )
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self.library.ep_finalize()
            self._is_open = False

    @property
    def copies_nothing(self) -> bool:
        """Whether the current mode is that of --moe-ncclep-zero-copy."""
        return self.zero_copy and self.capacity is not None

    def _largest_budget(self, device: torch.device) -> int:
        most = self.settings.max_tokens_per_rank
        sizes = [expert_buffer_tokens(most * budget.share, budget.fixed_factor) for budget in self.budgets]
        return int(all_reduce(torch.tensor([max(most, *sizes)], device=device), self.group, "max").item())

    def new_buffer(self) -> Any:
        """Return the library's state of one dispatch."""
        settings = self.settings
        return self.library.EpBuffer(
            top_k=settings.num_topk,
            max_tokens_per_rank=settings.max_tokens_per_rank,
            hidden_dim=settings.hidden_dim,
            num_local_experts=settings.num_experts // self.group.size,
            recv_capacity_per_rank=self.capacity,
        )

    def registered_copy(self, x: Tensor) -> Tensor:
        """Return a copy in memory that NCCL reads directly."""
        made = self.library.symm_mem_alloc(tuple(x.shape), x.dtype, self.group.handle, device=x.device, use_pool=True)
        return made.copy_(x)


class _RegisteredCopy(torch.autograd.Function):
    """Copy what is sent to registered memory: tensors in forward, or their gradients in backward."""

    @staticmethod
    def forward(ctx, copy: Callable[[Tensor], Tensor], in_backward: bool, *tensors: Tensor):
        ctx.copy = copy if in_backward else None
        return tuple(x.view_as(x) if in_backward else copy(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, *(grads if ctx.copy is None else map(ctx.copy, grads))


@dataclass(frozen=True)
class _NcclEPState:
    """State of one dispatch: top-k indices, whether the receive buffer is fixed, and the library's state."""

    idx_TK: Tensor
    has_fixed_buffer: bool
    cache_fn: CacheFn = no_cache
    buffer: Any = None


class NcclEPDispatcher(TokenDispatcher):
    """Send each token once to every rank of tp_ep that holds one of its experts; the library sorts."""

    declaration = NCCLEP
    fixed_buffer_problem = None

    def __init__(self, ps: ParallelState, context: Context, topk: int, permutation: Permutation):
        self.etp_expansion, self.permutation = EtpExpansion(ps), permutation
        self.topk, self.context = topk * ps.etp.size, context

    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Convert the routing to top-k indices."""
        probs_TV, routing_TV = self.etp_expansion.expand(probs_TE), self.etp_expansion.expand(routing_TE)
        idx_TK, weights_TK = dense_to_topk(probs_TV, routing_TV, self.topk)
        return DispatchState(x_TH.contiguous(), weights_TK, [], _NcclEPState(idx_TK, hints.buffer_size is not None))

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Note the cache; the library communicates in finish_token_dispatch."""
        return replace(state, handle=replace(state.handle, cache_fn=cache_fn))

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Send, receive, sort; wait for the counts unless the receive buffer is fixed."""
        record: _NcclEPState = state.handle
        context = self.context
        context.enter(record.has_fixed_buffer, state.x_RH.device)
        buffer = context.new_buffer()
        x_RH, probs_R, counts_e = context.library.ep_dispatch(buffer, state.x_RH, record.idx_TK, state.probs_R)
        if context.copies_nothing:
            x_RH, probs_R = _RegisteredCopy.apply(context.registered_copy, True, x_RH, probs_R)
        record = replace(record, buffer=buffer)
        if record.has_fixed_buffer:
            overflow = (buffer.total_recv_tokens > context.capacity).to(torch.int32)
            return DispatchState(x_RH, probs_R, counts_e, record, overflow)
        return DispatchState(x_RH, probs_R, record.cache_fn(counts_e.tolist), record)

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Make the results as wide as tokens: the library sums nothing else."""
        return self.permutation.widen(y_RH, state.tokens_per_expert_e)

    def finish_token_combine(self, y_RH: Tensor, handle: Any, state: DispatchState) -> Tensor:
        """Return the results to the ranks of their tokens; those of one token are summed."""
        context, record = self.context, state.handle
        y_RH = y_RH.contiguous()
        if context.copies_nothing:
            (y_RH,) = _RegisteredCopy.apply(context.registered_copy, False, y_RH)
        return context.library.ep_combine(record.buffer, y_RH, num_local_tokens=record.idx_TK.shape[0])

    def set_budgets(self, budgets: Sequence[ReceiveBudget]) -> None:
        self.context.budgets = budgets

    def close(self) -> None:
        """Release the context, before the process groups are destroyed."""
        self.context.close()


def problem() -> str | None:
    """Return why the library cannot be used; None if it can."""
    names = "EpBuffer", "ep_bootstrap", "ep_dispatch", "ep_combine", "ep_finalize", "symm_mem_alloc"
    return te.problem("ep", *names) or nccl_problem(MIN_NCCL_VERSION)


def make_dispatcher(settings: LibrarySettings) -> NcclEPDispatcher:
    """Build a dispatcher, on CUDA devices; the library's context is made by the first dispatch."""
    ps, moe = settings.ps, settings.moe
    context = Context(
        te.load_expert_parallel(),
        ps,
        ContextSettings(
            num_experts=settings.num_experts * ps.etp.size,
            max_tokens_per_rank=-(-settings.buffer.max_tokens // CHUNK) * CHUNK,
            hidden_dim=settings.buffer.hidden_size,
            num_topk=moe.moe_router_topk * ps.etp.size,
            max_num_sms=moe.moe_flex_dispatcher_num_sms or 0,
        ),
        moe.moe_ncclep_zero_copy,
    )
    return NcclEPDispatcher(ps, context, moe.moe_router_topk, settings.permutation)

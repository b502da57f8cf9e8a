"""Dispatch by DeepEP (--moe-token-dispatcher-type flex, backend deepep): a token travels once to each rank that needs it.

Design: a token goes with the numbers and weights of its experts, [T, K] with -1 where nothing was chosen or the token was dropped,
once to every rank that holds at least one of them, however many. The receiver gets its own experts' numbers counted from 0 and -1 for
the others, copies each row into the rows of its experts, and adds the results of its own experts before they go back; what comes
from several ranks is added on the way home. So the rows that experts see are those of the all-to-all, bit for bit (with version 2 in
another order, unless runs are deterministic); a token's results are added rank by rank, which for two experts is the same sum.

The backward of a dispatch is a combine of the gradients, and that of a combine a dispatch along the same way (the handle). Start
and finish of each are separate nodes, so that work between them runs beside the exchange in backward, too.

With expert tensor parallelism every rank that holds a piece of an expert counts as one that holds an expert of its own: tokens go to
all of them, and combine adds their partial results.

--moe-flex-dispatcher-num-sms bounds the multiprocessors that the library occupies.

Two libraries are spoken to: DeepEP up to version 1.2 (`Buffer`) and version 2 (`ElasticBuffer`). Their two classes here,
`BufferV1` and `BufferV2`, hide the differences. This file and hybridep.py are the only ones that import deep_ep, and only when asked to.

Shape letters: T local tokens, E experts, V experts counted once per rank of etp that holds a piece, e local experts, K choices per
token, N tokens received (each once), R rows (token, local expert), H hidden.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_trainer.backends import import_problem
from moe_trainer.moe.dispatch.base import Dispatched, Hints, Members, Once, TokenDispatcher, at_once
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import Group, ParallelState

INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"
V2_WIDTH = 256
"""Version 2's kernels are compiled for rows of a multiple of so many numbers only."""


@dataclass(frozen=True)
class Arrived:
    """What a buffer's dispatch gives: rows of received tokens, local experts and weights of each, rows per local expert.

    Valid after event.current_stream_wait(). handle: the way taken.
    """

    x_NH: Tensor
    idx_NK: Tensor
    weights_NK: Tensor
    counts_e: list[int]
    handle: Any
    event: Any


class BufferV1:
    """DeepEP up to 1.2: `deep_ep.Buffer`."""

    def __init__(self, buffer: Any):
        self.buffer = buffer

    def dispatch(self, x_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Arrived:
        """Send every token to the ranks of its experts. Returns at once."""
        per_rank, per_rdma_rank, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            idx_TK, num_experts, previous_event=self.buffer.capture(), async_finish=True, allocate_on_comm_stream=True)
        x_NH, idx_NK, weights_NK, counts_e, handle, event = self.buffer.dispatch(
            x_TH, topk_idx=idx_TK, topk_weights=weights_TK, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, previous_event=event, async_finish=True,
            allocate_on_comm_stream=True)
        return Arrived(x_NH, idx_NK, weights_NK, list(counts_e), handle, event)

    def dispatch_again(self, x_TH: Tensor, handle: Any) -> tuple[Tensor, Any]:
        """Send rows along a way taken before. Returns at once: x_NH and the event to wait for."""
        x_NH, _, _, _, _, event = self.buffer.dispatch(
            x_TH, handle=handle, previous_event=self.buffer.capture(), async_finish=True, allocate_on_comm_stream=True)
        return x_NH, event

    def combine(self, x_NH: Tensor, handle: Any, weights_NK: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        """Bring rows back and add those of one token. Returns at once: x_TH, weights_TK and the event to wait for."""
        return self.buffer.combine(x_NH, handle, topk_weights=weights_NK, previous_event=self.buffer.capture(), async_finish=True,
                                   allocate_on_comm_stream=True)


class BufferV2:
    """DeepEP 2: `deep_ep.ElasticBuffer`. num_sms 0: the library's own estimate."""

    def __init__(self, buffer: Any, num_sms: int = 0):
        self.buffer, self.num_sms = buffer, num_sms

    def dispatch(self, x_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Arrived:
        """As BufferV1's."""
        x_NH, idx_NK, weights_NK, handle, event = self.buffer.dispatch(
            x_TH, topk_idx=idx_TK, topk_weights=weights_TK, num_experts=num_experts, num_sms=self.num_sms, expert_alignment=1,
            previous_event=self.buffer.capture(), async_with_compute_stream=True, allocate_on_comm_stream=True, do_cpu_sync=True)
        return Arrived(x_NH, idx_NK, weights_NK, list(handle.num_recv_tokens_per_expert_list), handle, event)

    def dispatch_again(self, x_TH: Tensor, handle: Any) -> tuple[Tensor, Any]:
        """As BufferV1's."""
        x_NH, _, _, _, event = self.buffer.dispatch(
            x_TH, num_experts=handle.num_experts, num_sms=handle.num_sms, previous_event=self.buffer.capture(),
            async_with_compute_stream=True, allocate_on_comm_stream=True, handle=handle)
        return x_NH, event

    def combine(self, x_NH: Tensor, handle: Any, weights_NK: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        """As BufferV1's."""
        return self.buffer.combine(x_NH, handle, topk_weights=weights_NK, previous_event=self.buffer.capture(),
                                   async_with_compute_stream=True, allocate_on_comm_stream=True)


class _Way:
    """The way of one dispatch: the library's handle, what arrived besides rows, and the event of what is under way."""

    def __init__(self, buffer: BufferV1 | BufferV2, num_experts: int):
        self.buffer, self.num_experts = buffer, num_experts
        self.handle: Any = None
        self.idx_NK: Tensor | None = None
        self.counts_e: list[int] = []
        self.event: Any = None
        self.gradients: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        self.event.current_stream_wait()
        self.event = None


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, once, x_TH, weights_TK, idx_TK):
        ctx.way, found = way, []

        def ask() -> tuple[Any, Tensor, Tensor, list[int]]:
            found.append(way.buffer.dispatch(x_TH, idx_TK, weights_TK, way.num_experts))
            return found[0].handle, found[0].idx_NK, found[0].weights_NK, found[0].counts_e

        way.handle, way.idx_NK, weights_NK, way.counts_e = once(ask)
        if found:
            way.event = found[0].event
            return found[0].x_NH, weights_NK
        x_NH, way.event = way.buffer.dispatch_again(x_TH, way.handle)  # the host need not be told again
        return x_NH, weights_NK.detach()

    @staticmethod
    def backward(ctx, *_):
        way = ctx.way  # _FinishDispatch has sent the gradients
        way.wait()
        (grad_x, grad_weights), way.gradients = way.gradients, ()
        return None, None, grad_x, grad_weights, None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, x_NH, weights_NK):
        ctx.way = way
        way.wait()
        return x_NH.view_as(x_NH), weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx, grad_x, grad_weights):
        way = ctx.way
        *way.gradients, way.event = way.buffer.combine(grad_x.contiguous(), way.handle, grad_weights.float().contiguous())
        return None, grad_x, grad_weights


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, y_NH):
        ctx.way = way
        y_TH, _, way.event = way.buffer.combine(y_NH, way.handle)
        return y_TH

    @staticmethod
    def backward(ctx, *_):
        way = ctx.way  # _FinishCombine has sent the gradient
        way.wait()
        (grad_NH,), way.gradients = way.gradients, ()
        return None, grad_NH


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, y_TH):
        ctx.way = way
        way.wait()
        return y_TH.view_as(y_TH)

    @staticmethod
    def backward(ctx, grad_TH):
        way = ctx.way
        *way.gradients, way.event = way.buffer.dispatch_again(grad_TH.contiguous(), way.handle)
        return None, grad_TH


def choices(probs_TV: Tensor, routing_TV: Tensor, num_choices: int) -> tuple[Tensor, Tensor]:
    """The dense decision as numbers and weights of chosen experts, ascending, -1 and 0 behind them.

    Returns: idx_TK int64, weights_TK fp32 (differentiable).
    """
    num_experts = routing_TV.shape[1]
    numbers_TV = torch.where(routing_TV, torch.arange(num_experts, device=routing_TV.device), num_experts)
    idx_TK = numbers_TV.topk(num_choices, dim=1, largest=False, sorted=True)[0]
    chosen_TK = idx_TK < num_experts
    weights_TK = probs_TV.gather(1, idx_TK.clamp(max=num_experts - 1)).float() * chosen_TK
    return torch.where(chosen_TK, idx_TK, -1), weights_TK


def dense(idx_NK: Tensor, weights_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The way back: probs_NE (differentiable) and routing_NE. What belongs to -1 is not looked at."""
    cells_NK = torch.where(idx_NK < 0, num_experts, idx_NK).long()
    shape = (idx_NK.shape[0], num_experts + 1)
    routing_NE = torch.zeros(shape, dtype=torch.bool, device=idx_NK.device).scatter_(1, cells_NK, True)
    # cleared first: a weight of -1 may be anything, and several of them meet in the last column
    weights_NK = weights_NK.masked_fill(idx_NK < 0, 0.0)
    probs_NE = weights_NK.new_zeros(shape).scatter_add(1, cells_NK, weights_NK)
    return probs_NE[:, :num_experts], routing_NE[:, :num_experts]


@dataclass(frozen=True)
class _Sent:
    """What the phases of one dispatch tell each other: the choices, the way, the local rows."""

    idx_TK: Tensor
    way: _Way
    routes: Any = None


class DeepEPDispatcher(TokenDispatcher):
    """Tokens once to every rank of tp_ep that holds one of their experts."""

    takes_padding = False  # the library is told of topk experts a token

    def __init__(self, ps: ParallelState, buffer: BufferV1 | BufferV2, topk: int, permutation: Permutation):
        self.permutation = permutation
        self.members = Members(ps)
        self.topk = topk * ps.etp.size
        self.buffer = buffer

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Write the routing down as choices."""
        routing_TV = self.members.columns(routing_TE)
        idx_TK, weights_TK = choices(self.members.columns(probs_TE), routing_TV, self.topk)
        return Dispatched(x_TH.contiguous(), weights_TK, [], _Sent(idx_TK, _Way(self.buffer, routing_TV.shape[1])))

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """Send the tokens off. Counts reach the host in here; in a region that is recomputed the second pass takes the way of the first."""
        record: _Sent = sent.handle
        x_NH, weights_NK = _StartDispatch.apply(record.way, once, sent.x_RH, sent.probs_R, record.idx_TK)
        return Dispatched(x_NH, weights_NK, record.way.counts_e, record)

    def finish_exchange(self, sent: Dispatched) -> Dispatched:
        """Receive the tokens."""
        x_NH, weights_NK = _FinishDispatch.apply(sent.handle.way, sent.x_RH, sent.probs_R)
        return replace(sent, x_RH=x_NH, probs_R=weights_NK)

    def postprocess(self, sent: Dispatched) -> Dispatched:
        """Copy every token into the rows of its local experts."""
        record: _Sent = sent.handle
        counts_e = sent.tokens_per_expert_e
        probs_Ne, routing_Ne = dense(record.way.idx_NK, sent.probs_R, len(counts_e))
        x_RH, probs_R, routes = self.permutation.permute(sent.x_RH, probs_Ne, routing_Ne, num_rows=sum(counts_e))
        return Dispatched(x_RH, probs_R, counts_e, replace(record, routes=routes))

    def regroup(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Add the local experts' rows of every received token."""
        return self.permutation.unpermute(y_RH, sent.handle.routes)

    def start_exchange_back(self, y_RH: Tensor, sent: Dispatched) -> tuple[Tensor, Any]:
        """Send the tokens home; those that were on several ranks are added on the way."""
        return _StartCombine.apply(sent.handle.way, y_RH.contiguous()), None

    def finish_exchange_back(self, y_RH: Tensor, under_way: Any, sent: Dispatched) -> Tensor:
        """Receive them."""
        return _FinishCombine.apply(sent.handle.way, y_RH)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Tokens are in their order already."""
        return y_RH


def problem(name: str = "") -> str | None:
    """What stands in the way of using the library, or a class of it; None if nothing does."""
    if missing := import_problem("deep_ep"):
        return missing
    return None if not name or hasattr(importlib.import_module("deep_ep"), name) else f"the installed deep_ep has no {name}"


def make_dispatcher(ps: ParallelState, *, topk: int, hidden_size: int, max_tokens: int, num_sms: int | None,
                    num_sms_asked: bool, deterministic: bool, device: torch.device, permutation: Permutation) -> DeepEPDispatcher:
    """A dispatcher with a communication buffer of its own. Collective over ps.tp_ep; on CUDA devices.

    max_tokens: the most tokens a rank dispatches at a time. num_sms: multiprocessors to occupy; version 2 estimates them
    itself unless the user asked for a number. deterministic: rows in the same order every time (version 1 always does that).
    Raises: ValueError when the library cannot carry rows of this width.
    """
    deep_ep = importlib.import_module("deep_ep")
    group = ps.tp_ep
    if hasattr(deep_ep, "ElasticBuffer"):
        if hidden_size % V2_WIDTH:
            raise ValueError(f"--moe-flex-dispatcher-backend deepep: version 2 of the library carries rows of multiples of {V2_WIDTH} only, these "
                             f"have {hidden_size}: use --moe-token-dispatcher-type alltoall or version 1 of the library")
        # its constructor reads the group's communicator, which exists only once the group has been used
        all_reduce(torch.zeros(1, device=device), group)
        buffer = deep_ep.ElasticBuffer(group.handle, num_max_tokens_per_rank=max_tokens, hidden=hidden_size,
                                       num_topk=topk * ps.etp.size, deterministic=deterministic)
        return DeepEPDispatcher(ps, BufferV2(buffer, num_sms if num_sms_asked else 0), topk, permutation)
    if num_sms is not None:
        deep_ep.Buffer.set_num_sms(num_sms)
    buffer = deep_ep.Buffer(group.handle, *_buffer_bytes(deep_ep.Buffer, group, 2 * hidden_size))
    return DeepEPDispatcher(ps, BufferV1(buffer), topk, permutation)


def _buffer_bytes(library: Any, group: Group, row_bytes: int) -> tuple[int, int]:
    """Bytes for NVLink and for RDMA that the library's configurations for this group need."""
    configs = (library.get_dispatch_config(group.size), library.get_combine_config(group.size))
    return (max(config.get_nvl_buffer_size_hint(row_bytes, group.size) for config in configs),
            max(config.get_rdma_buffer_size_hint(row_bytes, group.size) for config in configs))

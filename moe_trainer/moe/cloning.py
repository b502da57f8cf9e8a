"""Cloning of hot experts (--moe-clone-hot-experts): ranks below the average load compute tokens of overloaded experts.

Every rank learns how many tokens each source has for each expert and makes the same plan (clone_plan.py). The layer
then treats an expert-parallel rank as one with `slots` more experts: `CloneRouting` converts the [T, E] routing to
these columns, and the dispatcher is unchanged. The weights of the clones come by an all-to-all over ps.ep; their
gradients return the same way and are added to the expert's own.

A clone's weights are stored only while they are used: forward drops them, and backward fetches them again before the
experts' backward. Both are nodes of one autograd chain through the tokens, which every rank has,

    y: combine <- `_FetchAgain` <- experts <- `_Fetch` <- dispatch :x

so all ranks run the collectives in the same order, whatever each of them computes. In a recomputed region nothing is
saved, and the second pass fetches.

The numbers are those without clones: a token's results are summed in the order of their experts, wherever they were
computed (the all-gather dispatcher sums over ranks in another order, as without clones); an expert's weight gradient
is a sum over its clones.

Shape letters: T local tokens, E experts, S sources (ranks of tp_ep), V columns: for every rank of ep its experts and
then its slots.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_trainer.memory.host_read import AsyncHostReader, integer_tensor
from moe_trainer.moe.clone_plan import Clone, plan_clones
from moe_trainer.moe.dispatch.base import KnownCounts
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel.collectives import all_gather_flat, all_to_all
from moe_trainer.parallel.state import Group, ParallelState


@dataclass(frozen=True)
class CloneRouting:
    """Routing of this rank's tokens over experts and clones.

    Column v stands for expert_V[v] and takes those of the expert's tokens on this rank, counted by token, that are in
    [low_V, high_V).
    """

    clones: tuple[Clone, ...]
    expert_V: Tensor
    low_V: Tensor
    high_V: Tensor

    def apply(self, probs_TE: Tensor, routing_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (differentiable) and routing over the columns of experts and slots."""
        position_TE = routing_TE.long().cumsum(0) - 1
        position_TV = position_TE.index_select(1, self.expert_V)
        in_range_TV = (position_TV >= self.low_V) & (position_TV < self.high_V)
        return probs_TE.index_select(1, self.expert_V), routing_TE.index_select(1, self.expert_V) & in_range_TV


class ExpertCloner:
    """Plans the clones of one rank's MoE layers; holds constants only."""

    def __init__(self, ps: ParallelState, num_experts: int, slots: int):
        """Store the sizes; `slots` is --moe-clone-hot-experts, the clones that a rank can host."""
        self.group, self.ep = ps.tp_ep, ps.ep
        self.num_experts, self.slots = num_experts, slots
        self._reader = AsyncHostReader()

    @torch.no_grad()
    def plan(self, routing_TE: Tensor) -> tuple[CloneRouting | None, KnownCounts | None]:
        """Plan the clones for this routing.

        Returns:
            The routing over experts and clones, None if clones gain nothing; and the counts, so that the dispatcher
            need not exchange them (None with several ranks of etp, which exchange counts of their own).

        Communication: all-gather over tp_ep; the host waits for the counts.
        """
        counts_E = routing_TE.sum(0)
        counts_SE = counts_E.new_empty(self.group.size, self.num_experts)
        all_gather_flat(counts_SE.view(-1), counts_E, self.group)
        counts = self._reader.start(torch.Tensor.flatten, counts_SE)()
        by_source = [counts[start : start + self.num_experts] for start in range(0, len(counts), self.num_experts)]
        totals_E = [sum(column) for column in zip(*by_source)]
        clones = plan_clones(totals_E, self.ep.size, self.slots)
        if not clones:
            return None, self._known_counts(by_source)
        experts, ranges = self._columns(clones, totals_E)
        before, low, high, columns = [0] * self.num_experts, [], [], []
        for source, counts in enumerate(by_source):  # an expert's tokens are numbered over the sources
            local = [(first - before[expert], last - before[expert]) for expert, (first, last) in zip(experts, ranges)]
            if source == self.group.rank:
                low, high = zip(*local)
            columns.append(
                [max(0, min(last, counts[expert]) - max(first, 0)) for expert, (first, last) in zip(experts, local)]
            )
            before = [sum(pair) for pair in zip(before, counts)]
        routing = CloneRouting(clones, *to_device(torch.tensor([experts, low, high]), routing_TE.device).unbind(0))
        return routing, self._known_counts(columns)

    def _known_counts(self, by_source: Sequence[Sequence[int]]) -> KnownCounts | None:
        if self.group.ranks != self.ep.ranks:
            return None
        return KnownCounts(sum(by_source[self.ep.rank]), by_rank=tuple(tuple(counts) for counts in by_source))

    def _columns(self, clones: Sequence[Clone], totals_E: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the expert of every column and the range of its tokens over all ranks that the column takes."""
        num_local = self.num_experts // self.ep.size
        remaining_E = list(totals_E)
        for clone in clones:
            remaining_E[clone.expert] -= clone.num_tokens
        experts, ranges = [], []
        for rank in range(self.ep.size):
            local = range(rank * num_local, (rank + 1) * num_local)
            hosted = [clone for clone in clones if clone.rank == rank]
            num_unused = self.slots - len(hosted)
            experts += [*local, *(clone.expert for clone in hosted), *[local[0]] * num_unused]
            ranges += [
                *((0, remaining_E[expert]) for expert in local),
                *((clone.first, clone.first + clone.num_tokens) for clone in hosted),
                *[(0, 0)] * num_unused,
            ]
        return experts, ranges

    def weight_exchange(self, routing: CloneRouting, is_saving: bool) -> "CloneWeightExchange":
        """Return the exchange of the clones' weights for one pass."""
        return CloneWeightExchange(self.ep, routing.clones, self.num_experts // self.ep.size, is_saving)


class CloneWeightExchange:
    """Exchange of the clones' weights and gradients in one pass.

    Attributes:
        num_clones: clones on this rank.
        weights: stacks of the local experts' tensors, [e, ...]; fetched are stacks [num_clones, ...].
        fetched: the clones' weights while backward uses them.
    """

    def __init__(self, ep: Group, clones: Sequence[Clone], num_local: int, is_saving: bool):
        """Plan the sizes. With `is_saving`, what experts save stays until backward, so clones are dropped from it."""
        self.ep, self.is_saving = ep, is_saving
        self.weights: tuple[Tensor, ...] = ()
        # in the order in which they are sent: by rank and slot; and received: by expert, so by owner
        outgoing = [clone for clone in clones if clone.expert // num_local == ep.rank]
        incoming = [clone for clone in clones if clone.rank == ep.rank]
        self.outgoing = [clone.expert % num_local for clone in outgoing]
        self.send = [sum(clone.rank == rank for clone in outgoing) for rank in range(ep.size)]
        self.receive = [sum(clone.expert // num_local == rank for clone in incoming) for rank in range(ep.size)]
        self.num_clones = len(incoming)
        self.fetched: tuple[Tensor, ...] = ()

    def fetch(self, x_RH: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the tokens, which the experts must read, and the clones' weights.

        Communication: all-to-all over ep, and again in backward for the gradients.
        """
        self.weights = tuple(weights)
        x_RH, *cloned = _Fetch.apply(self, x_RH, *self.weights)
        return x_RH, tuple(cloned)

    def fetch_again(self, y_RH: Tensor) -> Tensor:
        """Make backward fetch the weights, by an all-to-all over ep, before the experts' backward."""
        return _FetchAgain.apply(self, y_RH) if self.is_saving else y_RH

    @contextlib.contextmanager
    def dropping(self, cloned: Sequence[Tensor]) -> Iterator[None]:
        """Enter a scope that uses the clones' weights without saving them for backward."""
        if not self.is_saving:
            yield
            return
        index_by_address = {_address(x): index for index, x in enumerate(cloned)}

        def pack(x: Tensor) -> Tensor | int:
            index = index_by_address.get(_address(x))
            return x.detach() if index is None else index

        with saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else self.fetched[saved]):
            yield

    def exchange(self) -> tuple[Tensor, ...]:
        """Send the weights of local experts that are cloned elsewhere; return those of the clones on this rank."""
        indices = integer_tensor(self.outgoing, self.weights[0].device)
        outgoing = [weight.detach().index_select(0, indices).flatten(1) for weight in self.weights]
        received = all_to_all(self.ep, self.send, self.receive, torch.cat(outgoing, 1))[0]
        parts = received.split([weight[0].numel() for weight in self.weights], 1)
        # copies, so that each tensor has its own storage
        return tuple(
            part.clone(memory_format=torch.contiguous_format).view(-1, *weight.shape[1:])
            for part, weight in zip(parts, self.weights)
        )

    def return_grads(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Send the gradients of the clones on this rank; return those of the local experts' weights."""
        received = all_to_all(self.ep, self.receive, self.send, torch.cat([grad.flatten(1) for grad in grads], 1))[0]
        self.fetched = ()
        if not self.outgoing:
            return [None] * len(grads)
        parts = received.split([weight[0].numel() for weight in self.weights], 1)
        return [self._sum_by_expert(weight, part) for weight, part in zip(self.weights, parts)]

    def _sum_by_expert(self, weight: Tensor, received: Tensor) -> Tensor:
        total = torch.zeros_like(weight)
        for expert, grad in zip(self.outgoing, received):
            total[expert] += grad.view(weight.shape[1:])
        return total


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: CloneWeightExchange, x_RH: Tensor, *weights: Tensor):
        ctx.exchange = exchange
        return x_RH.view_as(x_RH), *exchange.exchange()

    @staticmethod
    def backward(ctx, grad_RH: Tensor, *grads: Tensor):
        return None, grad_RH, *ctx.exchange.return_grads(grads)


class _FetchAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: CloneWeightExchange, y_RH: Tensor):
        ctx.exchange = exchange
        return y_RH.view_as(y_RH)

    @staticmethod
    def backward(ctx, grad_RH: Tensor):
        ctx.exchange.fetched = ctx.exchange.exchange()
        return None, grad_RH

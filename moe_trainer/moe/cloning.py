"""Cloning of hot experts (--moe-clone-hot-experts): ranks with little to do compute rows of experts that have too many.

Design: every rank learns how many rows each source has for each expert, and makes the same plan (clone_plan.py). The layer then sees an
expert-parallel rank as one with `slots` experts more: `Redirect` turns the [T, E] routing into one over these columns, and the
dispatcher carries rows there as ever. The weights of the clones come by an all-to-all over ps.ep, and their gradients go back the
same way and are added to the home expert's.

A clone lives only while it is used. Forward drops it; backward fetches it again before the experts' own backward, and drops it when
its gradient has been sent. Both are steps of one chain of autograd nodes through the rows, which every rank has,

    y: combine <- `_FetchAgain` <- experts <- `_Fetch` <- dispatch :x

so all ranks run the collectives in one order, whatever each of them computes. Where a region runs again in backward, nothing is kept
anyway, and it is the second pass that fetches.

The numbers are those without clones: a token's rows are summed in the order of their experts, wherever those were computed (with the
all-gather dispatcher the sum over ranks has another order, as ever); an expert's weight gradient is a sum of the parts of its clones.

Shape letters: T local tokens, E experts, S sources (ranks of tp_ep), V columns: for every rank of ep its experts and then its slots.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_trainer.memory.host_read import HostReads, integers
from moe_trainer.moe.clone_plan import Clone, plan_clones
from moe_trainer.moe.dispatch.base import Known
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel.collectives import all_gather_flat, all_to_all
from moe_trainer.parallel.state import Group, ParallelState


@dataclass(frozen=True)
class Redirect:
    """Where this rank's rows go. expert_V: the expert of each column. Of an expert's rows on this rank, counted by token, column v
    takes those in [low_V, high_V)."""

    clones: tuple[Clone, ...]
    expert_V: Tensor
    low_V: Tensor
    high_V: Tensor

    def apply(self, probs_TE: Tensor, routing_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (differentiable) and routing over the columns of experts and slots."""
        place_TE = routing_TE.long().cumsum(0) - 1
        place_TV = place_TE.index_select(1, self.expert_V)
        here_TV = (place_TV >= self.low_V) & (place_TV < self.high_V)
        return probs_TE.index_select(1, self.expert_V), routing_TE.index_select(1, self.expert_V) & here_TV


class HotExperts:
    """Plans the clones of one rank's MoE layers; holds constants only."""

    def __init__(self, ps: ParallelState, num_experts: int, slots: int):
        """slots: --moe-clone-hot-experts, experts that a rank can take in."""
        self.members, self.ep = ps.tp_ep, ps.ep
        self.num_experts, self.slots = num_experts, slots
        self._reads = HostReads()

    @torch.no_grad()
    def plan(self, routing_TE: Tensor) -> tuple[Redirect | None, Known | None]:
        """What to clone for this routing, None where nothing is to be gained; and what is known of the rows then, so that nobody need ask
        again (None with several ranks of etp, which tell each other). Collective over tp_ep; the counts reach the host."""
        counts_E = routing_TE.sum(0)
        counts_SE = counts_E.new_empty(self.members.size, self.num_experts)
        all_gather_flat(counts_SE.view(-1), counts_E, self.members)
        counts = self._reads.start(torch.Tensor.flatten, counts_SE)()
        by_source = [counts[start:start + self.num_experts] for start in range(0, len(counts), self.num_experts)]
        clones = plan_clones([sum(column) for column in zip(*by_source)], self.ep.size, self.slots)
        if not clones:
            return None, self._known(by_source)
        experts, spans = self._columns(clones, [sum(column) for column in zip(*by_source)])
        before, low, high, columns = [0] * self.num_experts, [], [], []
        for source, counts in enumerate(by_source):  # an expert's rows are counted over the sources
            own = [(first - before[expert], last - before[expert]) for expert, (first, last) in zip(experts, spans)]
            if source == self.members.rank:
                low, high = zip(*own)
            columns.append([max(0, min(last, counts[expert]) - max(first, 0)) for expert, (first, last) in zip(experts, own)])
            before = [sum(pair) for pair in zip(before, counts)]
        redirect = Redirect(clones, *to_device(torch.tensor([experts, low, high]), routing_TE.device).unbind(0))
        return redirect, self._known(columns)

    def _known(self, by_source: Sequence[Sequence[int]]) -> Known | None:
        if self.members.ranks != self.ep.ranks:
            return None
        return Known(sum(by_source[self.ep.rank]), by_rank=tuple(tuple(counts) for counts in by_source))

    def _columns(self, clones: Sequence[Clone], total_E: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The expert of every column, and the span of that expert's rows, of all ranks, that it takes."""
        num_local = self.num_experts // self.ep.size
        kept = list(total_E)
        for clone in clones:
            kept[clone.expert] -= clone.rows
        experts, spans = [], []
        for rank in range(self.ep.size):
            own = range(rank * num_local, (rank + 1) * num_local)
            taken_in = [clone for clone in clones if clone.rank == rank]
            idle = self.slots - len(taken_in)
            experts += [*own, *(clone.expert for clone in taken_in), *[own[0]] * idle]
            spans += [*((0, kept[expert]) for expert in own), *((clone.first, clone.first + clone.rows) for clone in taken_in),
                      *[(0, 0)] * idle]
        return experts, spans

    def trip(self, redirect: Redirect, keeps: bool) -> "CloneTrip":
        """The way of the clones' weights in one pass; see CloneTrip."""
        return CloneTrip(self.ep, redirect.clones, self.num_experts // self.ep.size, keeps)


class CloneTrip:
    """The way of the clones' weights in one pass: here and, for their gradients, back.

    num_clones: on this rank. weights: stacks of the local experts' tensors, [e, ...]; what is fetched are stacks [num_clones, ...].
    held: these, while backward uses them.
    """

    def __init__(self, ep: Group, clones: Sequence[Clone], num_local: int, keeps: bool):
        """keeps: would what the experts save stay in memory until backward? Then the clones' weights are left out of it."""
        self.ep, self.keeps = ep, keeps
        self.weights: tuple[Tensor, ...] = ()
        leaving = [clone for clone in clones if clone.expert // num_local == ep.rank]  # by rank and slot, as they travel
        self.leaving = [clone.expert % num_local for clone in leaving]
        arriving = [clone for clone in clones if clone.rank == ep.rank]  # by expert, so by home: as they arrive
        self.send = [sum(clone.rank == rank for clone in leaving) for rank in range(ep.size)]
        self.receive = [sum(clone.expert // num_local == rank for clone in arriving) for rank in range(ep.size)]
        self.num_clones = len(arriving)
        self.held: tuple[Tensor, ...] = ()

    def fetch(self, x_RH: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns: the rows, to be used from here on, and the clones' weights. Collective over ep, and in backward again."""
        self.weights = tuple(weights)
        x_RH, *cloned = _Fetch.apply(self, x_RH, *self.weights)
        return x_RH, tuple(cloned)

    def fetch_again(self, y_RH: Tensor) -> Tensor:
        """Have backward fetch the weights before it gets to the experts. Collective over ep in backward."""
        return _FetchAgain.apply(self, y_RH) if self.keeps else y_RH

    @contextlib.contextmanager
    def dropping(self, cloned: Sequence[Tensor]) -> Iterator[None]:
        """A scope in which the clones' weights are used; what saves them does not keep them."""
        if not self.keeps:
            yield
            return
        places = {_address(x): place for place, x in enumerate(cloned)}

        def pack(x: Tensor) -> Tensor | int:
            place = places.get(_address(x))
            return x.detach() if place is None else place

        with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else self.held[kept]):
            yield

    def exchange(self) -> tuple[Tensor, ...]:
        """Send the weights of the local experts that are cloned elsewhere; returns those of the clones on this rank."""
        numbers = integers(self.leaving, self.weights[0].device)
        leaving = [weight.detach().index_select(0, numbers).flatten(1) for weight in self.weights]
        arrived = all_to_all(self.ep, self.send, self.receive, torch.cat(leaving, 1))[0]
        pieces = arrived.split([weight[0].numel() for weight in self.weights], 1)
        # copies, so that each has a storage of its own
        return tuple(piece.clone(memory_format=torch.contiguous_format).view(-1, *weight.shape[1:]) for piece, weight in zip(pieces, self.weights))

    def bring_home(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Send the gradients of the clones on this rank; returns those of the local experts' weights."""
        arrived = all_to_all(self.ep, self.receive, self.send, torch.cat([grad.flatten(1) for grad in grads], 1))[0]
        self.held = ()
        if not self.leaving:
            return [None] * len(grads)
        pieces = arrived.split([weight[0].numel() for weight in self.weights], 1)
        return [self._at_home(weight, piece) for weight, piece in zip(self.weights, pieces)]

    def _at_home(self, weight: Tensor, arrived: Tensor) -> Tensor:
        grad = torch.zeros_like(weight)
        for expert, row in zip(self.leaving, arrived):
            grad[expert] += row.view(weight.shape[1:])
        return grad


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trip: CloneTrip, x_RH: Tensor, *weights: Tensor):
        ctx.trip = trip
        return x_RH.view_as(x_RH), *trip.exchange()

    @staticmethod
    def backward(ctx, grad_RH: Tensor, *grads: Tensor):
        return None, grad_RH, *ctx.trip.bring_home(grads)


class _FetchAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trip: CloneTrip, y_RH: Tensor):
        ctx.trip = trip
        return y_RH.view_as(y_RH)

    @staticmethod
    def backward(ctx, grad_RH: Tensor):
        ctx.trip.held = ctx.trip.exchange()
        return None, grad_RH

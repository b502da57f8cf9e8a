"""Cloning of hot experts (--moe-clone-hot-experts): ranks below the average load compute tokens of overloaded experts.

Every rank learns how many tokens each source has for each expert and makes the same plan (clone_plan.py). The layer
then treats an expert-parallel rank as one with `slots` more experts: `CloneRouting` converts the [T, E] routing to
these columns, and the dispatcher is unchanged. The weights of the clones are received by an all-to-all over ps.ep and
follow the local experts' in one stack; their gradients return the same way and are added to the expert's own.

The plan is made on the device. Where the host reads token counts anyway it also reads the plan, and exactly the
weights of clones are sent. With a fixed receive buffer it reads nothing: every pair of ranks exchanges `slots` experts,
of which the receiver uses those that the plan names.

The stack with the clones is stored only while it is used: forward drops it, and backward makes it again before the
experts' backward. Both are nodes of one autograd chain through the tokens, which every rank has,

    y: combine <- `_FetchAgain` <- experts <- `_Fetch` <- dispatch :x

so all ranks run the collectives in the same order, whatever each of them computes. In a recomputed region nothing is
saved, and the second pass fetches. Weight gradients that are computed later are exchanged later.

The numbers are those without clones: a token's results are summed in the order of their experts, wherever they were
computed (the all-gather dispatcher and the libraries of flex sum over ranks in another order, as without clones); an
expert's weight gradient is a sum over its clones. Quantized weights of a clone are those of its expert.

Shape letters: T local tokens, E experts, e local experts, P ranks of ep, S slots of a rank, N sources (ranks of tp_ep),
C slots of all ranks, V columns: for every rank of ep its experts and then its slots, K elements of an expert.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.mechanisms.placement_kinds.cloned import CLONED, EXCHANGE_ELEMENTS
from arguments.moe import MoEArgs
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.host_read import AsyncHostReader, integer_tensor
from moe_trainer.moe.dispatch.base import CacheFn, KnownCounts, TokenDispatcher
from moe_trainer.moe.placement.clone_plan import ClonePlan, plan_clones
from moe_trainer.moe.placement.own import Counts, ExpertPlacement, OwnWeights, PlacedRouting, RunExperts
from moe_trainer.ops.expert_mlp import WeightOwner
from moe_trainer.parallel.collectives import all_gather_flat, all_to_all, all_to_all_flat
from moe_trainer.parallel.state import Group, ParallelState


@dataclass(frozen=True)
class CloneRouting:
    """Routing of this rank's tokens over experts and clones.

    Column v is of expert_V[v] and takes those of the expert's tokens on this rank, counted by token, that are in
    [low_V, high_V).

    Attributes:
        hosted: the experts that each rank of ep hosts, in the order of its slots; None if the host does not know.
    """

    plan: ClonePlan
    expert_V: Tensor
    low_V: Tensor
    high_V: Tensor
    hosted: tuple[tuple[int, ...], ...] | None

    def apply(self, probs_TE: Tensor, routing_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (differentiable) and routing over the columns of experts and slots."""
        position_TE = routing_TE.long().cumsum(0) - 1
        position_TV = position_TE.index_select(1, self.expert_V)
        in_range_TV = (position_TV >= self.low_V) & (position_TV < self.high_V)
        return probs_TE.index_select(1, self.expert_V), routing_TE.index_select(1, self.expert_V) & in_range_TV


class ClonedPlacement(ExpertPlacement):
    """Plans the clones of one rank's layer, and counts their tokens."""

    declaration = CLONED
    moved_tokens_2P: Tensor

    def __init__(self, ps: ParallelState, num_experts: int, slots: int):
        """Store the sizes; `slots` is --moe-clone-hot-experts, the clones that a rank can host."""
        self.group, self.ep = ps.tp_ep, ps.ep
        self.num_experts, self.slots, self.num_local = num_experts, slots, num_experts // ps.ep.size
        self._uses_known_counts = False
        self._reader = AsyncHostReader()

    def set_dispatcher(self, dispatcher: TokenDispatcher, device: torch.device) -> None:
        self._uses_known_counts = dispatcher.uses_known_counts
        self.moved_tokens_2P = torch.zeros(2, self.ep.size, dtype=torch.int64, device=device)

    def place(
        self,
        probs_TE: Tensor,
        routing_TE: Tensor,
        known: KnownCounts | None,
        *,
        counts_on_device: bool,
        is_training: bool,
        cache_fn: CacheFn,
    ) -> PlacedRouting:
        def plan() -> tuple[CloneRouting, KnownCounts | None]:
            routing, known = self.plan(routing_TE, counts_on_device)
            if is_training:
                self.count(routing.plan)
            return routing, known if self._uses_known_counts else None

        routing, known = cache_fn(plan)
        probs_TV, routing_TV = routing.apply(probs_TE, routing_TE)
        return PlacedRouting(probs_TV, routing_TV, known, routing.expert_V, routing)

    @torch.no_grad()
    def plan(self, routing_TE: Tensor, on_device: bool = False) -> tuple[CloneRouting, KnownCounts | None]:
        """Plan the clones for this routing.

        Returns:
            The routing over experts and clones; and the counts, so that the dispatcher need not exchange them (None
            `on_device`, and with several ranks of etp, which exchange separate counts).

        Communication: all-gather over tp_ep; the host waits for the counts unless `on_device`.
        """
        counts_E = routing_TE.sum(0)
        counts_NE = counts_E.new_empty(self.group.size, self.num_experts)
        all_gather_flat(counts_NE.view(-1), counts_E, self.group)
        totals_E = counts_NE.sum(0)
        plan = plan_clones(totals_E, self.ep.size, self.slots)
        expert_V, low_NV, high_NV = self._columns(plan, counts_NE, totals_E)
        low_V, high_V = low_NV[self.group.rank], high_NV[self.group.rank]
        if on_device:
            return CloneRouting(plan, expert_V, low_V, high_V, None), None
        in_column_NV = torch.minimum(high_NV, counts_NE[:, expert_V]) - low_NV.clamp(min=0)
        numbers = self._reader.start(_flat, plan.expert, plan.num_tokens, in_column_NV.clamp_(min=0))()
        num_slots = self.ep.size * self.slots
        experts, num_tokens = numbers[:num_slots], numbers[num_slots : 2 * num_slots]
        hosted = tuple(
            tuple(experts[slot] for slot in range(first, first + self.slots) if num_tokens[slot])
            for first in range(0, num_slots, self.slots)
        )
        num_columns = len(expert_V)
        by_source = tuple(
            tuple(numbers[start : start + num_columns]) for start in range(2 * num_slots, len(numbers), num_columns)
        )
        return CloneRouting(plan, expert_V, low_V, high_V, hosted), self._known_counts(by_source)

    @torch.no_grad()
    def count(self, plan: ClonePlan) -> None:
        """Count the tokens of clones, by host and by owner; without a wait."""
        by_host_P, by_owner_P = self.moved_tokens_2P
        by_host_P.add_(plan.num_tokens.sum(1))
        by_owner_P.scatter_add_(0, (plan.expert // self.num_local).flatten(), plan.num_tokens.flatten())

    def _known_counts(self, by_source: tuple[tuple[int, ...], ...]) -> KnownCounts | None:
        if self.group.ranks != self.ep.ranks:
            return None
        return KnownCounts(sum(by_source[self.ep.rank]), by_rank=by_source)

    def _columns(self, plan: ClonePlan, counts_NE: Tensor, totals_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the expert of every column, and the range of each source's tokens that the column takes."""
        experts_PE = torch.arange(self.num_experts, device=totals_E.device).view(self.ep.size, -1)
        remaining_E = totals_E.scatter_add(0, plan.expert.flatten(), -plan.num_tokens.flatten())
        expert_V = torch.cat([experts_PE, plan.expert], 1).flatten()
        first_V = torch.cat([torch.zeros_like(experts_PE), plan.first], 1).flatten()
        last_V = torch.cat([remaining_E[experts_PE], plan.first + plan.num_tokens], 1).flatten()
        before_NV = (counts_NE.cumsum(0) - counts_NE)[:, expert_V]  # an expert's tokens are numbered over the sources
        return expert_V, first_V - before_NV, last_V - before_NV

    def weights(self, plan: CloneRouting, is_saving: bool) -> OwnWeights:
        if plan.hosted is None:
            return CloneWeights(_FixedExchange(self.ep, plan.plan, self.num_local), self.num_local, is_saving)
        if not any(plan.hosted):
            return _UnusedSlots(self.num_local)
        return CloneWeights(_ExactExchange(self.ep, plan.hosted, self.num_local), self.num_local, is_saving)


def make_placement(moe: MoEArgs, ps: ParallelState) -> ClonedPlacement:
    """Build it for a layer."""
    return ClonedPlacement(ps, moe.expert_count, moe.moe_clone_hot_experts)


class _UnusedSlots(OwnWeights):
    """No slot has tokens, on any rank, and the host knows it."""

    def __init__(self, num_local: int):
        self._num_local = num_local

    def counts(self, tokens_per_expert_e: Counts) -> Counts:
        return tokens_per_expert_e[: self._num_local]


def _flat(*tensors: Tensor) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


class _Exchange(Protocol):
    """Exchange between the owners of experts and the ranks that host clones. Collective over ep."""

    num_clones: int

    def to_hosts(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Send local experts' weights, [e, ...]; return those of the clones on this rank, [num_clones, ...]."""

    def to_owners(self, grads: Sequence[Tensor], num_local: int) -> list[Tensor]:
        """Send the gradients of clones; return the sums of those of local experts, [e, ...]."""


class _ExactExchange:
    """Sends the weights of clones only, in one call for all tensors."""

    def __init__(self, ep: Group, hosted: Sequence[Sequence[int]], num_local: int):
        self.ep = ep
        # in the order in which they are sent: by rank and slot; and received: by expert, so by owner
        self.outgoing = [
            expert % num_local for experts in hosted for expert in experts if expert // num_local == ep.rank
        ]
        self.send = [sum(expert // num_local == ep.rank for expert in experts) for experts in hosted]
        owners = [expert // num_local for expert in hosted[ep.rank]]
        self.receive = [owners.count(rank) for rank in range(ep.size)]
        self.num_clones = len(owners)

    def to_hosts(self, weights: Sequence[Tensor]) -> list[Tensor]:
        indices = integer_tensor(self.outgoing, weights[0].device)
        sent = torch.cat([weight.index_select(0, indices).flatten(1) for weight in weights], 1)
        return _split(all_to_all(self.ep, self.send, self.receive, sent)[0], weights)

    def to_owners(self, grads: Sequence[Tensor], num_local: int) -> list[Tensor]:
        sent = torch.cat([grad.flatten(1) for grad in grads], 1)
        received = _split(all_to_all(self.ep, self.receive, self.send, sent)[0], grads)
        sums = [grad.new_zeros(num_local, *grad.shape[1:]) for grad in grads]
        for total, parts in zip(sums, received):
            for expert, part in zip(self.outgoing, parts):
                total[expert] += part
        return sums


def _split(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = x.split([one.shape[1:].numel() for one in like], 1)
    return [part.view(-1, *one.shape[1:]) for part, one in zip(parts, like)]


class _FixedExchange:
    """Sends every rank's slots to every rank, zeros where the plan names no clone; the host knows nothing."""

    def __init__(self, ep: Group, plan: ClonePlan, num_local: int):
        self.ep, self.num_clones = ep, plan.expert.shape[1]
        owner_PS = plan.expert // num_local
        self.local_PS = plan.expert % num_local
        is_used_PS = plan.num_tokens > 0
        self.is_outgoing_PS = (owner_PS == ep.rank) & is_used_PS
        self.is_incoming_PS = (owner_PS[ep.rank] == torch.arange(ep.size, device=owner_PS.device).unsqueeze(1)) & (
            is_used_PS[ep.rank]
        )
        self.owner_S = owner_PS[ep.rank]

    def to_hosts(self, weights: Sequence[Tensor]) -> list[Tensor]:
        index_S = torch.arange(self.num_clones, device=self.owner_S.device)

        def send(part: Tensor) -> Tensor:
            return torch.where(self.is_outgoing_PS.unsqueeze(2), part[self.local_PS], 0)

        return [self._exchange(weight, send, lambda found_PSK: found_PSK[self.owner_S, index_S]) for weight in weights]

    def to_owners(self, grads: Sequence[Tensor], num_local: int) -> list[Tensor]:
        index_e1 = torch.arange(num_local, device=self.owner_S.device).unsqueeze(1)
        is_of_eC = (self.local_PS.flatten() == index_e1) & self.is_outgoing_PS.flatten()

        def send(part: Tensor) -> Tensor:
            return torch.where(self.is_incoming_PS.unsqueeze(2), part, 0)

        def add(found_PSK: Tensor) -> Tensor:  # by a GEMM, whose order of summation is fixed
            return is_of_eC.to(found_PSK.dtype) @ found_PSK.flatten(0, 1)

        return [self._exchange(grad, send, add) for grad in grads]

    def _exchange(self, x: Tensor, send, receive) -> Tensor:
        """Exchange [P, S, K] made by send(x [n, K]) and return receive(what arrives) [m, ...], some K at a time."""
        flat = x.flatten(1)
        step = max(1, EXCHANGE_ELEMENTS // (self.ep.size * self.num_clones))
        received = []
        for part in flat.split(step, 1):
            sent = send(part).contiguous()
            arrived = torch.empty_like(sent)
            all_to_all_flat(arrived.view(-1), sent.view(-1), self.ep)
            received.append(receive(arrived))
        return torch.cat(received, 1).view(-1, *x.shape[1:])


class CloneWeights(OwnWeights):
    """The local experts' weights followed by those of the clones on this rank, in one pass.

    Attributes:
        num_clones: clones on this rank, at most the slots.
    """

    def __init__(self, exchange: _Exchange, num_local: int, is_saving: bool):
        """With `is_saving`, what experts save stays until backward, so the stacks are dropped from it."""
        self._exchange, self._num_local, self._is_saving = exchange, num_local, is_saving
        self.num_clones = exchange.num_clones
        self._weights: tuple[Tensor, ...] = ()
        self._stacks: list[Tensor] = []

    def counts(self, tokens_per_expert_e: Counts) -> Counts:
        return tokens_per_expert_e[: self._num_local + self.num_clones]  # slots without a clone have no tokens

    def run(
        self, run_experts: RunExperts, x_RH: Tensor, tensors: tuple[Tensor, ...], activations: ActivationPolicy
    ) -> Tensor:
        x_RH, stacks = self.fetch(x_RH, tensors)
        with activations.without_saving(self, stacks) if activations.is_saving else contextlib.nullcontext():
            y_RH = run_experts(x_RH, stacks)
        return self.fetch_again(y_RH)

    def fetch(self, x_RH: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the tokens, which the experts must read, and the stacks [e + num_clones, ...].

        Communication: all-to-all over ep, and again in backward for the gradients.
        """
        self._weights = tuple(weights)
        x_RH, *stacks = _Fetch.apply(self, x_RH, *self._weights)
        for weight, stack in zip(self._weights, stacks):
            if isinstance(weight, Parameter):
                stack.grad_owner = WeightOwner(weight, self._to_owner)
        return x_RH, tuple(stacks)

    def fetch_again(self, y_RH: Tensor) -> Tensor:
        """Make backward fetch the weights, by an all-to-all over ep, before the experts' backward."""
        return _FetchAgain.apply(self, y_RH) if self._is_saving else y_RH

    def get(self, index: int) -> Tensor:
        """Return a stack while backward uses it; the source of ActivationPolicy.without_saving."""
        return self._stacks[index]

    def make_stacks(self) -> list[Tensor]:
        """Return the stacks. Communication: see `fetch`."""
        weights = [weight.detach() for weight in self._weights]
        clones = self._exchange.to_hosts(weights)
        if self.num_clones == 0:
            return weights
        return [torch.cat(pair) for pair in zip(weights, clones)]

    def keep_stacks(self, stacks: list[Tensor]) -> None:
        """Hold what `get` returns."""
        self._stacks = stacks

    def return_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Add the gradients of an expert and its clones; stacks -> [e, ...]. Communication: see `fetch`."""
        self._stacks = []
        returned = self._exchange.to_owners([grad[self._num_local :] for grad in grads], self._num_local)
        return [grad[: self._num_local] + part for grad, part in zip(grads, returned)]

    def _to_owner(self, grad: Tensor) -> Tensor:
        return self.return_grads([grad])[0]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: CloneWeights, x_RH: Tensor, *tensors: Tensor):
        ctx.set_materialize_grads(False)
        ctx.weights = weights
        return x_RH.view_as(x_RH), *weights.make_stacks()

    @staticmethod
    def backward(ctx, grad_RH: Tensor, *grads: Tensor | None):
        known = [grad for grad in grads if grad is not None]  # the same on all ranks: others are computed later
        returned = iter(ctx.weights.return_grads(known) if known else ())
        return None, grad_RH, *(None if grad is None else next(returned) for grad in grads)


class _FetchAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: CloneWeights, y_RH: Tensor):
        ctx.weights = weights
        return y_RH.view_as(y_RH)

    @staticmethod
    def backward(ctx, grad_RH: Tensor):
        ctx.weights.keep_stacks(ctx.weights.make_stacks())
        return None, grad_RH

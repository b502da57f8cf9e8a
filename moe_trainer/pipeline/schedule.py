"""Running the microbatches of an iteration through this rank's chunks of the model.

A `Schedule` is built once (`choose`) and runs every iteration and every evaluation: `run` works off the rank's program (plan.py:
actions and messages in order) and knows tensors and a callable, nothing of models. The caller supplies

    forward_step(chunk, microbatch, x) -> (output, result)

with the local number of the chunk, and x what the chunk before it put out, or None on the first one of the model. On the last one
of the model output is the scalar loss, and result whatever the caller wants back; elsewhere result is ignored. Microbatches may be
asked for in any order across chunks; within a chunk they come in ascending order. Shapes are known in advance (`Spec` per chunk
of what it receives), so no message is spent on them.

What a rank holds between forward and backward of a microbatch is the graph, not the output: once that is on its way only its
place in the graph is kept (Megatron-LM's deallocation of pipeline outputs, by way of torch's gradient edges). Received tensors are
leaves; their `.grad` goes back. Sends are not waited for until two more have followed, so a neighbour that is late by less holds nobody up.

With virtual stages messages are started one action ahead of their use, one by one and over two communicators (plan.py: channel); without,
or with --no-overlap-p2p-communication, right before it and as one batch. All backwards but a chunk's last run inside `accumulate`, so
gradients are reduced once and behind the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moe_trainer.parallel import collectives, p2p
from moe_trainer.parallel.baton import Baton
from moe_trainer.parallel.state import Group
from moe_trainer.parallel.weight_grads import PendingGrads, WeightGradQueue
from moe_trainer.pipeline.overlap import Pairs
from moe_trainer.pipeline.plan import Launch, Message, channel, program
from moe_trainer.shape.orders import orders as orders_of
from moe_trainer.shape.timetable import (
    BACKWARD,
    FORWARD,
    Action,
    Costs,
    Order,
    Pair,
    actions_of,
    source,
    target,
)

Result = TypeVar("Result")
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what a chunk receives."""
ForwardStep = Callable[[int, int, Tensor | None], tuple[Tensor, Result]]
Timer = Callable[[str], contextlib.AbstractContextManager]
MOST_SENDS = 2  # that are under way at a time


@dataclass(frozen=True)
class Work(Generic[Result]):
    """What one call of `run` is about.

    specs: by local chunk, what it receives (ignored on the first chunk of the model).
    grad_scale: factor of each loss in the gradient (loss_scale / num_microbatches, or loss_scale per token).
    accumulate: context under which backward must not reduce.
    forward_only: no backward; forward_step should not build graphs.
    """

    forward_step: ForwardStep
    num_microbatches: int
    specs: Sequence[Spec]
    grad_scale: float | Tensor = 1.0
    accumulate: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    timer: Timer = lambda name: contextlib.nullcontext()
    forward_only: bool = False


class Schedule:
    """The way one rank works; see the module's head.

    orders: (number of microbatches) -> by rank, what it does.
    second: the ranks of pp by another communicator, for half of the messages that overlap.
    queues: by local chunk, where its layers leave weight gradients in backward; W actions compute them (apart), or the end of the
    backward that left them. costs: to plan with. pairs: runs the pairs of the orders.
    """

    def __init__(self, orders: Callable[[int], list[Order]], pp: Group, num_chunks: int, device: torch.device, *,
                 second: Group | None = None, overlap: bool = False, queues: Sequence[WeightGradQueue | None] | None = None,
                 apart: bool = False, costs: Costs | None = None, pairs: Pairs | None = None):
        self.orders = orders
        self.pp = pp
        self.channels = (pp, second or pp)
        self.num_chunks = num_chunks
        self.device = device
        self.overlap = overlap
        self.queues, self.apart, self.costs = queues, apart, costs
        self.pairs = pairs
        self._programs: dict[tuple[int, bool], list[Action | Pair | Launch]] = {}
        self._met = False

    def run(self, work: Work[Result]) -> list[Result]:
        """Work off all microbatches. Returns: the results of the last chunk of the model in microbatch order; [] on other ranks.

        Raises: ValueError when the schedule cannot run this number of microbatches.
        """
        if not self._met:
            collectives.barrier(self.pp)  # NCCL: the first communication of a group must involve all its members
            self._met = True
        execution = _Execution(self, work)
        for step in self.program(work.num_microbatches, work.forward_only):
            if isinstance(step, Launch):
                execution.launch(step)
            elif isinstance(step, Pair):
                execution.pair(step)
            elif step.kind == FORWARD:
                execution.forward(step)
            elif step.kind == BACKWARD:
                execution.backward(step)
            else:
                execution.weight_grads(step)
        return execution.finish()

    def program(self, num_microbatches: int, forward_only: bool) -> list[Action | Pair | Launch]:
        """This rank's actions and messages, in order."""
        assert num_microbatches >= 1, f"num_microbatches {num_microbatches}"
        key = (num_microbatches, forward_only)
        if key not in self._programs:
            orders = self.orders(num_microbatches)
            if forward_only:
                orders = [tuple(action for step in order for action in actions_of(step) if action.kind == FORWARD) for order in orders]
            # a batch-size schedule walks through many numbers; only the last two (training, evaluation) are kept
            self._programs = dict([*self._programs.items()][-1:])
            self._programs[key] = program(orders, self.num_chunks, self.pp.rank, int(self.overlap), self.costs)
        return self._programs[key]


@dataclass
class _Arrival:
    buffer: Tensor
    work: Any


@dataclass
class _Execution(Generic[Result]):
    """One run: what has arrived, what waits for its backward, what is under way."""

    schedule: Schedule
    work: Work[Result]
    arrivals: dict[Action, _Arrival] = field(default_factory=dict)
    leaves: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    edges: dict[tuple[int, int], tuple[GradientEdge, Spec]] = field(default_factory=dict)
    outgoing: dict[Action, Tensor] = field(default_factory=dict)
    under_way: list[tuple[Any, Tensor]] = field(default_factory=list)
    pending: dict[tuple[int, int], PendingGrads] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)

    def launch(self, step: Launch) -> None:
        """Start messages."""
        pp, ops = self.schedule.pp, [self._op(message) for message in step.messages]
        if self.schedule.overlap:
            groups = [self.schedule.channels[channel(pp.rank, message, pp.size)] for message in step.messages]
            works = [p2p.isend(op.x, group, op.to) if isinstance(op, p2p.Send) else p2p.irecv(op.out, group, op.source)
                     for op, group in zip(ops, groups, strict=True)]
        else:
            works = [p2p.exchange(ops, pp)] * len(ops)
        for (action, is_send), op, work in zip(step.messages, ops, works):
            if is_send:
                self.under_way.append((work, op.x))
            else:
                self.arrivals[action] = _Arrival(op.out, work)
        while len(self.under_way) > MOST_SENDS:
            self.under_way.pop(0)[0].wait()

    def _op(self, message: Message) -> p2p.Send | p2p.Receive:
        action, pp, chunks = message.action, self.schedule.pp, self.schedule.num_chunks
        if message.is_send:
            return p2p.Send(self.outgoing.pop(action), target(pp.rank, action, pp.size, chunks)[0])
        shape, dtype = self.work.specs[action.chunk] if action.kind == FORWARD else self.edges[action.chunk, action.microbatch][1]
        buffer = torch.empty(shape, dtype=dtype, device=self.schedule.device)
        return p2p.Receive(buffer, source(pp.rank, action, pp.size, chunks)[0])

    def _arrived(self, action: Action) -> Tensor | None:
        arrival = self.arrivals.pop(action, None)
        if arrival is None:
            return None
        with self.work.timer("forward-recv" if action.kind == FORWARD else "backward-recv"):
            arrival.work.wait()
        return arrival.buffer

    def forward(self, action: Action) -> None:
        """Run a chunk forward."""
        x = self._arrived(action)
        with self.work.timer("forward-compute"):
            self._forward(action, x)

    def backward(self, action: Action) -> None:
        """Run a chunk backward; with queues and apart, all but the weight gradients."""
        grad = self._arrived(action)
        with self.work.timer("backward-compute"):
            self._backward(action, grad)

    def pair(self, step: Pair) -> None:
        """Run one chunk forward and one backward, taking turns."""
        x, grad = self._arrived(step.forward), self._arrived(step.backward)
        with self.work.timer("forward-backward-compute"):
            self.schedule.pairs.run(lambda: self._forward(step.forward, x), lambda: self._backward(step.backward, grad))

    def _forward(self, action: Action, x: Tensor | None) -> None:
        work, key = self.work, (action.chunk, action.microbatch)
        if x is not None and not work.forward_only:
            self.leaves[key] = x.requires_grad_()
        output, result = work.forward_step(action.chunk, action.microbatch, x)
        if self._sends(action):
            self.outgoing[action] = output.detach().contiguous()
        else:
            self.results[action.microbatch] = result
        if not work.forward_only:
            if not output.requires_grad:  # all of this chunk is frozen
                output = output.detach().requires_grad_()
            self.edges[key] = get_gradient_edge(output), (tuple(output.shape), output.dtype)

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        work, key = self.work, (action.chunk, action.microbatch)
        edge, (shape, dtype) = self.edges.pop(key)
        if grad is None:
            scale = work.grad_scale
            grad = (scale.to(dtype) if isinstance(scale, Tensor) else torch.full((), scale, dtype=dtype, device=self.schedule.device)).expand(shape)
        queue = None if self.schedule.queues is None else self.schedule.queues[action.chunk]
        with self._reduction(action):
            with _active(queue):
                torch.autograd.backward((edge,), (grad,))
            if queue is not None and self.schedule.apart:
                self.pending[key] = queue.take()
            elif queue is not None:
                queue.run()
        leaf = self.leaves.pop(key, None)
        if leaf is not None:
            self.outgoing[action] = leaf.grad.contiguous()

    def weight_grads(self, action: Action) -> None:
        """Compute the weight gradients that a backward left."""
        with self._reduction(action), self.work.timer("backward-compute"):
            self.pending.pop((action.chunk, action.microbatch)).run()

    def _reduction(self, action: Action) -> contextlib.AbstractContextManager:
        """Gradients of a chunk are reduced with its last microbatch."""
        last = action.microbatch == self.work.num_microbatches - 1
        return contextlib.nullcontext() if last else self.work.accumulate()

    def _sends(self, action: Action) -> bool:
        pp = self.schedule.pp
        return target(pp.rank, action, pp.size, self.schedule.num_chunks) is not None

    def finish(self) -> list[Result]:
        """Wait for the last sends; returns the results."""
        for work, _ in self.under_way:
            work.wait()
        assert not (self.arrivals or self.outgoing or self.edges or self.leaves or self.pending), "the program ended too early"
        return [self.results[index] for index in sorted(self.results)]


@contextlib.contextmanager
def _active(queue: WeightGradQueue | None):
    """Inside, layers leave their weight gradients in the queue."""
    if queue is not None:
        queue.active = True
    try:
        yield
    finally:
        if queue is not None:
            queue.active = False


def choose(kind: str | None, pp: Group, num_chunks: int, device: torch.device, *, second: Group | None = None, group_size: int | None = None,
           overlap: bool = False, queues: Sequence[WeightGradQueue | None] | None = None, head_lag: int | None = None,
           baton: Baton | None = None) -> Schedule:
    """Build a schedule: "1f1b", "interleaved" or "zero-bubble"; None: by the number of chunks per rank.

    group_size: microbatches that a virtual stage runs in a row; None: the pipeline size. queues: needed by "zero-bubble".
    head_lag: the last chunk's queue holds the output layer's gradients only, of so many microbatches at most (0: of all).
    baton: that the model's layers pass; forwards and backwards run in pairs.
    """
    kind = kind or ("1f1b" if num_chunks == 1 else "interleaved")
    assert kind == "zero-bubble" or (kind == "interleaved") == (num_chunks > 1), f"{kind} with {num_chunks} chunks on a rank"

    def orders(num_microbatches: int) -> list[Order]:
        return orders_of(kind, pp.size, num_chunks, num_microbatches, group_size=group_size, pairs=baton is not None, head_lag=head_lag)

    apart = kind == "zero-bubble" or head_lag is not None
    assert not apart or queues is not None, f"{kind}, head_lag {head_lag}: without queues"
    costs = Costs(backward=1.0) if kind == "zero-bubble" else Costs(weight=0.1)
    pairs = None if baton is None else Pairs(baton, device)
    return Schedule(orders, pp, num_chunks, device, second=second, overlap=overlap, queues=queues, apart=apart, costs=costs, pairs=pairs)

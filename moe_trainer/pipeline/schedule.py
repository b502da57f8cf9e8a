"""Executes a pipeline schedule: runs the microbatches of an iteration through this rank's chunks of the model.

A `Schedule` is built once. `run` executes the rank's program (p2p_program.py) with a callable of the
caller:

    forward_step(chunk, microbatch, x) -> (output, result)

chunk is a local index, x the output of the previous chunk or None on the first chunk of the model. On the last chunk
output is the scalar loss, and result is returned to the caller; elsewhere result is ignored. Shapes are known in
advance (`Spec`), so no messages carry them.

docs/design/pipeline.md describes memory and messages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moe_trainer.parallel import collectives, p2p
from moe_trainer.parallel.overlap_threads import AlternatingExecutor
from moe_trainer.parallel.state import Group
from moe_trainer.parallel.weight_grads import PendingGrads, WeightGradQueue
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.p2p_program import Message, P2PBatch, channel, program
from moe_trainer.pipeline.simulate import (
    BACKWARD,
    FORWARD,
    Action,
    Order,
    Pair,
    UniformCosts,
    step_actions,
    target,
)

Result = TypeVar("Result")
Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what a chunk receives."""
ForwardStep = Callable[[int, int, Tensor | None], tuple[Tensor, Result]]
NamedContext = Callable[[str], contextlib.AbstractContextManager]
PairRunner = Callable[[Callable[[], None], Callable[[], None]], None]
MAX_INFLIGHT_SENDS = 2


@dataclass(frozen=True)
class ScheduleInputs(Generic[Result]):
    """Inputs of one run of a schedule.

    Args:
        spec: of local chunk and microbatch, shape and dtype of the input (not called for the first chunk of the model).
        grad_scale: factor of each loss in the gradient (loss_scale * cp / num_microbatches, or loss_scale per token).
        accumulate: context of backwards that must not reduce gradients.
        timer: context of a phase by its name.
        mark: context of one action by a name with its microbatch and chunk.
        forward_only: run no backward; forward_step should not build graphs.
    """

    forward_step: ForwardStep
    num_microbatches: int
    spec: Callable[[int, int], Spec]
    grad_scale: float | Tensor = 1.0
    accumulate: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    timer: NamedContext = lambda name: contextlib.nullcontext()
    mark: NamedContext = lambda name: contextlib.nullcontext()
    forward_only: bool = False


class FwdBwdPairRunner:
    """Runs forward-backward pairs (--overlap-moe-expert-parallel-comm); all forwards run in one separate thread.

    The passes alternate (parallel/overlap_threads.py) wherever tokens are exchanged between expert-parallel ranks:
    while one communicates, the other computes. With --delay-wgrad-compute the weight gradients are computed at the same
    points. docs/design/pipeline.md discusses streams and alternatives.
    """

    def __init__(self, overlap_executor: AlternatingExecutor, device: torch.device):
        self.overlap_executor = overlap_executor
        self._device = device
        self._executor = ThreadPoolExecutor(1, "forward", torch.set_num_threads, (torch.get_num_threads(),))

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both passes to completion; raises what one of them raises."""
        self.overlap_executor.run(
            forward if self._device.type == "cpu" else self._on_stream(forward), backward, self._executor
        )

    def _on_stream(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Run `forward` on the device and stream of the calling thread, which are per thread."""
        stream = torch.cuda.current_stream(self._device)

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                forward()

        return run


def run_in_turn(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    """Run the two passes of a pair one after the other."""
    forward()
    backward()


class Schedule:
    """Schedule of one rank.

    Args:
        second: the ranks of pp on another communicator, for half of the overlapped messages.
        overlap: receive while computing.
        queues: by local chunk, the queue of deferred weight gradients; schedules that split backwards and head_lag
            require them. With head_lag the last chunk's queue holds the output layer's gradients only.
        run_pair: runs the forward and the backward of a pair.

    Attributes:
        orders: returns the orders of all ranks for a number of microbatches.
    """

    def __init__(
        self,
        kind: ScheduleKind,
        pp: Group,
        device: torch.device,
        *,
        second: Group | None = None,
        overlap: bool = False,
        queues: Mapping[int, WeightGradQueue] = MappingProxyType({}),
        run_pair: PairRunner = run_in_turn,
    ):
        name, splits = kind.schedule.key, kind.schedule.splits_backward
        assert kind.schedule.runs(kind.num_chunks), f"{name} with {kind.num_chunks} chunks on a rank"
        assert not splits or len(queues) == kind.num_chunks, f"{name}: every chunk needs a queue"
        self.orders: Callable[[int], list[Order]] = functools.partial(kind.orders, pp.size)
        self.kind, self.pp, self.channels, self.device = kind, pp, (pp, second or pp), device
        self.overlap, self.queues, self.run_pair = overlap, queues, run_pair
        # for the simulation that orders messages
        self._costs = UniformCosts(backward=1.0) if splits else UniformCosts(weight=0.1)
        self._programs: dict[tuple[int, bool], list[Action | Pair | P2PBatch]] = {}
        self._is_connected = False

    def run(self, work: ScheduleInputs[Result]) -> list[Result]:
        """Run all microbatches.

        Returns:
            The results of the last chunk of the model by microbatch; [] on other ranks.

        Raises:
            ValueError: the schedule cannot run this number of microbatches.
        """
        if not self._is_connected:
            collectives.barrier(self.pp)  # NCCL: the first communication of a group must involve all its members
            self._is_connected = True
        execution = _Execution(self, work)
        for step in self.program(work.num_microbatches, work.forward_only):
            if isinstance(step, P2PBatch):
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

    def program(self, num_microbatches: int, forward_only: bool) -> list[Action | Pair | P2PBatch]:
        """Return this rank's actions and messages in order."""
        assert num_microbatches >= 1, f"num_microbatches {num_microbatches}"
        key = (num_microbatches, forward_only)
        if key not in self._programs:
            orders = self.orders(num_microbatches)
            if forward_only:
                orders = [
                    tuple(action for step in order for action in step_actions(step) if action.kind == FORWARD)
                    for order in orders
                ]
            # a batch-size schedule uses many numbers; only the last two programs (training, evaluation) are cached
            self._programs = dict([*self._programs.items()][-1:])
            self._programs[key] = program(orders, self.kind.num_chunks, self.pp.rank, int(self.overlap), self._costs)
        return self._programs[key]


@dataclass
class _Arrival:
    buffer: Tensor
    work: Any


@dataclass
class _Execution(Generic[Result]):
    """State of one run: received inputs, graphs that wait for their backward, messages in flight."""

    schedule: Schedule
    work: ScheduleInputs[Result]
    arrivals: dict[Action, _Arrival] = field(default_factory=dict)
    leaves: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    edges: dict[tuple[int, int], tuple[GradientEdge, Spec]] = field(default_factory=dict)
    outgoing: dict[Action, Tensor] = field(default_factory=dict)
    in_flight: list[tuple[Any, Tensor]] = field(default_factory=list)
    pending: dict[tuple[int, int], PendingGrads] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)

    def launch(self, step: P2PBatch) -> None:
        """Start messages."""
        pp, ops = self.schedule.pp, [self._op(message) for message in step.messages]
        if self.schedule.overlap:
            groups = [self.schedule.channels[channel(pp.rank, message, pp.size)] for message in step.messages]
            works = [
                p2p.isend(op.x, group, op.peer) if isinstance(op, p2p.Send) else p2p.irecv(op.x, group, op.peer)
                for op, group in zip(ops, groups, strict=True)
            ]
        else:
            works = [p2p.exchange(ops, pp)] * len(ops)
        for message, op, work in zip(step.messages, ops, works):
            if isinstance(op, p2p.Send):
                self.in_flight.append((work, op.x))
            else:
                self.arrivals[message.action] = _Arrival(op.x, work)
        while len(self.in_flight) > MAX_INFLIGHT_SENDS:
            self.in_flight.pop(0)[0].wait()

    def _op(self, message: Message) -> p2p.Send | p2p.Receive:
        action = message.action
        if message.is_send:
            return p2p.Send(self.outgoing.pop(action), message.peer)
        shape, dtype = (
            self.work.spec(action.chunk, action.microbatch)
            if action.kind == FORWARD
            else self.edges[action.chunk, action.microbatch][1]
        )
        return p2p.Receive(torch.empty(shape, dtype=dtype, device=self.schedule.device), message.peer)

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
            self._forward_marked(action, x)

    def backward(self, action: Action) -> None:
        """Run a chunk backward, without the weight gradients if W actions compute them."""
        grad = self._arrived(action)
        with self.work.timer("backward-compute"):
            self._backward_marked(action, grad)

    def pair(self, step: Pair) -> None:
        """Run one chunk forward and one backward, alternating."""
        x, grad = self._arrived(step.forward), self._arrived(step.backward)
        with self.work.timer("forward-backward-compute"):
            self.schedule.run_pair(
                lambda: self._forward_marked(step.forward, x), lambda: self._backward_marked(step.backward, grad)
            )

    def _mark(self, what: str, action: Action) -> contextlib.AbstractContextManager:
        return self.work.mark(f"{what} microbatch {action.microbatch + 1} chunk {action.chunk}")

    def _forward_marked(self, action: Action, x: Tensor | None) -> None:
        with self._mark("forward", action):
            self._forward(action, x)

    def _backward_marked(self, action: Action, grad: Tensor | None) -> None:
        with self._mark("backward", action):
            self._backward(action, grad)

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
            if not output.requires_grad:  # the complete chunk is frozen
                output = output.detach().requires_grad_()
            self.edges[key] = get_gradient_edge(output), (tuple(output.shape), output.dtype)

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        work, key = self.work, (action.chunk, action.microbatch)
        edge, (shape, dtype) = self.edges.pop(key)
        if grad is None:
            scale = work.grad_scale
            grad = (
                scale.to(dtype)
                if isinstance(scale, Tensor)
                else torch.full((), scale, dtype=dtype, device=self.schedule.device)
            ).expand(shape)
        queue = self.schedule.queues.get(action.chunk)
        with self._reduction(action):
            with _active(queue):
                torch.autograd.backward((edge,), (grad,))
            if queue is not None and self.schedule.kind.has_wgrad_actions:
                self.pending[key] = queue.take()
            elif queue is not None:
                queue.run()
        leaf = self.leaves.pop(key, None)
        if leaf is not None:
            assert leaf.grad is not None
            self.outgoing[action] = leaf.grad.contiguous()

    def weight_grads(self, action: Action) -> None:
        """Compute the weight gradients that a backward deferred."""
        with self._reduction(action), self.work.timer("backward-compute"), self._mark("weight gradients", action):
            self.pending.pop((action.chunk, action.microbatch)).run()

    def _reduction(self, action: Action) -> contextlib.AbstractContextManager:
        """Return the context of a backward: gradients of a chunk are reduced with its last microbatch."""
        last = action.microbatch == self.work.num_microbatches - 1
        return contextlib.nullcontext() if last else self.work.accumulate()

    def _sends(self, action: Action) -> bool:
        pp = self.schedule.pp
        return target(pp.rank, action, pp.size, self.schedule.kind.num_chunks) is not None

    def finish(self) -> list[Result]:
        """Wait for the last sends and return the results."""
        for work, _ in self.in_flight:
            work.wait()
        assert not (self.arrivals or self.outgoing or self.edges or self.leaves or self.pending), (
            "the program ended too early"
        )
        return [self.results[index] for index in sorted(self.results)]


@contextlib.contextmanager
def _active(queue: WeightGradQueue | None):
    """Defer the weight gradients of layers to the queue inside the context."""
    if queue is not None:
        queue.active = True
    try:
        yield
    finally:
        if queue is not None:
            queue.active = False

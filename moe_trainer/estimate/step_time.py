"""Seconds of one iteration: passes of all chunks in the schedule's order, then gradients, optimizer and parameters.

Every action of a rank's order costs what its chunk's layers cost (layer_time.py); the simulated schedule of all ranks (pipeline/simulate.py) gives
the makespan, and what the busiest rank waits in it is the bubble. Where forward and backward run as a pair, most of the exchange of tokens runs beside
the computation of the other, and takes multiprocessors from it. A steady state repeats itself, so a few microbatches are played and the
rest is extrapolated, exactly.

Reductions of gradients and gathers of parameters are hidden by the backward of the last microbatch and the forward of the first where the
flags say so. The optimizer is traffic of memory: states are read and written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arguments.layer_pattern import mtp_is_moe
from arguments.stage_layout import ChunkLayout, chunk_layouts, parallel_sizes
from moe_trainer.estimate.interconnect import Interconnect
from moe_trainer.estimate.layer_time import LayerTime, PassTime
from moe_trainer.estimate.memory import ChunkBytes, StageMemory, stage_orders, steady_state_microbatches
from moe_trainer.estimate.state_bytes import StateBytes, state_bytes
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, Action, simulate_schedule, step_actions

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware

OVERLAPPED_EXCHANGE_SHARE = 0.93
"""Of the exchange of tokens, beside the other pass of a pair (arXiv 2603.07685, section 4.2.2)."""
EXCHANGE_SMS = 20
"""Multiprocessors that the exchange takes while it runs, unless --moe-flex-dispatcher-num-sms says so (DeepEP's default)."""
HOST_ADAM = 50e9
"""Bytes/s at which a rank's share of the host updates offloaded states: an eighth of two sockets' memory bandwidth."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an iteration by cause, on the busiest pipeline rank. exchange, tensor, context, pipeline, data: exposed communication
    of expert, tensor, context, pipeline and data parallelism; host: between iterations."""

    compute: float
    exchange: float
    tensor: float
    context: float
    pipeline: float
    data: float
    bubble: float
    optimizer: float
    host: float

    @property
    def step(self) -> float:
        """All of it."""
        return (
            self.compute
            + self.exchange
            + self.tensor
            + self.context
            + self.pipeline
            + self.data
            + self.bubble
            + self.optimizer
            + self.host
        )


@dataclass
class ActionTimes:
    """Costs of actions by rank and chunk. passes: [rank][chunk] -> forward, backward. message: exposed, of a pass. taken: share of
    multiprocessors that an exchange leaves less."""

    passes: Sequence[Sequence[tuple[PassTime, PassTime]]]
    message: float
    taken: float
    weight_apart: bool = False
    _spent: dict[tuple, PassTime] = field(default_factory=dict)

    def spent(self, rank: int, actions: tuple[Action, ...]) -> PassTime:
        """What these actions cost by cause; a pair hides its exchange."""
        key = (rank, *((action.kind, action.chunk) for action in actions))
        if key not in self._spent:
            total = PassTime()
            for action in actions:
                forward, backward = self.passes[rank][action.chunk]
                if self.weight_apart:  # half of a backward's products
                    backward = (
                        backward.scale(0.5)
                        if action.kind != BACKWARD
                        else PassTime(backward.compute / 2, backward.exchange, backward.tensor, backward.context)
                    )
                    backward = PassTime(backward.compute) if action.kind not in (FORWARD, BACKWARD) else backward
                total += forward if action.kind == FORWARD else backward
            if len(actions) > 1:
                hidden = min(OVERLAPPED_EXCHANGE_SHARE * total.exchange, total.compute)
                total = PassTime(
                    total.compute + hidden * self.taken, total.exchange - hidden, total.tensor, total.context
                )
            self._spent[key] = total
        return self._spent[key]

    def of(self, rank: int, actions: tuple[Action, ...]) -> float:
        """Seconds of these actions."""
        return self.spent(rank, actions).total + self.message * len(actions)


def chunk_passes(times: LayerTime, layout: ChunkLayout) -> tuple[PassTime, PassTime]:
    """Forward and backward of a chunk."""
    pattern, model = times.sizes.pattern, times.args.model
    kinds = [pattern[number] for number in layout.layers] + [mtp_is_moe(pattern)] * (
        model.mtp_num_layers or 0 if layout.mtp else 0
    )
    forward, backward = PassTime(), PassTime()
    for kind in sorted(set(kinds)):
        fwd, bwd = times.passes(kind)
        forward, backward = forward + fwd.scale(kinds.count(kind)), backward + bwd.scale(kinds.count(kind))
    if layout.mtp:
        projection = model.mtp_num_layers * times.mtp_projection()
        forward, backward = forward + PassTime(projection), backward + PassTime(2 * projection)
    if layout.has_loss:
        head, bwd = times.head()
        forward, backward = forward + PassTime(head), backward + PassTime(bwd)
    away = times.sizes.of(layout)
    copies = sum(count for (_, on_host), count in away.items() if on_host) / (times.hardware.host_gb_s * 1e9)
    return (
        PassTime(max(forward.compute, copies), forward.exchange, forward.tensor, forward.context),
        PassTime(max(backward.compute, copies), backward.exchange, backward.tensor, backward.context),
    )


def exchange_slowdown(args: Arguments, hardware: Hardware) -> float:
    """How much longer computation takes while tokens are exchanged: multiprocessors that are taken from it, of those that are left.

    Raises: ValueError where none are left.
    """
    sms = args.moe.moe_flex_dispatcher_num_sms
    if sms is None:
        sms = min(EXCHANGE_SMS, hardware.num_sms // 2)
    if sms >= hardware.num_sms:
        raise ValueError(
            f"--moe-flex-dispatcher-num-sms {sms}: {hardware.name} has {hardware.num_sms} multiprocessors, and "
            "computation needs some too"
        )
    return sms / (hardware.num_sms - sms)


def plan_step(
    args: Arguments,
    world_size: int,
    vocab_rows: int,
    num_microbatches: int,
    memory: Sequence[StageMemory],
    hardware: Hardware,
) -> StepTime:
    """The time of one iteration. memory: of all stages (estimate/memory.py), for what each holds."""
    times = LayerTime(args, Interconnect(hardware), ChunkBytes(args, vocab_rows))
    layouts = chunk_layouts(args.model, args.parallel)
    kinds = {layout: chunk_passes(times, layout) for layout in {chunk for chunks in layouts for chunk in chunks}}
    optimizer = max(optimizer_seconds(args, world_size, stage, hardware) for stage in memory)
    host = 0.0 if args.training.cuda_graph_impl == "full_iteration" else times.constants.iteration
    passes = [[kinds[chunk] for chunk in chunks] for chunks in layouts]
    return step_from_passes(args, world_size, times.sizes, num_microbatches, memory, hardware, passes, optimizer, host)


def step_from_passes(
    args: Arguments,
    world_size: int,
    sizes: ChunkBytes,
    num_microbatches: int,
    memory: Sequence[StageMemory],
    hardware: Hardware,
    passes: Sequence[Sequence[tuple[PassTime, PassTime]]],
    optimizer: float,
    host: float,
) -> StepTime:
    """The time of an iteration whose passes cost this: [pipeline rank][chunk] -> forward, backward. optimizer, host: seconds of these."""
    parallel, links, pp = args.parallel, Interconnect(hardware), args.parallel.pipeline_model_parallel_size
    message = 0.0
    if pp > 1 and not parallel.overlap_p2p_comm:
        message = links.message(sizes.rows * args.model.hidden_size * sizes.size, world_size // pp)
    clock = ActionTimes(passes, message, exchange_slowdown(args, hardware), parallel.pipeline_schedule == "zero-bubble")
    makespan, busy, spent = _play(args, clock, num_microbatches, len(passes[0]))
    rank = max(range(pp), key=lambda number: busy[number])
    window = sum((forward + backward for forward, backward in clock.passes[rank]), PassTime())
    messages = 2 * len(passes[0]) * num_microbatches * message
    data = _data_parallel(
        args, world_size, memory[rank], links, clock.passes[rank], window, num_microbatches, sizes.size
    )
    return StepTime(
        spent[rank].compute,
        spent[rank].exchange,
        spent[rank].tensor,
        spent[rank].context,
        messages,
        data,
        max(0.0, makespan - busy[rank]),
        optimizer,
        host,
    )


def _play(
    args: Arguments, clock: ActionTimes, num_microbatches: int, num_chunks: int
) -> tuple[float, list[float], list[PassTime]]:
    """(makespan, seconds that each rank works, what it spends them on) of all microbatches."""
    few = steady_state_microbatches(args, num_microbatches)
    first = _played(args, clock, few, num_chunks)
    if few == num_microbatches:
        return first
    group = args.parallel.microbatch_group_size_per_vp_stage or args.parallel.pipeline_model_parallel_size
    second = _played(args, clock, few + group, num_chunks)
    rounds = (num_microbatches - few) / group
    return (
        first[0] + rounds * (second[0] - first[0]),
        [a + rounds * (b - a) for a, b in zip(first[1], second[1])],
        [a + (b + a.scale(-1.0)).scale(rounds) for a, b in zip(first[2], second[2])],
    )


def _played(
    args: Arguments, clock: ActionTimes, num_microbatches: int, num_chunks: int
) -> tuple[float, list[float], list[PassTime]]:
    ways = stage_orders(args, num_microbatches)
    ends = simulate_schedule(ways, num_chunks, clock)
    busy, spent = [], []
    for rank, way in enumerate(ways):
        counts = Counter(tuple((action.kind, action.chunk) for action in step_actions(step)) for step in way)
        kinds = {kind: tuple(Action(*each, 0) for each in kind) for kind in counts}
        spent.append(sum((clock.spent(rank, kinds[kind]).scale(count) for kind, count in counts.items()), PassTime()))
        busy.append(sum(clock.of(rank, kinds[kind]) * count for kind, count in counts.items()))
    return max(end for each in ends for end in each.values()), busy, spent


def _data_parallel(
    args: Arguments,
    world_size: int,
    stage: StageMemory,
    links: Interconnect,
    passes: Sequence[tuple[PassTime, PassTime]],
    window: PassTime,
    num_microbatches: int,
    size: int,
) -> float:
    """Exposed seconds of reducing gradients and gathering parameters."""
    parallel, mapping = args.parallel, parallel_sizes(args)
    dense = max(1, world_size // (mapping["tp"] * mapping["pp"]))
    edp = max(1, world_size // (mapping["etp"] * mapping["ep"] * mapping["pp"]))
    narrow = gradient_wire_bytes(args)
    reduce = gather = 0.0
    for held, stride, ranks in (
        (stage.held.dense, mapping["tp"], dense),
        (stage.held.expert, mapping["etp"] * mapping["ep"], edp),
    ):
        reduce += links.ring(held * narrow, stride, ranks)
        gather += links.ring(held * size, stride, ranks)
    if parallel.fsdp_strategy not in (None, "no_shard"):
        each = reduce + (2 if parallel.fsdp_strategy == "optim_grads_params" else 0) * gather
        return num_microbatches * max(0.0, each - window.compute)
    if not parallel.use_distributed_optimizer:
        gather = reduce  # the other half of an all-reduce
    forward = sum(pair[0].compute for pair in passes)
    backward = sum(pair[1].compute for pair in passes)
    exposed = max(0.0, reduce - backward) if parallel.overlap_grad_reduce else reduce
    return exposed + (max(0.0, gather - forward) if parallel.overlap_param_gather else gather)


def gradient_wire_bytes(args: Arguments) -> float:
    """Bytes of a gradient's element on the wire."""
    narrow = args.precision.grad_reduce_in_bf16 or args.optimizer.main_grads_dtype == "bf16"
    return 2.0 if narrow and args.precision.bf16 else 4.0


def optimizer_seconds(args: Arguments, world_size: int, stage: StageMemory, hardware: Hardware) -> float:
    """Seconds of the update: what it reads and writes, on the device and on the host."""
    memory = hardware.hbm_tb_s * 1e12 * hardware.constants.update
    seconds = 0.0
    for kind, held in (("dense", stage.held.dense), ("expert", stage.held.expert)):
        each: StateBytes = state_bytes(args, world_size, kind)
        states = each.main_params + each.moments
        shard = states / (4.0 + 8.0) if states else 1.0  # of the parameters, roughly, that this rank updates
        seconds += (
            held * (2 * (states - each.host) + shard * (2 * each.gradients + each.weights) + each.gradients) / memory
        )
        if args.optimizer.optimizer_cpu_offload:
            seconds += held * max(2.5 * each.host / HOST_ADAM, shard * 6.0 / (hardware.host_gb_s * 1e9))
        elif each.host:
            seconds += held * each.host / (hardware.host_gb_s * 1e9)  # there and back at the same time
    return seconds

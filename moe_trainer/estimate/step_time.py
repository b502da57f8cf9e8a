"""Seconds of one iteration: passes of all chunks in the schedule's order, then gradients, optimizer and parameters.

Every action of a rank costs what its chunk's layers cost (layer_time.py). The simulated schedule of all ranks
(pipeline/simulate.py) gives the makespan; the time that the busiest rank waits in it is the bubble. Where forward and
backward run as a pair, most of the token exchange overlaps the computation of the other, and takes multiprocessors from
it. The steady state repeats, so a few microbatches are simulated and the rest is extrapolated exactly.

The backward of the last microbatch overlaps gradient reductions, and the forward of the first overlaps parameter
gathers, if the flags say so. The optimizer step is memory traffic: states are read and written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

from arguments.layer_pattern import mtp_layer_pattern
from arguments.mechanisms.schedules import get_schedule
from arguments.mechanisms.shardings import get_sharding
from arguments.stage_layout import ChunkLayout, chunk_layouts, parallel_sizes
from moe_trainer.estimate.corrections import correction
from moe_trainer.estimate.interconnect import Interconnect
from moe_trainer.estimate.layer_time import LayerTime, PassTime
from moe_trainer.estimate.memory import ChunkBytes, StageMemory, stage_orders, steady_state_microbatches
from moe_trainer.estimate.parameters import ParamsPerRank
from moe_trainer.estimate.state_bytes import state_bytes
from moe_trainer.estimate.static_memory import matrices_only, quantized_params_on_rank, trained_params
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, WEIGHT, Action, simulate_schedule, step_actions

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware

OVERLAPPED_EXCHANGE_SHARE = 0.93
"""Share of the token exchange that the other pass of a pair overlaps (arXiv 2603.07685, section 4.2.2)."""
EXCHANGE_SMS = 20
"""Multiprocessors that the exchange occupies without --moe-flex-dispatcher-num-sms (DeepEP's default)."""
HOST_ADAM = 50e9
"""Bytes/s at which a rank's share of the host updates offloaded states: an eighth of two sockets' memory bandwidth."""


PARTS = (
    ("compute", "computation"),
    ("exchange", "expert exchange, exposed"),
    ("tensor", "tensor parallel, exposed"),
    ("context", "context parallel, exposed"),
    ("pipeline", "pipeline messages, exposed"),
    ("data", "gradients and parameters, exposed"),
    ("bubble", "pipeline bubble"),
    ("optimizer", "optimizer"),
    ("host", "between iterations"),
)
"""Fields of StepTime, as texts."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an iteration by cause, on the busiest pipeline rank.

    `exchange`, `tensor`, `context`, `pipeline` and `data` are exposed communication of expert, tensor, context,
    pipeline and data parallelism; `host` is the time between iterations.
    """

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
        """Seconds of the full iteration."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass
class ActionTimes:
    """Costs of actions by rank and chunk.

    Attributes:
        passes: [rank][chunk] -> forward, backward.
        message: exposed seconds of a pass's pipeline message.
        slowdown: of computation while tokens are exchanged.
        has_wgrad_actions: all weight gradients are separate actions.
        head_wgrad: seconds of the output layer's weight gradient, if only that is a separate action.
    """

    passes: Sequence[Sequence[tuple[PassTime, PassTime]]]
    message: float
    slowdown: float
    has_wgrad_actions: bool = False
    head_wgrad: float = 0.0
    _spent: dict[tuple, PassTime] = field(default_factory=dict)

    def spent(self, rank: int, actions: tuple[Action, ...]) -> PassTime:
        """Return what these actions cost by cause; a pair overlaps its exchange."""
        key = (rank, *((action.kind, action.chunk) for action in actions))
        if key not in self._spent:
            total = PassTime()
            for action in actions:
                forward, backward = self.passes[rank][action.chunk]
                weight = backward.compute / 2  # half of a backward's GEMMs
                if not self.has_wgrad_actions:
                    is_last = rank == len(self.passes) - 1 and action.chunk == len(self.passes[rank]) - 1
                    weight = self.head_wgrad if is_last else 0.0
                backward = replace(backward, compute=backward.compute - weight)
                total += {FORWARD: forward, BACKWARD: backward, WEIGHT: PassTime(weight)}[action.kind]
            if len(actions) > 1:
                hidden = min(OVERLAPPED_EXCHANGE_SHARE * total.exchange, total.compute)
                compute = total.compute + hidden * self.slowdown
                total = replace(total, compute=compute, exchange=total.exchange - hidden)
            self._spent[key] = total
        return self._spent[key]

    def of(self, rank: int, actions: tuple[Action, ...]) -> float:
        """Return the seconds of these actions; weight gradients send no message."""
        return self.spent(rank, actions).total + self.message * sum(action.kind != WEIGHT for action in actions)


def chunk_passes(times: LayerTime, layout: ChunkLayout) -> tuple[PassTime, PassTime]:
    pattern, model = times.sizes.pattern, times.args.model
    depths = model.num_mtp_depths if layout.mtp else 0
    ahead = mtp_layer_pattern(pattern, model.hybrid_layer_pattern)
    kinds = [pattern[number] for number in layout.layers] + [*ahead] * depths
    forward, backward = PassTime(), PassTime()
    for kind in sorted(set(kinds)):
        fwd, bwd = times.passes(kind)
        forward, backward = forward + fwd.scale(kinds.count(kind)), backward + bwd.scale(kinds.count(kind))
    if layout.mtp:
        projection = depths * times.mtp_projection()
        forward, backward = forward + PassTime(projection), backward + PassTime(2 * projection)
    if layout.has_loss:
        head, head_backward = times.head()
        forward, backward = forward + PassTime(head), backward + PassTime(head_backward)
    saved = times.sizes.of(layout)
    copies = sum(count for (_, on_host), count in saved.items() if on_host) / (times.hardware.host_gb_s * 1e9)
    forward, backward = (replace(each, compute=max(each.compute, copies)) for each in (forward, backward))
    return forward, backward


def exchange_slowdown(args: Arguments, hardware: Hardware) -> float:
    """Return how much longer computation takes during the token exchange: occupied over free multiprocessors.

    Raises:
        ValueError: if none are free.
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
    attention_length: float | None = None,
    factor: float | None = None,
) -> StepTime:
    """Return the time of one iteration.

    Args:
        memory: of all stages, for their parameters.
        attention_length: see LayerTime.
        factor: of the time of all passes; None for what published runs say (corrections.py).
    """
    times = LayerTime(args, Interconnect(hardware), ChunkBytes(args, vocab_rows), attention_length)
    optimizer = max(optimizer_seconds(args, world_size, stage, hardware) for stage in memory)
    host = 0.0 if args.training.cuda_graph_impl == "full_iteration" else times.constants.iteration
    deferred = _deferred_head(times, factor)
    actions = action_times(args, world_size, times.sizes, hardware, _all_passes(times, factor), deferred)
    return step_from_actions(
        args, world_size, times.sizes, num_microbatches, memory, hardware, actions, optimizer, host
    )


def plan_actions(
    args: Arguments, world_size: int, vocab_rows: int, hardware: Hardware, attention_length: float | None = None
) -> ActionTimes:
    """Return the costs of all actions of the schedule, from which `plan_step` gets the time of an iteration."""
    times = LayerTime(args, Interconnect(hardware), ChunkBytes(args, vocab_rows), attention_length)
    return action_times(args, world_size, times.sizes, hardware, _all_passes(times), _deferred_head(times))


def _deferred_head(times: LayerTime, factor: float | None = None) -> float:
    if not times.args.parallel.has_deferred_head_wgrad:
        return 0.0
    return times.head_weight_gradient() * (correction(times.args, times.hardware) if factor is None else factor)


def _all_passes(times: LayerTime, factor: float | None = None) -> list[list[tuple[PassTime, PassTime]]]:
    """Return [pipeline rank][chunk] -> forward, backward."""
    layouts = chunk_layouts(times.args.model, times.args.parallel)
    scale = correction(times.args, times.hardware) if factor is None else factor
    kinds = {layout: chunk_passes(times, layout) for layout in {chunk for chunks in layouts for chunk in chunks}}
    scaled = {layout: (forward.scale(scale), backward.scale(scale)) for layout, (forward, backward) in kinds.items()}
    return [[scaled[chunk] for chunk in chunks] for chunks in layouts]


def action_times(
    args: Arguments,
    world_size: int,
    sizes: ChunkBytes,
    hardware: Hardware,
    passes: Sequence[Sequence[tuple[PassTime, PassTime]]],
    head_wgrad: float = 0.0,
) -> ActionTimes:
    """Return the costs of the actions of passes, [pipeline rank][chunk] -> forward, backward.

    `head_wgrad`: seconds of the last backward that are deferred, if any.
    """
    parallel, pp, message = args.parallel, args.parallel.pipeline_model_parallel_size, 0.0
    if pp > 1 and not parallel.overlap_p2p_comm:
        width = args.model.hidden_size * (args.model.num_residual_streams if args.model.enable_hyper_connections else 1)
        message = Interconnect(hardware).message(sizes.rows * width * sizes.size, world_size // pp)
    has_wgrad_actions = get_schedule(parallel).splits_backward
    return ActionTimes(passes, message, exchange_slowdown(args, hardware), has_wgrad_actions, head_wgrad)


def step_from_actions(
    args: Arguments,
    world_size: int,
    sizes: ChunkBytes,
    num_microbatches: int,
    memory: Sequence[StageMemory],
    hardware: Hardware,
    times: ActionTimes,
    optimizer: float,
    host: float,
) -> StepTime:
    """Return the time of an iteration from the costs of its actions; `optimizer` and `host` are seconds."""
    num_chunks = len(times.passes[0])
    makespan, busy, spent = _simulate_all(args, times, num_microbatches, num_chunks)
    rank = max(range(len(times.passes)), key=lambda number: busy[number])
    window = [sum(passes, PassTime()) for passes in zip(*times.passes[rank])]
    messages = 2 * num_chunks * num_microbatches * times.message
    bubble = max(0.0, makespan - busy[rank])
    links = Interconnect(hardware)
    data = _data_parallel(args, world_size, memory[rank], links, window, num_microbatches, sizes.size)
    return StepTime(**vars(spent[rank]), pipeline=messages, data=data, bubble=bubble, optimizer=optimizer, host=host)


def _simulate_all(
    args: Arguments, times: ActionTimes, num_microbatches: int, num_chunks: int
) -> tuple[float, list[float], list[PassTime]]:
    """Return (makespan, busy seconds of each rank, their causes) of all microbatches."""
    few = steady_state_microbatches(args, num_microbatches)
    first = _simulate(args, times, few, num_chunks)
    if few == num_microbatches:
        return first
    group = args.parallel.microbatch_group_size_per_vp_stage or args.parallel.pipeline_model_parallel_size
    second = _simulate(args, times, few + group, num_chunks)
    rounds = (num_microbatches - few) / group
    return (
        first[0] + rounds * (second[0] - first[0]),
        [a + rounds * (b - a) for a, b in zip(first[1], second[1])],
        [a + (b + a.scale(-1.0)).scale(rounds) for a, b in zip(first[2], second[2])],
    )


def _simulate(
    args: Arguments, times: ActionTimes, num_microbatches: int, num_chunks: int
) -> tuple[float, list[float], list[PassTime]]:
    orders = stage_orders(args, num_microbatches)
    ends = simulate_schedule(orders, num_chunks, times)
    busy, spent = [], []
    for rank, order in enumerate(orders):
        counts = Counter(tuple((action.kind, action.chunk) for action in step_actions(step)) for step in order)
        kinds = {kind: tuple(Action(*each, 0) for each in kind) for kind in counts}
        spent.append(sum((times.spent(rank, kinds[kind]).scale(count) for kind, count in counts.items()), PassTime()))
        busy.append(sum(times.of(rank, kinds[kind]) * count for kind, count in counts.items()))
    return max(end for each in ends for end in each.values()), busy, spent


def _data_parallel(
    args: Arguments,
    world_size: int,
    stage: StageMemory,
    links: Interconnect,
    window: Sequence[PassTime],
    num_microbatches: int,
    size: int,
) -> float:
    """Return the exposed seconds of reducing gradients and gathering parameters.

    `window`: forward and backward of one microbatch, which they may overlap.
    """
    parallel, mapping = args.parallel, parallel_sizes(args)
    reduce = gather = 0.0
    chunks = chunk_layouts(args.model, parallel)[stage.stage]
    trained = trained_params(args, chunks, stage.held)
    narrow, width, stored = ParamsPerRank(0, 0), float(size), args.stored_weight_format
    if stored is not None and stored.gathered_bytes is not None:
        width = stored.gathered_bytes
    if width != size:
        narrow = quantized_params_on_rank(matrices_only(args, 1), chunks)  # without the vocabulary
    for num_params, num_narrow, stride in (
        (trained.dense, narrow.dense, mapping["tp"]),
        (trained.expert, narrow.expert, mapping["etp"] * mapping["ep"]),
    ):
        replicas = max(1, world_size // (stride * mapping["pp"]))
        reduce += links.ring(num_params * gradient_wire_bytes(args), stride, replicas)
        gather += links.ring(num_params * size - num_narrow * (size - width), stride, replicas)
    sharding = get_sharding(parallel)
    if sharding.reduces_each_microbatch:
        each = reduce + (2 if sharding.gathers_each_pass else 0) * gather
        return num_microbatches * max(0.0, each - window[0].compute - window[1].compute)
    if not sharding.shards_flat_state:
        gather = reduce  # the other half of an all-reduce
    forward, backward = (passes.compute for passes in window)
    exposed = max(0.0, reduce - backward) if parallel.overlap_grad_reduce else reduce
    return exposed + (max(0.0, gather - forward) if parallel.overlap_param_gather else gather)


def gradient_wire_bytes(args: Arguments) -> float:
    narrow = args.precision.grad_reduce_in_bf16 or args.optimizer.main_grads_dtype == "bf16"
    return 2.0 if narrow and args.precision.bf16 else 4.0


def optimizer_seconds(args: Arguments, world_size: int, stage: StageMemory, hardware: Hardware) -> float:
    """Return the seconds of the update: what it reads and writes, on the device and on the host."""
    memory = hardware.hbm_tb_s * 1e12 * hardware.constants.update
    seconds = 0.0
    trained = trained_params(args, chunk_layouts(args.model, args.parallel)[stage.stage], stage.held)
    parts: tuple[tuple[Literal["dense", "expert"], int], ...] = (("dense", trained.dense), ("expert", trained.expert))
    for kind, num_params in parts:
        each = state_bytes(args, world_size, kind)
        states = each.main_params + each.moments
        shard = states / (4.0 + 8.0) if states else 1.0  # rough share of the parameters that this rank updates
        moved = 2 * (states - each.host) + shard * (2 * each.gradients + each.weights) + each.gradients
        seconds += num_params * moved / memory
        if args.optimizer.optimizer_cpu_offload:
            seconds += num_params * max(2.5 * each.host / HOST_ADAM, shard * 6.0 / (hardware.host_gb_s * 1e9))
        elif each.host:
            seconds += num_params * each.host / (hardware.host_gb_s * 1e9)  # both directions at the same time
    return seconds

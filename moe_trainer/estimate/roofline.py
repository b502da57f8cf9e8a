"""Step time from the operators that a step launches, each at the limit of the device that it meets.

scripts/roofline.py executes a step of one rank of every kind of pipeline stage on the emulated device, at the real
sizes and without computing (tests/emulated_cuda/record_step.py); this module turns the recorded operators into seconds.
An operator takes the longest of

    compute   the FLOPs of a GEMM or of attention, at the rates of the plan (layer_time.py)
    memory    the bytes that it reads and writes, at the fraction of the memory bandwidth that the plan assumes
    launch    the host's time to launch it; nothing inside a CUDA graph

and a wait of the host one latency. Collectives of tensor, context and expert parallelism last as in the plan
(interconnect.py), minus what runs between their start and their end. Pipeline, gradients and parameters are the plan's
too: it gets these passes instead of its own.

Where the emulated device or a single rank cannot follow the flags, the executed step differs from a run: see `notes`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from arguments.layer_pattern import is_linear, moe_layer_pattern, uses_window
from arguments.stage_layout import ChunkLayout, chunk_layouts, parallel_sizes
from moe_trainer.estimate.interconnect import Interconnect, dispatcher_name, exchange_seconds
from moe_trainer.estimate.layer_time import ATTENTION_BACKWARD_RATIO, PassTime, attention_rates, gemm_seconds
from moe_trainer.estimate.memory import ChunkBytes
from moe_trainer.estimate.step_time import StepTime, optimizer_seconds, step_from_passes
from moe_trainer.parallel.grid import make_layout

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware
    from moe_trainer.estimate.plan import Plan

OPERATOR, WAIT, START, FINISH = range(4)
EXECUTED_MICROBATCHES = 3
"""Microbatches that are executed: the first, the last, and one for all between."""
CAUSES = MappingProxyType(
    {
        "tp": "tensor",
        "cp": "context",
        "cp_a2a": "context",
        "cp_p2p": "context",
        "ep": "exchange",
        "etp": "exchange",
        "tp_ep": "exchange",
    }
)
"""Field of PassTime for the groups whose collectives are part of a pass."""
OVERWRITES = ("zero_", "fill_", "copy", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "triton")
"""Operators that write without reading the previous content, as those with out= do."""
GEMMS = tuple(
    "mm addmm addmm_ bmm baddbmm baddbmm_ _grouped_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm "
    "_scaled_grouped_mm_v2".split()
)
TRITON_GEMMS = ("triton::rows_kernel", "triton::weight_kernel")
SINGLE = ("Float", "float32", "Double", "float64")
PICKS = ("index_select", "index", "embedding", "gather", "take_along_dim")
ADDS = ("index_add_", "index_put_", "_index_put_impl_", "scatter_add_", "scatter_", "index_copy_", "scatter_reduce_")
"""Operators that read from their first tensor, or write in place, the rows that indices name."""
FORMATS = (("Float8", "fp8"), ("float8", "fp8"), ("Float4", "fp4"), ("float4", "fp4"))


class Collective(NamedTuple):
    """A recorded collective.

    Attributes:
        size: ranks of the group.
        stride: distance of two of its ranks.
        number: index in the recording.
    """

    operation: str
    group: str
    size: int
    stride: int
    bytes: int
    number: int

    def as_text(self) -> str:
        """Return the form in which a recording stores it."""
        return "|".join(map(str, self))

    @classmethod
    def of_text(cls, text: str) -> Collective:
        operation, group, *numbers = text.split("|")
        return cls(operation, group, *map(int, numbers))


class Tensor(NamedTuple):
    """A tensor of an operator. `role`: r read, w written, o output; `bytes` without repeated elements."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Operator:
    """One operator: bytes read and written, FLOPs, and its GEMM (m, n, k, count) or None."""

    name: str
    bytes: int
    flops: int
    gemm: tuple[float, float, float, int] | None = None
    width: str = "bf16"
    size: int = 2
    queries: int = 0
    backward: bool = False

    def compute(self, hardware: Hardware) -> float:
        """Return the seconds of its GEMMs, at the rates of the plan."""
        if self.gemm is not None:
            m, n, k, count = self.gemm
            return count * gemm_seconds(hardware, m, n, k, self.width, self.size)
        return self.flops / attention_rates(hardware, self.queries)[self.backward] if self.queries else 0.0

    def bound(self, hardware: Hardware) -> float:
        """Return the seconds at the peaks of the data sheet, without launch."""
        peak = hardware.peak(self.width) / (2 if self.size == 4 else 1)
        return max(self.flops / peak, self.bytes / (hardware.hbm_tb_s * 1e12))


def read_operator(text: str) -> Operator:
    """Parse an operator as the emulated device describes it."""
    word, *described = text.split("|")
    tensors = []
    for each in described:
        role, dtype, shape, size = each.split(",")
        tensors.append(Tensor(role, dtype, tuple(map(int, shape.split("x"))) if shape else (), int(size)))
    name = word.removeprefix("aten::").removesuffix(" causal")
    base, _, overload = name.partition(".")
    triton = base.startswith("triton::")
    matrices = [x for x in tensors if (triton or x.role == "r") and len(x.shape) >= 2]
    moved = _bytes(base, "out" in overload or "grad_input" in overload, tensors)
    shapes = [x.shape for x in matrices[:3]]
    # tokens, expert weights, tokens; or tokens, tokens, gradients of expert weights
    if base in TRITON_GEMMS and tuple(map(len, shapes)) in ((2, 3, 2), (2, 2, 3)):
        (rows, one), other = shapes[0], shapes[2]
        experts = max(shapes, key=len)[0]
        gemm: tuple[float, float, float, int] = (rows / experts, other[1], one, experts)
        if len(other) != 2:
            gemm = one, shapes[1][1], rows / experts, experts
        m, n, k, count = gemm
        return Operator(name, moved, round(2 * m * n * k * count), gemm, size=4 if matrices[0].dtype in SINGLE else 2)
    if base in GEMMS:
        made = [x for x in tensors if x.role != "r" and len(x.shape) >= 2]
        left, right = matrices[-2:] if "add" in base else matrices[:2]
        width = next((kind for mark, kind in FORMATS if left.dtype.startswith(mark)), "bf16")
        gemm = _gemm(left.shape, right.shape, made[-1].shape if made else (), 2 if width == "fp4" else 1)
        m, n, k, count = gemm
        return Operator(name, moved, round(2 * m * n * k * count), gemm, width, 4 if left.dtype in SINGLE else 2)
    if "flash_attention" in base or "efficient_attention" in base or "cudnn_attention" in base:
        backward = "backward" in base
        query, key, value = matrices[1:4] if backward else matrices[:3]
        flops = 2 * math.prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])
        flops //= 2 if word.endswith(" causal") else 1
        flops = round(flops * (ATTENTION_BACKWARD_RATIO if backward else 1))
        return Operator(name, moved, flops, queries=query.shape[2], backward=backward)
    if "convolution" in base and "backward" not in base:
        return Operator(name, moved, 2 * math.prod(tensors[-1].shape) * math.prod(matrices[1].shape[1:]))
    return Operator(name, moved, 0)


def _gemm(
    left: tuple[int, ...], right: tuple[int, ...], made: tuple[int, ...], packed: int
) -> tuple[float, float, float, int]:
    """Return (m, n, k, count) of a GEMM; rows distributed over experts count as an even share."""
    k = left[-1] * packed
    if len(left) == 2 and len(right) == 2:
        if len(made) == 3:  # rows of experts are contracted
            return left[0], right[1], k / made[0], made[0]
        return left[0], right[1], k, 1
    if len(left) == 2:
        return left[0] / right[0], right[2], k, right[0]
    if len(right) == 2:
        return left[1], right[1] / left[0], k, left[0]
    return left[-2], right[-1], k, math.prod(left[:-2])


def _bytes(base: str, out: bool, tensors: Sequence[Tensor]) -> int:
    reads, writes, made = ([x for x in tensors if x.role == role] for role in "rwo")
    if base in PICKS and reads:
        return 2 * sum(x.bytes for x in (made or writes)) + sum(x.bytes for x in reads[1:])
    if base in ADDS and writes:
        source = reads[-1].bytes
        return sum(x.bytes for x in reads) + (2 if "add" in base or "reduce" in base else 1) * source
    if base == "_embedding_bag_forward_only" and reads:
        table, indices = reads[:2]
        rows = math.prod(indices.shape) * table.bytes // max(1, table.shape[0])
        return rows + sum(x.bytes for x in (*reads[1:], *made))
    if base.startswith("_fused_adam"):
        return 7 * sum(x.bytes for x in writes) // 4 if writes else 0  # gradients are only read
    once = out or base.startswith(OVERWRITES)
    return sum(x.bytes for x in (*reads, *made)) + (1 if once else 2) * sum(x.bytes for x in writes)


class CostSums(dict[str, float]):
    """Sums by key; a missing key is 0."""

    def __missing__(self, key: str) -> float:
        return 0

    def total(self) -> float:
        """Return the sum of all values."""
        return sum(self.values())


@dataclass
class LineCost:
    """Cost of a source line in an iteration; seconds and kernels by what limits them."""

    seconds: CostSums = field(default_factory=CostSums)
    kernels: CostSums = field(default_factory=CostSums)
    bytes: float = 0.0
    flops: float = 0.0


@dataclass
class RankCosts:
    """Costs of a recorded rank: `passes` of an average microbatch, the rest of an iteration.

    Attributes:
        passes: by (direction, chunk).
        outside: seconds of operators outside the passes (norms, update).
        waits: seconds in which the host waits there, and of collectives.
        bound: seconds at the peaks of the data sheet.
        ahead: seconds if the host ran ahead of the device within each pass, so that only the longer of the two counts.
        unfilled: seconds that operators lose because they are shorter than their launch.
        host_waits: number of waits of the host, inside the passes too.
        lines: by source line.
        layers: seconds by layer.
    """

    passes: dict[tuple[str, int], PassTime] = field(default_factory=dict)
    outside: float = 0.0
    waits: float = 0.0
    bound: float = 0.0
    ahead: float = 0.0
    unfilled: float = 0.0
    host_waits: float = 0.0
    lines: dict[str, LineCost] = field(default_factory=dict)
    layers: CostSums = field(default_factory=CostSums)

    def add(self, operator: Operator, times: Mapping[str, float], bound: float, weight: float, place: str) -> None:
        """Add an operator of a source line, `weight` times."""
        limit = max(times, key=times.__getitem__)
        line = self.lines.setdefault(place, LineCost())
        line.seconds[limit] += weight * times[limit]
        line.bytes += weight * operator.bytes
        line.flops += weight * operator.flops
        line.kernels[limit] += weight
        self.bound += weight * bound
        self.unfilled += weight * (times[limit] - max(times["compute"], times["memory"]))

    @property
    def total(self) -> float:
        return sum(line.seconds.total() for line in self.lines.values())

    @property
    def kernels(self) -> float:
        """Kernels that an iteration launches."""
        return sum(line.kernels.total() for line in self.lines.values())


class RecordingCosts:
    """Converts the events of a rank to costs.

    Args:
        count: microbatches of an iteration.
        executed: microbatches of the recording.
    """

    def __init__(self, args: Arguments, hardware: Hardware, vocab_rows: int, count: int, executed: int):
        self.args, self.hardware, self.count, self.executed = args, hardware, count, executed
        self.links, self.sizes = Interconnect(hardware), ChunkBytes(args, vocab_rows)
        self.constants = hardware.constants
        self.graphs = args.training.captured_modules
        self.operators: dict[str, Operator] = {}

    def weight(self, microbatch: int) -> float:
        """Return how many microbatches of an iteration an executed one represents."""
        if microbatch in (0, 1, self.executed):
            return 1.0
        return (self.count - 2) / (self.executed - 2)

    def costs(self, recording: Mapping[str, list]) -> RankCosts:
        texts, found, clock = recording["texts"], RankCosts(), 0.0
        started: dict[str, float] = {}
        device: defaultdict[tuple[str, int], float] = defaultdict(float)
        host: defaultdict[tuple[str, int], float] = defaultdict(float)
        for kind, text, line, layer, microbatch, action, part in recording["events"]:
            weight, place = self.weight(microbatch), texts[action]
            seconds = 0.0
            if kind == OPERATOR:
                operator = self.operators.get(texts[text]) or read_operator(texts[text])
                self.operators[texts[text]] = operator
                is_captured = "iteration" in self.graphs or texts[part] in self.graphs
                times = self._operator_times(operator, 0.0 if is_captured else self.constants.launch)
                seconds = max(times.values())
                found.add(operator, times, operator.bound(self.hardware), weight, texts[line])
                device[place, microbatch] += max(times["compute"], times["memory"])
                host[place, microbatch] += times["launch"]
                clock += seconds
                found.layers[texts[layer]] += weight * seconds
            elif kind == WAIT:
                seconds = self.constants.latency
                found.host_waits += weight
            cause = "compute"
            if kind in (START, FINISH):
                collective = Collective.of_text(texts[text])
                cause = CAUSES.get(collective.group, "")
                if kind == START:
                    started[texts[text]] = clock
                elif cause:
                    seconds = max(0.0, self.collective(collective) - (clock - started[texts[text]]))
                elif not place and collective.operation == "all_reduce":
                    found.waits += self.constants.latency
            if place:
                direction, chunk = place.split()
                key = ("forward" if direction == "forward" else "backward"), int(chunk)
                if cause:
                    time = PassTime(**{cause: weight * seconds / self.count})
                    found.passes[key] = found.passes.get(key, PassTime()) + time
            elif kind == OPERATOR:
                found.outside += seconds
            elif kind == WAIT:
                found.waits += seconds
        found.ahead = sum(self.weight(key[1]) * max(seconds, host[key]) for key, seconds in device.items())
        return found

    def _operator_times(self, operator: Operator, launch: float) -> dict[str, float]:
        """Return the seconds of an operator by what may limit it."""
        memory = operator.bytes / (self.hardware.hbm_tb_s * 1e12 * self.constants.memory)
        if operator.name in ("copy to the host", "copy to the device"):
            # copies of offloaded tensors overlap the computation
            memory = 0.0 if operator.bytes > 1 << 20 else launch
        return {"compute": operator.compute(self.hardware), "memory": memory, "launch": launch}

    def collective(self, collective: Collective) -> float:
        """Return the seconds of a collective of a pass; the token exchange is that of the flags' dispatcher."""
        operation, group, size, stride, count, _ = collective
        if operation == "all_to_all" and group in ("ep", "tp_ep"):
            tokens = self.sizes.tokens // self.sizes.tp
            whole = exchange_seconds(self.args, self.links, tokens, self.sizes.size)
            etp = self.args.parallel.expert_tensor_parallel_size or 1
            row = self.args.moe.expert_widths(self.args.model.hidden_size)[0] * self.sizes.size
            if etp > 1:  # the gather among these ranks is executed on its own
                whole -= self.links.ring(tokens * self.args.moe.moe_router_topk * row * etp, 1, etp)
            latency = self.constants.latency
            return latency + max(0.0, whole - latency) * count / (self.sizes.sent * row)
        if operation.startswith(("send", "receive")):
            return self.links.message(count, stride)
        return (2 if operation == "all_reduce" else 1) * self.links.ring(count, stride, size)


@dataclass(frozen=True)
class Roofline:
    """A step: costs of the busiest stage and of all executed ones, and how the execution differs from the flags.

    `executed` is the number of executed microbatches.
    """

    time: StepTime
    busiest: RankCosts
    notes: tuple[str, ...]
    stage: int
    stages: Mapping[int, RankCosts]
    executed: int


def stage_kinds(args: Arguments) -> list[tuple]:
    """Return what the chunks of each pipeline rank hold; ranks that hold the same launch the same."""
    pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)

    def kind(chunk: ChunkLayout) -> tuple:
        layers = [
            (pattern[number], is_linear(args.model, number), uses_window(args.model, number + 1))
            for number in chunk.layers
        ]
        ends = (chunk.has_embedding, chunk.has_loss, chunk.has_final_norm)
        return *layers, *ends, chunk.mtp, chunk.receives_normed, chunk.receives_depths

    return [tuple(map(kind, chunks)) for chunks in chunk_layouts(args.model, args.parallel)]


def stages_to_execute(args: Arguments) -> list[int]:
    """Return one pipeline rank of every kind."""
    kinds = stage_kinds(args)
    return sorted(kinds.index(kind) for kind in set(kinds))


def rank_of_stage(args: Arguments, world_size: int, stage: int) -> int:
    sizes = parallel_sizes(args)
    axes = {name: sizes[name] for name in ("tp", "cp", "pp", "ep", "etp", "order")}
    return next(ranks for ranks in make_layout(world_size, **axes).groups("pp") if 0 in ranks)[stage]


def make_roofline(plan: Plan, recordings: Mapping[int, Mapping[str, list]]) -> Roofline:
    """Return the step of a plan from the recordings of its stages (see `stages_to_execute`)."""
    args, hardware, executed = plan.args, plan.hardware, min(EXECUTED_MICROBATCHES, plan.num_microbatches)
    recorded = RecordingCosts(args, hardware, plan.vocab_rows, plan.num_microbatches, executed)
    costs = {stage: recorded.costs(recording) for stage, recording in recordings.items()}
    kinds = stage_kinds(args)
    of_stage = [costs[kinds.index(kind)] for kind in kinds]
    passes: list[list[tuple[PassTime, PassTime]]] = []
    for kind, cost in zip(kinds, of_stage):
        forward, backward = (
            [cost.passes.get((direction, chunk), PassTime()) for chunk in range(len(kind))]
            for direction in ("forward", "backward")
        )
        passes.append(list(zip(forward, backward)))
    if args.optimizer.optimizer_cpu_offload or args.optimizer.chunked_optimizer_state_offload:
        optimizer = max(optimizer_seconds(args, plan.world_size, stage, hardware) for stage in plan.memory)
    else:
        optimizer = max(cost.outside for cost in of_stage)
    waits, count = max(cost.waits for cost in of_stage), plan.num_microbatches
    time = step_from_passes(
        args, plan.world_size, recorded.sizes, count, plan.memory, hardware, passes, optimizer, waits
    )
    stage = max(range(len(of_stage)), key=lambda number: sum(each.total for pair in passes[number] for each in pair))
    return Roofline(time, of_stage[stage], tuple(notes(args)), stage, costs, executed)


def notes(args: Arguments) -> Iterator[str]:
    """Yield how the executed step differs from that of the flags."""
    moe, parallel, training, optimizer = args.moe, args.parallel, args.training, args.optimizer
    if moe.num_experts:
        yield "tokens: an even routing, as in the plan"
    if moe.num_experts and moe.moe_token_dispatcher_type != "alltoall" and parallel.expert_model_parallel_size > 1:
        yield f"dispatcher: executed with all-to-all, timed as {dispatcher_name(moe)}"
    has_capacity = moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0
    if has_capacity and not moe.moe_pad_expert_input_to_capacity:
        yield "capacity: executed with experts that are filled up to it"
    if training.captured_modules:
        yield "CUDA graphs: executed without; the operators of captured parts cost no launch"
    if parallel.overlap_moe_expert_parallel_comm:
        yield "overlapped exchange: executed one after the other; the planner's share of it is hidden"
    if parallel.tp_comm_overlap:
        yield "overlapped tensor-parallel communication: timed as if nothing hid it"
    if args.precision.transformer_impl == "transformer_engine":
        yield "TransformerEngine's layers: this program's own stand in for them, which launch more kernels"
    if args.model.experimental_attention_variant is not None:
        yield (
            "linear and sparse attention: their Triton kernels are timed by what they move; their FLOPs are not counted"
        )
    if optimizer.optimizer_cpu_offload or optimizer.chunked_optimizer_state_offload:
        yield "offloaded optimizer: executed without; its time is the planner's"

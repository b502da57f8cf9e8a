"""Step time from the operators that a step launches, each at the limit of the device that it meets.

scripts/roofline.py executes a step of one rank of every kind of pipeline stage on the emulated device, at the real
sizes and without computing (executed_step.py, tests/emulated_cuda/record_step.py); this module
turns the recorded operators into seconds.
An operator takes the longer of

    compute   the FLOPs of a GEMM or of attention, at the rates of the plan (layer_time.py)
    memory    the bytes that it reads and writes, at the fraction of the memory bandwidth that the plan assumes

and begins when the device has finished the one before and the host has launched it. The host launches one operator
after the other, those of a CUDA graph for nothing, and runs ahead of the device until it waits for it, and continues
one latency after the device has finished what was launched. Collectives of tensor, context and expert parallelism last
as in the plan (interconnect.py), minus what runs between their start and their end. Pipeline, gradients and parameters
are the plan's too, which is given these passes instead of those that it would compute.

Where the emulated device or a single rank cannot follow the flags, the executed step differs from a run: see
executed_step.py.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.mechanisms.formats import FLAGS
from moe_trainer.estimate.executed_step import EXECUTED_MICROBATCHES, notes, stage_kinds
from moe_trainer.estimate.interconnect import Interconnect, exchange_seconds
from moe_trainer.estimate.layer_time import (
    ATTENTION_BACKWARD_RATIO,
    PassTime,
    attention_rates,
    cast_bytes,
    gemm_seconds,
    hidden_tensor_shares,
)
from moe_trainer.estimate.memory import ChunkBytes
from moe_trainer.estimate.step_time import StepTime, action_times, optimizer_seconds, step_from_actions

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware
    from moe_trainer.estimate.plan import Plan

OPERATOR, WAIT, START, FINISH = range(4)
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
TRITON_GEMMS = (
    "triton::rows_kernel",
    "triton::weight_kernel",
    "triton::block_rows_kernel",
    "triton::block_weight_kernel",
)
SINGLE = ("Float", "float32", "Double", "float64")
PICKS = ("index_select", "index", "embedding", "gather", "take_along_dim")
ADDS = ("index_add_", "index_put_", "_index_put_impl_", "scatter_add_", "scatter_", "index_copy_", "scatter_reduce_")
"""Operators that read from their first tensor, or write in place, the rows that indices name."""
PAGE_COPIES = ("triton::copy_out_kernel", "triton::copy_back_kernel")
SLOT_COPIES = "ops/fixed_slots.py"
CASTS = "quantization/"
"""Source lines that quantize, arrange and pad operands of GEMMs and what is sent."""
OF_EXPERTS, OF_DISPATCH = ", of experts", ", of dispatch"
CALLERS = MappingProxyType({"quantization/expert_mlp.py": OF_EXPERTS, "moe/dispatch/": OF_DISPATCH})
"""Suffix of such a line in a recording by the file or folder that calls it; without one it is of a linear."""
HOST_COPIES = ("copy to the host", "copy to the device")
LARGE_COPY_BYTES = 1 << 20
"""Bytes above which a copy between host and device is one of an offloaded tensor."""
FORMATS = tuple((f"{word}{each.bits}", each.name) for each in FLAGS for word in ("Float", "float"))


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
    """One operator: bytes read and written, FLOPs, and its GEMM (m, n, k, count) or None.

    `rows`: of the tokens of all experts that a grouped GEMM multiplies, else 0. `window`: of attention by the kernels
    for packed sequences, how many earlier keys a query sees (-1: all); None for other operators. Its `flops` are of
    one pair of query and key, and `queries` are all tokens.
    """

    name: str
    bytes: int
    flops: int
    gemm: tuple[float, float, float, int] | None = None
    width: str = "bf16"
    size: int = 2
    queries: int = 0
    backward: bool = False
    rows: int = 0
    window: int | None = None

    def of_sequences(self, lengths: Sequence[int]) -> Operator:
        """Return attention within sequences of these lengths, with its FLOPs; other operators as they are.

        Of sequences that ranks share, a kernel computes local queries with the keys of a rank: half of all pairs.
        """
        if self.window is None:
            return self
        local = [length * self.queries / sum(lengths) for length in lengths]
        pairs = sum(num_pairs(length, self.window) for length in local)
        mean = round(sum(length * length for length in local) / sum(local))  # the length of the mean token's
        return replace(self, flops=round(pairs * self.flops), queries=mean, window=None)

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


def num_pairs(length: float, window: int) -> float:
    """Return the pairs of query and key that causal attention with a window computes, the diagonal half."""
    if 0 <= window < length:
        return length * window - window * window / 2
    return length * length / 2


def read_operator(text: str) -> Operator:
    """Parse an operator as the emulated device describes it."""
    word, *described = text.split("|")
    tensors = []
    for each in described:
        role, dtype, shape, size = each.split(",")
        tensors.append(Tensor(role, dtype, tuple(map(int, shape.split("x"))) if shape else (), int(size)))
    # every word matches
    ((name, is_causal, left),) = re.findall(r"^(?:aten::)?(.*?)(?: (causal)| window=(-?\d+))?$", word)
    base, _, overload = name.partition(".")
    triton = base.startswith("triton::")
    if base in PAGE_COPIES:  # the pages of all layers are one tensor, of which it reads or writes the buffer's
        return Operator(name, 2 * tensors[0].bytes, 0)
    matrices = [x for x in tensors if (triton or x.role == "r") and len(x.shape) >= 2]
    moved = _bytes(base, "out" in overload or "grad_input" in overload, tensors)
    shapes = [x.shape for x in matrices[:3]]
    # tokens, expert weights, tokens; or tokens, tokens, gradients of expert weights
    if base in TRITON_GEMMS and tuple(map(len, shapes)) in ((2, 3, 2), (2, 2, 3)):
        experts, *sides = max(shapes, key=len)
        if len(shapes[1]) == 3:
            rows, depth = shapes[0]
            gemm: tuple[float, float, float, int] = rows / experts, shapes[2][1], depth, experts
        else:
            rows = math.prod(shapes[0]) // sides[0]  # they may be its columns
            gemm = sides[0], sides[1], rows / experts, experts
        m, n, k, count = gemm
        wide = 4 if matrices[0].dtype in SINGLE else 2
        width = next((kind for mark, kind in FORMATS if matrices[0].dtype.startswith(mark)), "bf16")
        return Operator(name, moved, round(2 * m * n * k * count), gemm, width, wide, rows=rows)
    if base in GEMMS:
        made = [x for x in tensors if x.role != "r" and len(x.shape) >= 2]
        left, right = matrices[-2:] if "add" in base else matrices[:2]
        width = next((kind for mark, kind in FORMATS if left.dtype.startswith(mark)), "bf16")
        packed = next((8 // each.bits for each in FLAGS if each.name == width), 1)
        gemm = _gemm(left.shape, right.shape, made[-1].shape if made else (), packed)
        m, n, k, count = gemm
        tokens = 0 if "grouped" not in base else left.shape[0] if len(right.shape) == 3 else left.shape[-1]
        wide = 4 if left.dtype in SINGLE else 2
        return Operator(name, moved, round(2 * m * n * k * count), gemm, width, wide, rows=tokens)
    if "flash_attention" in base or "efficient_attention" in base or "cudnn_attention" in base:
        backward = "backward" in base
        query, key, value = matrices[1:4] if backward else matrices[:3]
        if len(query.shape) == 3:  # [T, N, D]: the lengths of its sequences are not in its shapes
            flops = 2 * query.shape[1] * (query.shape[2] + value.shape[2])
            flops = round(flops * (ATTENTION_BACKWARD_RATIO if backward else 1))
            tokens = max(query.shape[0], key.shape[0])
            return Operator(name, moved, flops, queries=tokens, backward=backward, window=int(left or -1))
        flops = 2 * math.prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])
        flops //= 2 if is_causal else 1
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


def is_large_copy(operator: Operator) -> bool:
    """Return whether an operator copies an offloaded tensor, which overlaps the computation."""
    return operator.name in HOST_COPIES and operator.bytes > LARGE_COPY_BYTES


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
        waits: seconds of small collectives there.
        bound: seconds at the peaks of the data sheet.
        idle: seconds in which the device is idle until the host launches an operator.
        host_waits: number of waits of the host, inside the passes too.
        lines: by source line.
        layers: seconds by layer.
    """

    passes: dict[tuple[str, int], PassTime] = field(default_factory=dict)
    outside: float = 0.0
    waits: float = 0.0
    bound: float = 0.0
    idle: float = 0.0
    host_waits: float = 0.0
    lines: dict[str, LineCost] = field(default_factory=dict)
    layers: CostSums = field(default_factory=CostSums)

    def add(
        self, operator: Operator, times: Mapping[str, float], idle: float, bound: float, weight: float, place: str
    ) -> None:
        """Add an operator of a source line, `weight` times; `idle`: seconds that the device waits for its launch."""
        limit = max(times, key=times.__getitem__)
        line = self.lines.setdefault(place, LineCost())
        line.seconds[limit] += weight * times[limit]
        line.seconds["launch"] += weight * idle
        line.bytes += weight * operator.bytes
        line.flops += weight * operator.flops
        line.kernels["launch" if idle > times[limit] else limit] += weight
        self.bound += weight * bound
        self.idle += weight * idle

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
        packs: of packed sequences, what they are (verification/executed_packs.py): weight, ranks, and lengths.
    """

    def __init__(
        self,
        args: Arguments,
        hardware: Hardware,
        vocab_rows: int,
        count: int,
        executed: int,
        packs: Sequence[tuple[float, int, Sequence[int]]] = (),
    ):
        self.args, self.hardware, self.count, self.executed = args, hardware, count, executed
        self.packs, self.sequences = packs, (args.data.seq_length,) * args.training.micro_batch_size
        self.links, self.sizes = Interconnect(hardware), ChunkBytes(args, vocab_rows)
        self.constants = hardware.constants
        self.graphs = args.training.captured_modules
        self.is_whole = "iteration" in self.graphs  # one graph: nothing is launched and nothing waits for the host
        linears, self.has_te_experts = args.te_quantizes
        # linears that leave it for deferred weight gradients cost what its own cost, as in the plan
        self.has_te_linears = linears or self.has_te_experts
        # this program's linears overlap chunks themselves, but not with operands in 8 bits
        self.hidden_tensor = hidden_tensor_shares(args.parallel) if self.has_te_linears else (0.0, 0.0)
        budget = args.moe.moe_expert_rank_capacity_factor
        self.most_rows = math.inf if budget is None else self.sizes.received
        # the all-to-all in a library's place sends and copies slots of the budget's size
        self.slot_factor = (
            1.0 if budget is None or not get_dispatcher(args.moe).sends_filled_slots else max(1.0, budget)
        )
        self.operators: dict[str, Operator] = {}

    def weight(self, microbatch: int) -> float:
        """Return how many microbatches of an iteration an executed one represents."""
        if self.packs and microbatch:
            return self.packs[microbatch - 1][0]
        if microbatch in (0, 1, self.executed):
            return 1.0
        return (self.count - 2) / (self.executed - 2)

    def costs(self, recording: Mapping[str, list]) -> RankCosts:
        """Follow host and device through a recording: the host runs ahead until it waits for the device."""
        texts, found = recording["texts"], RankCosts()
        host = device = 0.0  # times that both have reached
        started: dict[str, float] = {}
        copies: defaultdict[tuple[str, int], float] = defaultdict(float)
        for kind, text, line, layer, microbatch, action, part in recording["events"]:
            weight, place = self.weight(microbatch), texts[action]
            seconds, cause = 0.0, "compute"
            key = self._pass_of(place)
            if kind == OPERATOR:
                lengths = self.packs[microbatch - 1][2] if self.packs and microbatch else self.sequences
                operator = self._read(texts[text]).of_sequences(lengths)
                times = self._operator_times(operator, texts[line])
                if times is None:
                    continue
                if not self.is_whole and texts[part] not in self.graphs:
                    host += self.constants.launch
                idle = 0.0 if self.is_whole else max(0.0, host - device)
                seconds = idle + max(times.values())
                device += seconds
                found.add(operator, times, idle, operator.bound(self.hardware), weight, texts[line])
                found.layers[texts[layer]] += weight * seconds
                if key is not None and is_large_copy(operator):
                    copies[key] += weight * operator.bytes / 2 / (self.hardware.host_gb_s * 1e9) / self.count
            elif kind == WAIT and not self.is_whole:
                host = max(host, device) + self.constants.latency
                found.host_waits += weight
            elif kind in (START, FINISH):
                collective = Collective.of_text(texts[text])
                cause = CAUSES.get(collective.group, "")
                if kind == START:
                    started[texts[text]] = max(host, device)
                elif cause:
                    seconds = max(0.0, self.collective(collective) - (device - started[texts[text]]))
                    if cause != "exchange" or not self.args.parallel.overlap_moe_expert_parallel_comm:
                        device += seconds
                elif not place and collective.operation == "all_reduce":
                    found.waits += self.constants.latency
            if key is not None and cause:
                time = PassTime(**{cause: weight * seconds / self.count})
                found.passes[key] = found.passes.get(key, PassTime()) + time
            elif kind == OPERATOR:
                found.outside += seconds
        for key, time in found.passes.items():
            exposed = time.tensor - min(time.compute, self.hidden_tensor[key[0] == "backward"] * time.tensor)
            # copies overlap the computation, as in the plan
            found.passes[key] = replace(time, compute=max(time.compute, copies[key]), tensor=exposed)
        return found

    def _pass_of(self, place: str) -> tuple[str, int] | None:
        """Return (direction, chunk) of a recorded pass, None outside the passes."""
        if not place:
            return None
        direction, chunk = place.split()
        return ("forward" if direction == "forward" else "backward"), int(chunk)

    def _read(self, text: str) -> Operator:
        if text not in self.operators:
            self.operators[text] = read_operator(text)
        return self.operators[text]

    def _operator_times(self, operator: Operator, line: str) -> dict[str, float] | None:
        """Return the seconds of an operator on the device by what may limit it.

        None for the casts of GEMMs that TransformerEngine computes in a run: they take what the plan's take, with the
        GEMM.
        """
        bandwidth = self.hardware.hbm_tb_s * 1e12 * self.constants.memory
        compute, memory = operator.compute(self.hardware), operator.bytes / bandwidth
        if operator.rows > self.most_rows:  # of a larger buffer the GEMM computes the tokens that are there
            compute *= self.most_rows / operator.rows
        if operator.name in PAGE_COPIES and (factor := self.args.moe.moe_expert_rank_capacity_factor):
            share = min(1.0, 1 / factor)  # the copy back writes the rest of the buffer, too
            memory *= share if operator.name == PAGE_COPIES[0] else (1 + share) / 2
        if is_large_copy(operator):
            memory = 0.0
        if line.startswith(SLOT_COPIES):
            memory /= self.slot_factor
        if self.has_te_experts if line.endswith(OF_EXPERTS) else self.has_te_linears:
            if operator.gemm is None and line.startswith(CASTS) and not line.endswith(OF_DISPATCH):
                return None
            if operator.width != "bf16" and operator.gemm is not None:
                m, _, k, count = operator.gemm
                cast = cast_bytes(count * m * k, 2) / bandwidth
                return {"compute": compute + cast, "memory": memory + cast}
        return {"compute": compute, "memory": memory}

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
            return latency + max(0.0, whole - latency) * count / (self.sizes.sent * row * self.slot_factor)
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


def make_roofline(plan: Plan, recordings: Mapping[int, Mapping[str, list]]) -> Roofline:
    """Return the step of a plan from the recordings of its stages (see `stages_to_execute`)."""
    args, hardware = plan.args, plan.hardware
    executed_packs: Mapping[str, Any] = next(iter(recordings.values()))
    packs = executed_packs.get("packs", ())
    count = int(executed_packs.get("num_microbatches", plan.num_microbatches))
    executed = len(packs) or min(EXECUTED_MICROBATCHES, count)
    recorded = RecordingCosts(args, hardware, plan.vocab_rows, count, executed, packs)
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
    waits = max(cost.waits for cost in of_stage)
    world_size, sizes = plan.world_size, recorded.sizes
    actions = action_times(args, world_size, sizes, hardware, passes)
    time = step_from_actions(args, world_size, sizes, count, plan.memory, hardware, actions, optimizer, waits)
    stage = max(range(len(of_stage)), key=lambda number: sum(each.total for pair in passes[number] for each in pair))
    return Roofline(time, of_stage[stage], tuple(notes(args)), stage, costs, executed)

"""Record what one rank of a training step launches on the emulated device, for scripts/roofline.py.

    python tests/emulated_cuda/record_step.py FILE.json RANK WORLD_SIZE MICROBATCHES FLAGS

The rank is one of a world of any size, and its shapes are the real ones: the device makes tensors and computes nothing (device.cpp),
and collectives go to torch's fake process group. Numbers that the host reads to make shapes of them, the tokens of each expert, are those of
an even routing. No stage waits for another, so every microbatch goes through all chunks of the rank forward and then backward.
`record` with compute=True computes normally; the tests compare both.
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulation
import torch
import torch.distributed as dist
import torch.fx.traceback
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from arguments import Arguments, parse_args
from arguments.mechanisms.placements import get_placement
from arguments.stage_layout import parallel_sizes
from moe_trainer.data.packing import PackFormat
from moe_trainer.estimate.dry_run import histogram_of_flags
from moe_trainer.estimate.executed_step import executed_args
from moe_trainer.estimate.memory import ChunkBytes
from moe_trainer.estimate.parameters import planned_vocab_size
from moe_trainer.estimate.roofline import CALLERS, CASTS, FINISH, OPERATOR, START, WAIT, Collective
from moe_trainer.memory import host_read
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.model import build
from moe_trainer.model.module_names import named_transformer_layers
from moe_trainer.moe import participant
from moe_trainer.moe.balancing import MoeMetrics
from moe_trainer.parallel import collectives, p2p
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.pipeline import schedule
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, WEIGHT, Action, Order
from moe_trainer.quantization import scaled_grouped, scaled_mm
from moe_trainer.training import step
from moe_trainer.training.run import TrainState
from moe_trainer.verification import training_trace
from moe_trainer.verification.executed_packs import ExecutedPack, ExecutedPacks


def quantizing_caller(line: str) -> str:
    """Return the suffix of a line that quantizes: what for, "" for linears."""
    if not line.startswith(CASTS):
        return ""
    frame = sys._getframe()
    while frame is not None:
        for path, suffix in CALLERS.items():
            if f"/moe_trainer/{path}" in frame.f_code.co_filename:
                return suffix
        frame = frame.f_back
    return ""


class Recording:
    """Events of one iteration in their order: [kind, text, line, layer, microbatch, pass, part].

    OPERATOR: its tensors as emulation.Device.record describes them. WAIT: of the host. START, FINISH: of a Collective.
    pass: "forward 0" of local chunk 0 and so on, "" outside the microbatches. part: of a layer that the flags capture, else "".
    bytes: of the device's memory that the last of each pass left allocated (forward: kept for backward; backward: less than none),
    "states" what was allocated when the iteration began, and "peak" the most during it.
    """

    def __init__(self) -> None:
        self.events: list[list] = []
        self.texts: dict[str, int] = {}
        self.on, self.trace, self.number = False, None, 0
        self.bytes: dict[str, int] = {}
        self.action, self.microbatch = "", 0
        self._here = threading.local()

    def begin(self, action: str = "", microbatch: int = 0) -> None:
        """Begin an action, or what follows it; no thread is in a layer then."""
        self.action, self.microbatch = action, microbatch
        self.trace.leave_layers()

    def enter(self, kind: int, text: str) -> None:
        if not self.on or text.startswith("c10d::"):
            return
        numbers = [
            self.texts.setdefault(word, len(self.texts))
            for word in (text, self._line(), self.trace.layer, self.action, self._part())
        ]
        self.events.append([kind, *numbers[:3], self.microbatch, *numbers[3:]])

    @contextlib.contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Mark a captured part of a layer; a nested part belongs to the outer one."""
        before = getattr(self._here, "part", "")
        self._here.part = before or part
        try:
            yield
        finally:
            self._here.part = before

    def _part(self) -> str:
        """The captured part that runs, or that autograd computes the gradients of. Those of parameters are accumulated behind it."""
        node = torch._C._current_autograd_node()
        if node is None or getattr(self._here, "part", "") or node.name().endswith("AccumulateGrad"):
            return getattr(self._here, "part", "")
        return node.metadata.get("traceback_", ["?", ""])[1]

    def made_at(self) -> list[str]:
        """Return the place where a node of autograd was created."""
        return [emulation.source_line(), self._part()]

    def _line(self) -> str:
        """The line of the program; of an operator of autograd, the line whose gradient it computes."""
        line = emulation.source_line()
        node = torch._C._current_autograd_node()
        if node is None:
            return line + quantizing_caller(line)
        line = line.removeprefix(f"{node.name()}: ")
        line += quantizing_caller(line)
        return f"{node.metadata.get('traceback_', ['?'])[0]}, backward" if line == "?" else line

    def as_json(self) -> dict[str, list]:
        return {"texts": list(self.texts), "events": self.events}

    def communicate(
        self,
        launch: Callable[..., Any],
        group: Group,
        operation: str,
        x: Tensor | None,
        async_op: bool,
        call: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """In place of parallel.state.communicate."""
        pending = launch(group, operation, x, async_op, call, *args, **kwargs)
        if x is None or not x.is_cuda:
            return pending
        self.number += 1
        size = max(tensor.numel() * tensor.itemsize for tensor in (x, *args) if isinstance(tensor, Tensor))
        text = Collective(
            operation, group.name, group.size, group.ranks[1] - group.ranks[0], size, self.number
        ).as_text()
        self.enter(START, text)
        if not async_op:
            self.enter(FINISH, text)
            return pending
        wait = pending.wait
        pending.wait = lambda: (self.enter(FINISH, text), wait())[1]
        return pending


def recording_action(recording: Recording, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a schedule's execution so that it reports its action."""

    @functools.wraps(method)
    def run(execution, action, *args):
        before = torch.cuda.memory_allocated()
        recording.begin(f"{name} {action.chunk}", action.microbatch + 1)
        try:
            return method(execution, action, *args)
        finally:
            recording.bytes[recording.action] = torch.cuda.memory_allocated() - before
            recording.begin()

    return run


def report_captured_parts(recording: Recording, captured: frozenset[str]) -> None:
    """Have CudaGraphs.run report these parts to the recording; layers run as under capture, each operator on its own."""
    run, apart = CudaGraphs.run, captured & {"moe_router", "moe_preprocess"}

    def counts_to_use(graphs, part, *rest, **named):
        with recording.inside(part if part in captured else ""):
            return run(graphs, part, *rest, **named)

    CudaGraphs.run, CudaGraphs.is_captured = counts_to_use, lambda graphs, *parts: not apart.isdisjoint(parts)


def split_evenly(rows: int, count: int) -> list[int]:
    """Split `rows` evenly over `count` experts."""
    return [rows // count + (index < rows % count) for index in range(count)]


def even_columns(args: Arguments, ep: int, sent: int) -> list[int]:
    """Return the rows of each expert for even routing: those of each rank's experts, and of its slots for others'."""
    rows, slots = split_evenly(sent, args.moe.num_experts), get_placement(args.moe, ep).slots(args.moe)
    local = len(rows) // ep
    return [count for rank in range(ep) for count in (*rows[rank * local : (rank + 1) * local], *[0] * slots)]


def args_of_pack(args: Arguments, pack: ExecutedPack) -> Arguments:
    """Return arguments of microbatches of one sequence, with as many tokens on a rank as a pack has."""
    tokens = pack.packed.num_tokens // pack.num_ranks * args.parallel.context_parallel_size
    return replace(
        args, data=replace(args.data, seq_length=tokens), training=replace(args.training, micro_batch_size=1)
    )


def even_counts(args: Arguments, ps: ParallelState, num_numbers: int, num_experts: int) -> list[int]:
    """Return what the host would read for even routing.

    Rows of each expert; or rows sent to each rank and received from each rank for each local expert; or a plan that
    moves nothing (moe/placement), and what each rank sends.
    """
    sizes = ChunkBytes(args, 1)
    if sizes.sent % sizes.mlp_chunks:
        raise ValueError(f"--mlp-chunks-for-training {sizes.mlp_chunks}: only chunks of equal length are executed")
    rows = even_columns(args, ps.ep.size, sizes.sent // sizes.mlp_chunks)
    slots = ps.ep.size * get_placement(args.moe, ps.ep.size).slots(args.moe)
    if num_numbers == num_experts:
        return rows
    if slots and num_numbers == 2 * slots + ps.tp_ep.size * len(rows):
        return [0] * (2 * slots) + rows * ps.tp_ep.size
    local = num_experts // ps.ep.size
    leaving = [sum(rows[rank * local : (rank + 1) * local]) for rank in range(ps.ep.size)]
    arriving = rows[ps.ep.rank * local : (ps.ep.rank + 1) * local]
    return leaving + arriving * ((num_numbers - ps.ep.size) // local)


def packs_of_flags(args: Arguments, world_size: int) -> ExecutedPacks | None:
    """Return the packs to execute; None without packed sequences."""
    fmt = PackFormat.from_args(args)
    if fmt is None:
        return None
    histogram = histogram_of_flags(args)
    assert histogram is not None, "executed_args asks for it"
    return ExecutedPacks.of(args, fmt, planned_vocab_size(args)[0], world_size, histogram)


def groups(args: Arguments, rank: int, world_size: int) -> ParallelState:
    """Return the groups of a rank whose peers do not exist."""
    if world_size == 1:
        return ParallelState.single()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # the tests' processes have a group of one
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    new_group = dist.new_group
    dist.new_group = lambda ranks, **unused: new_group(ranks, backend="fake") if rank in ranks else None
    return ParallelState.create(world_size, rank, **parallel_sizes(args))


def make_sequential_orders(pp: int, num_chunks: int, apart: bool) -> Callable[[int], list[Order]]:
    """Return orders in which a microbatch ends before the next begins, for any pipeline schedule."""
    kinds = (BACKWARD, WEIGHT) if apart else (BACKWARD,)

    def orders(num_microbatches: int) -> list[Order]:
        order = []
        for microbatch in range(num_microbatches):
            order += [Action(FORWARD, chunk, microbatch) for chunk in range(num_chunks)]
            order += [Action(kind, chunk, microbatch) for chunk in reversed(range(num_chunks)) for kind in kinds]
        return [tuple(order)] * pp

    return orders


def accepts_operands(compute: Callable[[], Tensor], expected: Tensor, warning: str) -> bool:
    """Replacement of scaled_mm.matches_reference, which compares values: return whether the operator accepts the operands."""
    try:
        compute()
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


def collect_no_metrics(collect: Callable[..., MoeMetrics], *args: Any) -> MoeMetrics:
    """Run collect_moe_metrics; numbers that it reads from the device are zero, also those it divides by."""
    try:
        return collect(*args)
    except ZeroDivisionError:
        return MoeMetrics({}, {}, 0)


def disable_computation() -> None:
    """Disable computation in this process, and all checks of values."""
    participant.collect_moe_metrics = functools.partial(collect_no_metrics, participant.collect_moe_metrics)
    emulation.DEVICE().shapes_only(True)
    build.init_parameters, build._check_initialized = (lambda params, seed: None), (lambda chunk: None)
    scaled_mm.matches_reference = scaled_grouped.matches_reference = accepts_operands


def replace_host_reads(answer: Callable[[Callable[[], list[int]], int], list[int]]) -> None:
    """Have the host read `answer(ask, experts)` instead of the routing counts; ask() returns the real counts."""
    start = host_read.AsyncHostReader.start

    def started(reads, numbers, *inputs, work=None):
        ask = start(reads, numbers, *inputs, work=work)
        return lambda: answer(ask, inputs[0].numel())

    host_read.AsyncHostReader.start = started


def record(
    argv: Sequence[str],
    rank: int = 0,
    world_size: int = 1,
    microbatches: int = 2,
    compute: bool = False,
    routed: Sequence[Sequence[int]] | None = None,
    ps: ParallelState | None = None,
) -> dict[str, list]:
    """Run two iterations of one rank and record the second.

    compute: as ever, and return as `routed` what the host read of the routing. routed: to be read in place of an even routing.
    ps: groups of ranks that are there.
    """
    device, recording = emulation.DEVICE(), Recording()
    flags = parse_args(list(argv), world_size)
    packs = packs_of_flags(flags, world_size)
    if packs is not None:
        microbatches = len(packs.packs)
    args = executed_args(flags, world_size, microbatches)
    ps = ps or groups(args, rank, world_size)
    recording.trace = ps.trace
    if not compute:
        disable_computation()
    counts_to_use, found = iter(routed or ()), []

    def answer(ask: Callable[[], list[int]], num_experts: int) -> list[int]:
        counts = ask()
        of_microbatch = args
        if packs is not None:
            of_microbatch = args_of_pack(args, packs.packs[max(0, recording.microbatch - 1)])
        found.append(
            counts
            if compute
            else next(counts_to_use)
            if routed
            else even_counts(of_microbatch, ps, len(counts), num_experts)
        )
        return found[-1]

    replace_host_reads(answer)
    for module in (collectives, p2p):
        module.communicate = functools.partial(recording.communicate, module.communicate)
    for name, kind in (("_forward", "forward"), ("_backward", "backward"), ("weight_grads", "weight")):
        setattr(schedule._Execution, name, recording_action(recording, kind, getattr(schedule._Execution, name)))
    report_captured_parts(recording, flags.training.captured_modules)
    torch.fx.traceback.format_stack = recording.made_at  # what anomaly mode keeps with every node of autograd
    batches = None
    if packs is not None:
        drawn = [batch.pin_memory() for batch in packs.batches(args)]
        batches = [drawn[0], *drawn]  # the first iteration has one microbatch
    run, state = training_trace.make_run(args, rank, ps, 2, device="cuda", batches=batches), TrainState()
    for _, layer in named_transformer_layers(run.chunks):  # what follows the last one is no layer's
        layer.register_forward_hook(lambda *unused: setattr(ps.trace, "layer", ""))
    run.schedule.orders = make_sequential_orders(ps.pp.size, len(run.chunks), run.schedule.kind.has_wgrad_actions)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for iteration, count in enumerate((1, microbatches)):  # the first makes what stays
            recording.on = iteration == 1
            recording.bytes["states"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            device.record((lambda text: recording.enter(OPERATOR, text)) if recording.on else None)
            callbacks = emulation._EVENT(
                lambda kind, what, size: recording.enter(WAIT, what.decode()) or 0 if kind == emulation.WAIT else 0
            )
            device.lib.ec_callbacks(callbacks, device._callbacks[1])
            step.train_step(run, state, count)
            state.iteration += 1
    recording.bytes["peak"] = torch.cuda.max_memory_allocated()
    device.record(None)
    device.watch(False)
    executed = {} if packs is None else packs.as_json()
    return {**recording.as_json(), "routed": found, "bytes": recording.bytes, **executed}


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not longer than scripts/roofline.py
    path, rank, world_size, microbatches, *flags = sys.argv[1:]
    Path(path).write_text(json.dumps(record(flags, int(rank), int(world_size), int(microbatches))), encoding="utf-8")
    # Threads of autograd still hold callbacks into Python: where one wakes while the interpreter shuts down, C++ terminates the process.
    os._exit(0)

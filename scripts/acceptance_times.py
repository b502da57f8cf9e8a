"""Times of scripts/gpu_acceptance.py: the lines of the sections that each run alone."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.acceptance_checks import Check, CheckResult, NotMeasuredError, is_emulated, require_triton

NUM_GAPS = 25
NUM_KERNELS = 45
MIN_SPEEDUP = 0.9  # over torch; a slower kernel is a failure
NO_SPEED = "an emulated device has no speed"
ALTERNATIVES = ("", "--attention-backend flash", "--triton-kernels none", "--triton-kernels all")


def kernel_times() -> Iterator[tuple[str, Check]]:
    """Triton kernels against torch: time."""
    import torch

    from moe_trainer.layers import kernels as selected
    from scripts.benchmarks.bench_kernels import BENCH_SIZES, measure
    from scripts.benchmarks.kernel_cases import NAMES

    optional = set(selected.NAMES) - set(selected.DEFAULT)  # torch has the default: no claim of speed

    def check(name: str, size: str) -> str:
        require_triton()
        if is_emulated():
            raise NotMeasuredError(NO_SPEED)
        _, _, plain, kernel, speedup, throughput, _ = measure(name, size, 20)
        torch.cuda.empty_cache()
        detail = f"torch {plain} ms, Triton {kernel} ms, speedup {speedup}, {throughput}"
        if name in optional:
            return f"{detail}; not a default kernel"
        assert float(speedup) >= MIN_SPEEDUP, f"slower than torch: {detail}"
        return detail

    for size in BENCH_SIZES:
        for name in NAMES:
            yield f"{name}, {size}", lambda name=name, size=size: check(name, size)


def shape_argv(shape: str, flags: str = "") -> list[str]:
    """Return the command line of a shape of bench_gpu.py.

    On an emulated device it is tiny, and without Triton, whose interpreter would take minutes.
    """
    from scripts.benchmarks import bench_gpu

    if is_emulated():
        return bench_gpu.command_line(shape, 64, True, "--triton-kernels none")
    return bench_gpu.command_line(shape, bench_gpu.SEQ, False, flags)


def measure_shape(shape: str, contender: str, flags: str = "") -> str:
    """Train a shape of bench_gpu.py in a separate process. Returns its speed."""
    from scripts.benchmarks import bench_gpu

    if problem := bench_gpu.find_problem(contender):
        raise NotMeasuredError(problem)
    tiny = is_emulated()
    if tiny and contender != "moe-trainer":
        raise NotMeasuredError(NO_SPEED)
    result = bench_gpu.measure_contender(contender, shape_argv(shape, flags), 2 if tiny else 5, "cuda", tiny)
    if tiny:
        raise NotMeasuredError(f"{NO_SPEED}; the program ran at tiny sizes")
    return (
        f"{result.seconds:.3f} s per step, {result.tokens_per_s:,.0f} tokens/s, {result.flops_per_s / 1e12:.0f} "
        f"TFLOP/s, {result.gemm_share:.0%} of the GEMM rate, {result.peak_gib:.1f} GiB; {', '.join(result.breakdown)}"
    )


def benchmark() -> Iterator[tuple[str, Check]]:
    """Shapes and contenders of scripts/benchmarks/bench_gpu.py."""
    from scripts.benchmarks import bench_gpu

    for shape in bench_gpu.SHAPES:
        for contender in bench_gpu.get_contenders(shape):
            yield (
                f"{shape}, {contender}",
                lambda shape=shape, contender=contender: measure_shape(shape, contender),
            )


def alternatives() -> Iterator[tuple[str, Check]]:
    """The first shape of bench_gpu.py with other kernels, and with the default ones on the same day."""
    from scripts.benchmarks import bench_gpu

    shape = next(iter(bench_gpu.SHAPES))
    for flags in ALTERNATIVES:
        yield f"{shape}, {flags or 'defaults'}", lambda flags=flags: measure_shape(shape, "moe-trainer", flags)


def profile() -> Iterator[tuple[str, Check]]:
    """Gaps between the kernels of a training step, and its kernels."""
    from scripts.benchmarks import bench_gpu

    def check(shape: str) -> CheckResult:
        path = bench_gpu.in_new_process(profile_step, shape_argv(shape), Path.cwd() / shape)
        trace = path.read_bytes()
        path.with_suffix(".json.gz").write_bytes(gzip.compress(trace, 6))
        path.unlink()
        events = json.loads(trace)["traceEvents"]
        gaps, idle_us, total_us = largest_gaps(events)
        if not total_us:
            if is_emulated():
                raise NotMeasuredError("an emulated device records no kernels; the trace was written")
            raise AssertionError(f"{path.name} contains no kernels")
        detail = f"the GPU was idle for {idle_us / total_us:.0%} of {total_us / 1e3:.1f} ms; the largest gap is "
        rows = [f"| {gap.microseconds:.0f} | {gap.after[:60]} | {gap.before[:60]} | {gap.cause} |" for gap in gaps]
        table = ["| us | after | before | cause |", "|---:|---|---|---|", *rows, "", *kernel_table(events)]
        return CheckResult(f"{detail}{gaps[0].microseconds if gaps else 0:.0f} us", table)

    for shape in bench_gpu.SHAPES:
        yield f"{shape}, a step", lambda shape=shape: check(shape)


def kernel_table(events: list[dict]) -> list[str]:
    """Return the kernels of a Chrome trace that take most time, as a Markdown table."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    counts, microseconds = Counter(event["name"] for event in kernels), Counter()
    for event in kernels:
        microseconds[event["name"]] += event["dur"]
    rows = [f"| {us:.0f} | {counts[name]} | {name[:90]} |" for name, us in microseconds.most_common(NUM_KERNELS)]
    return ["| us | launches | kernel |", "|---:|---:|---|", *rows]


def profile_step(argv: list[str], folder: Path) -> Path:
    """Profile the fourth training step (metrics/profiler.py). Returns the trace file."""
    from arguments import parse_args
    from moe_trainer.metrics.profiler import Profiler
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.run import TrainState
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    flags = "--profile --profile-ranks 0 --use-pytorch-profiler --profile-step-start 3 --profile-step-end 4"
    args = parse_args([*argv, *flags.split(), "--tensorboard-dir", str(folder)], 1)
    run = make_run(args, 0, ParallelState.single(), 4, device="cuda")
    state, profiler = TrainState(), Profiler(args.output, 0)
    traces = []
    for number in range(1, 5):
        profiler.before(number)
        train_step(run, state, args.training.global_batch_size // args.training.micro_batch_size)
        state.iteration += 1
        traces.append(profiler.after(number))
    (trace,) = filter(None, traces)
    return trace


@dataclass(frozen=True)
class Gap:
    """Idle time of a GPU between two kernels or copies."""

    microseconds: float
    after: str
    before: str
    cause: str


def largest_gaps(events: list[dict], number: int = NUM_GAPS) -> tuple[list[Gap], float, float]:
    """Find the largest gaps of a Chrome trace.

    The cause of a gap is either a late launch, with the operator that launched the next kernel, or a wait of a kernel
    that had been launched in time.

    Returns:
        The gaps, the microseconds of all gaps, and the microseconds of the trace.
    """
    on_device = sorted(
        (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: event["ts"],
    )
    if not on_device:
        return [], 0.0, 0.0
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    operators = [event for event in events if event.get("cat") == "cpu_op"]

    def find_cause(event: dict, gap_start: float) -> str:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if launch is None:
            return "unknown"
        if launch["ts"] < gap_start:
            return f"launched {gap_start - launch['ts']:.0f} us before the gap: waited for another stream"
        enclosing = [
            operator
            for operator in operators
            if operator["tid"] == launch["tid"] and operator["ts"] <= launch["ts"] <= operator["ts"] + operator["dur"]
        ]
        name = max(enclosing, key=lambda operator: operator["ts"])["name"] if enclosing else "Python"
        return f"launched {launch['ts'] - gap_start:.0f} us late, in {name}"

    gaps, idle_us, last = [], 0.0, on_device[0]
    end = last["ts"] + last["dur"]
    for event in on_device[1:]:
        if event["ts"] > end:
            idle_us += event["ts"] - end
            gaps.append((event["ts"] - end, end, last, event))
        if event["ts"] + event["dur"] > end:
            end, last = event["ts"] + event["dur"], event
    gaps.sort(key=lambda gap: -gap[0])
    largest = [
        Gap(size, last["name"], event["name"], find_cause(event, start)) for size, start, last, event in gaps[:number]
    ]
    return largest, idle_us, end - on_device[0]["ts"]

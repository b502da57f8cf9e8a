"""What scripts/gpu_acceptance.py checks: the lines of every section, each a name and a function that checks it.

Packages are imported where a check needs them: what is missing then fails its own lines only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GAPS = 10
SLOWER = 0.9  # times as fast as torch: below it a kernel has no reason to be there
NO_SPEED = "an emulated device has no speed"


class NotMeasured(Exception):
    """What stands in the way of a line."""


@dataclass(frozen=True)
class Found:
    """What a line found: one line of text, and what belongs below the section's table."""

    detail: str
    below: list[str] = field(default_factory=list)


Check = Callable[[], "str | Found"]
"""Returns what was found; raises NotMeasured, or anything else where the line fails."""


def emulated() -> bool:
    """Whether the devices are those of tests/emulated_cuda."""
    import torch

    return torch.cuda.get_device_properties(0).uuid == "emulated"


def train(argv: list[str], device: str = "cuda", steps: int = 3, prepare: Callable | None = None):
    """Train in this process. Returns: proof.observe.Outcome."""
    import torch

    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.proof import observe

    torch.manual_seed(7)  # dropout draws from the global generator
    torch.backends.cuda.matmul.allow_tf32 = False
    return observe.train(parse_args(argv, 1), 0, ParallelState.single(), steps, prepare=prepare, device=device)


def close(one, other, tolerances) -> str:
    """How close two trainings are. Raises: AssertionError with what is too far apart."""
    from moe_trainer.proof.compare import closeness, compare

    differences = [str(difference) for difference in compare(one, other, tolerances)]
    assert not differences, f"{len(differences)} quantities differ: {'; '.join(differences[:3])}"
    return closeness(one, other)


# ---- sections: each yields the names of its lines with what checks them

def environment() -> Iterator[tuple[str, Check]]:
    """What is here."""
    import torch

    from scripts import doctor

    def nvidia_smi(*words: str) -> str:
        try:
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotMeasured(f"nvidia-smi does not run here ({error})") from error
        assert done.returncode == 0, (done.stdout + done.stderr).strip()
        return done.stdout.strip()

    def gpus() -> str:
        count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
        return f"{count} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"

    def capability() -> str:
        found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        text = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
        assert min(found) >= (8, 0), f"{text}: bf16 and grouped GEMMs need 8.0"
        return text

    def library(finding: doctor.Finding) -> Check:
        def check() -> str:
            if finding.problem is None:
                return finding.version or "here"
            if finding.name == "nccl" and emulated():
                raise NotMeasured("gloo takes NCCL's place on emulated devices")
            if finding.name in doctor.needed_names(found, []) or "cannot be imported" in finding.problem:
                raise AssertionError(finding.problem)
            raise NotMeasured(f"{finding.problem}: {finding.cost}")

        return check

    yield "driver", lambda: nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    yield "GPUs", gpus
    yield "compute capability", capability
    yield "links", lambda: Found("see below", nvidia_smi("topo", "-m").splitlines())
    found = [*doctor.look_around(), doctor.plain_package("torchtitan", "torchtitan", "its line of the benchmark is left out")]
    for finding in found:
        yield finding.name, library(finding)


def tests() -> Iterator[tuple[str, Check]]:
    """tests/gpu."""

    def run(file: Path) -> Check:
        def check() -> str:
            with tempfile.TemporaryDirectory() as folder:
                written = Path(folder, "results.xml")
                command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={written}", str(file)]
                subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL)
                assert written.exists(), "pytest ended without a report; see tests.log"
                suite = next(ET.parse(written).getroot().iter("testsuite"))
            number = {kind: int(suite.get(kind, 0)) for kind in ("tests", "failures", "errors", "skipped")}
            bad = [f"{case.get('name')}: {(case.find('failure') if case.find('error') is None else case.find('error')).get('message', '')[:200]}"
                   for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
            ran = number["tests"] - number["skipped"]
            why = "; ".join(sorted({skipped.get("message", "") for skipped in suite.iter("skipped")}))
            summary = f"{ran - len(bad)} passed, {len(bad)} failed, {number['skipped']} skipped" + (f" ({why})" if why else "")
            assert not bad and number["tests"], "; ".join([summary, *bad])
            if not ran:
                raise NotMeasured(summary)
            return summary

        return check

    for file in sorted((ROOT / "tests/gpu").glob("test_*.py")):
        yield file.name, run(file)


def parity() -> Iterator[tuple[str, Check]]:
    """Tiny presets in fp32."""
    from gpu.test_one_device import NEAR

    from scripts.bench_gpu import COMMON

    sizes = "--seq-length 64 --max-position-embeddings 64 --adam-eps 1e-5 --lr 1e-3 --train-iters 3 --lr-warmup-fraction 0"

    def check(preset: str) -> str:
        argv = [word for word in f"--preset {preset} {COMMON} {sizes}".split() if word != "--bf16"]
        return close(train(argv, "cpu"), train(argv), NEAR)

    for file in sorted((ROOT / "model_zoo").glob("*_tiny.yaml")):
        yield file.stem, lambda preset=file.stem: check(preset)


def waits() -> Iterator[tuple[str, Check]]:
    """Training steps that may wait at the documented places alone."""
    from emulated_cuda.test_waits import CASES, MICROBATCHES, expected_train
    from train.layouts import argv_of

    def check(flags: str, per_layer: int) -> str:
        argv = [*argv_of("plain"), "--moe-token-dispatcher-type", "alltoall", *flags.split()]
        steps = 3
        expected = {place: times * steps for place, times in expected_train(flags, per_layer, MICROBATCHES).items()}
        found = waits_of(argv, steps, tuple(expected))
        over = {place: times for place, times in found.items() if times > expected.get(place, 0)}
        assert not over, f"waits more often than documented: {over}, allowed {expected}"
        return f"in {steps} iterations of {MICROBATCHES} microbatches " + ", ".join(
            f"{times} in {place} ({expected[place]} allowed)" for place, times in sorted(found.items()))

    for name, (flags, per_layer) in CASES.items():
        yield name, lambda flags=flags, per_layer=per_layer: check(flags, per_layer)


def waits_of(argv: list[str], steps: int, places: tuple[str, ...]) -> dict[str, int]:
    """How often training steps wait in files of moe_trainer/. Raises: RuntimeError, torch's, for a wait anywhere else."""
    import torch
    from torch.overrides import TorchFunctionMode

    from arguments import parse_args
    from moe_trainer.memory.host_read import HostReads
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.proof.observe import make_run
    from moe_trainer.run import TrainState
    from moe_trainer.training.step import train_step

    found: dict[str, int] = {}
    begin, product = HostReads.start, f"{ROOT / 'moe_trainer'}{os.sep}"
    waiting = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__float__, torch.Tensor.__bool__}

    @contextlib.contextmanager
    def allowed(place: str):
        found[place] = found.get(place, 0) + 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("error")

    class Documented(TorchFunctionMode):
        """Lets the documented places wait."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            place = sys._getframe(1).f_code.co_filename.removeprefix(product)
            if place in places and function in waiting and args[0].is_cuda:
                with allowed(place):
                    return function(*args, **kwargs or {})
            return function(*args, **kwargs or {})

    def start(*args, **kwargs):
        values = begin(*args, **kwargs)

        def read():
            with allowed("memory/host_read.py"):
                return values()

        return read

    args = parse_args(argv, 1)
    run, state = make_run(args, 0, ParallelState.single(), steps + 2, device="cuda"), TrainState()
    microbatches = args.training.global_batch_size // args.training.micro_batch_size
    for _ in range(2):  # what is made once, and libraries that load
        train_step(run, state, microbatches)
        state.iteration += 1
    HostReads.start = start
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Documented():
            for _ in range(steps):
                train_step(run, state, microbatches)
                state.iteration += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
        HostReads.start = begin
    return found


def races() -> Iterator[tuple[str, Check]]:
    """Trainings that use side streams."""
    from gpu.test_memory import HOWS, LAYERS
    from gpu.test_one_device import FURTHER
    from gpu.test_one_device import NEAR as near
    from train.layouts import argv_of

    def check(kind: str, flags: str) -> str:
        argv = [*argv_of(kind), *flags.split()]
        if emulated():
            import emulation

            emulation.DEVICE().watch(True)
            emulation.DEVICE().lib.ec_check_races(1)
            train(argv)
            raise NotMeasured("torch's sanitizer does not see emulated streams; the emulated device's own check of every access passed")
        from torch.cuda import _sanitizer

        plain = train(argv, steps=2)
        _sanitizer.enable_cuda_sanitizer()
        return close(plain, train(argv, steps=2), near)

    for name, kind, flags in (
        ("plain", "plain", ""), ("overlapped optimizer", "distributed optimizer, overlap", ""), ("DeepSeek", "deepseek", ""),
        ("shared experts beside the exchange", "plain", FURTHER["shared experts"]), ("offload", "plain", f"{LAYERS} {HOWS['offload']}"),
    ):
        yield name, lambda kind=kind, flags=flags: check(kind, flags)


def graphs() -> Iterator[tuple[str, Check]]:
    """Captured and replayed against eager."""
    from gpu.test_cuda_graph import CASES, NEAR
    from memory.graphed import STEPS, line

    def check(kind: str, flags: str, graphed: list[str]) -> str:
        eager = line(kind, flags)
        return close(*(train([*eager, *more], steps=STEPS) for more in ([], graphed)), NEAR)

    for name, case in CASES.items():
        yield name, lambda case=case: check(*case)


def dispatchers() -> Iterator[tuple[str, Check]]:
    """Experts spread over 2, 4 and 8 GPUs."""
    import torch
    from gpu.test_flex_parity import KINDS, one_rank
    from gpu.test_one_device import NEAR
    from train.layouts import argv_of

    here = torch.cuda.device_count()

    def plain(dispatcher: str, ranks: int) -> str:
        argv = [*argv_of("plain"), "--micro-batch-size", "1", "--moe-token-dispatcher-type", dispatcher]
        one = train(argv, "cpu")
        return close(one, on_ranks(trained, ranks, [*argv, "--expert-model-parallel-size", str(ranks)])[0], NEAR)

    def flex(backend: str, ranks: int) -> str:
        if problem := importlib.import_module(f"moe_trainer.moe.dispatch.{backend}").problem():
            raise NotMeasured(problem)
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(one_rank, args=(folder, backend, 2, ranks), nprocs=ranks)
        return "the rows of every expert equal those of alltoall bit for bit, results and gradients within the rounding of bf16"

    def check(name: str, ranks: int) -> str:
        if ranks > here:
            raise NotMeasured(f"{here} GPU{'s' if here > 1 else ''} here, {ranks} are needed")
        detail = flex(name, ranks) if name in KINDS else plain(name, ranks)
        return f"{detail} (NCCL's place is taken by gloo)" if emulated() else detail

    for ranks in (2, 4, 8):
        for name in ("alltoall", "allgather", *KINDS):
            yield f"{name}, {ranks} GPUs", lambda name=name, ranks=ranks: check(name, ranks)


def on_ranks(work: Callable, ranks: int, *given) -> list:
    """Call work(rank, ranks, *given) on ranks with a GPU each, over NCCL. Returns: what they return, by rank."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one_rank, args=(ranks, folder, work, given), nprocs=ranks)
        return [torch.load(Path(folder, f"rank{rank}.pt"), weights_only=False) for rank in range(ranks)]


def _one_rank(rank: int, ranks: int, folder: str, work: Callable, given: tuple) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks, device_id=device)
    torch.save(work(rank, ranks, *given), Path(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def trained(rank: int, ranks: int, argv: list[str]):
    """One rank of a training."""
    from train.layouts import groups_of

    from arguments import parse_args
    from moe_trainer.proof import observe

    return observe.train(parse_args(argv, ranks), rank, groups_of(argv, rank, ranks), device=f"cuda:{rank}")


def kernels() -> Iterator[tuple[str, Check]]:
    """Triton against torch."""
    import torch

    from scripts.bench_kernels import APART, MEASURED, apart
    from scripts.bench_kernels import measure as measured
    from scripts.kernel_pairs import NAMES, make

    def need_triton() -> None:
        if importlib.util.find_spec("triton") is None:
            raise NotMeasured("the package triton is not installed")

    def numbers(name: str) -> str:
        need_triton()
        pair = make(name, "tiny" if emulated() else "parity", torch.bfloat16, "cuda")
        distance = max(apart(one, other) for one, other in zip(pair.kernel(), pair.plain(), strict=True))
        assert distance <= APART, f"apart by {distance:.1e}, allowed {APART:.0e}"
        return f"apart by {distance:.1e}{', in the interpreter of Triton' if emulated() else ''}"

    def speed(name: str, size: str) -> str:
        need_triton()
        if emulated():
            raise NotMeasured(NO_SPEED)
        _, _, plain, kernel, ratio, reaches, _ = measured(name, size, 20)
        torch.cuda.empty_cache()
        detail = f"torch {plain} ms, Triton {kernel} ms, {ratio} times as fast, {reaches}"
        assert float(ratio) >= SLOWER, f"slower than torch: {detail}"
        return detail

    for name in NAMES:
        yield f"{name}: numbers", lambda name=name: numbers(name)
        for size in MEASURED:
            yield f"{name}: time, {size}", lambda name=name, size=size: speed(name, size)


def slice_of(shape: str) -> list[str]:
    """The command line of a shape of bench_gpu.py: tiny on an emulated device, and not in Triton's interpreter, which takes minutes."""
    from scripts import bench_gpu

    return bench_gpu.command_line(shape, 64, True, "--triton-kernels none") if emulated() else bench_gpu.command_line(shape, bench_gpu.SEQ, False, "")


def benchmark() -> Iterator[tuple[str, Check]]:
    """scripts/bench_gpu.py, by its functions."""
    from scripts import bench_gpu

    def check(shape: str, contender: str) -> str:
        if problem := bench_gpu.problem(contender):
            raise NotMeasured(problem)
        tiny = emulated()
        if tiny and contender != "moe-trainer":
            raise NotMeasured(NO_SPEED)
        seconds, tokens, flops, share, peak, kinds = bench_gpu.apart(bench_gpu.CONTENDERS[contender], slice_of(shape), 2 if tiny else 8, "cuda", tiny)
        if tiny:
            raise NotMeasured(f"{NO_SPEED}; the program ran at tiny sizes")
        return (f"{seconds:.3f} s per step, {tokens:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s, {share:.0%} of the GEMM rate, "
                f"{peak:.1f} GiB; {', '.join(kinds)}")

    for shape in bench_gpu.SHAPES:
        for contender in bench_gpu.contenders(shape):
            yield f"{shape}, {contender}", lambda shape=shape, contender=contender: check(shape, contender)


def profile() -> Iterator[tuple[str, Check]]:
    """Gaps between kernels."""
    from scripts import bench_gpu

    def check(shape: str) -> Found:
        path = traced(slice_of(shape), Path.cwd())
        events = json.loads(path.read_text())["traceEvents"]
        gaps, idle, total = largest_gaps(events)
        if not total:
            if emulated():
                raise NotMeasured("an emulated device puts no kernels into a trace; the trace was written")
            raise AssertionError(f"{path.name} holds no kernels")
        return Found(f"the GPU had nothing to do for {idle / total:.0%} of {total / 1e3:.1f} ms; the largest gap is {gaps[0].microseconds:.0f} us", [
            "| us | after | before | because |", "|---:|---|---|---|",
            *(f"| {gap.microseconds:.0f} | {gap.after[:60]} | {gap.before[:60]} | {gap.because} |" for gap in gaps)])

    for shape in bench_gpu.SHAPES:
        yield f"{shape}, a step", lambda shape=shape: check(shape)


def traced(argv: list[str], folder: Path) -> Path:
    """Profile the fourth training step (report/profiler.py). Returns: the trace."""
    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.proof.observe import make_run
    from moe_trainer.report.profiler import Profiler
    from moe_trainer.run import TrainState
    from moe_trainer.training.step import train_step

    flags = ["--profile", "--profile-ranks", "0", "--use-pytorch-profiler", "--profile-step-start", "3", "--profile-step-end", "4", "--tensorboard-dir", str(folder)]
    args = parse_args([*argv, *flags], 1)
    run, state, profiler = make_run(args, 0, ParallelState.single(), 4, device="cuda"), TrainState(), Profiler(args.output, 0)
    path = None
    for number in range(1, 5):
        profiler.before(number)
        train_step(run, state, args.training.global_batch_size // args.training.micro_batch_size)
        state.iteration += 1
        path = profiler.after(number)
    assert path is not None, "the profiler wrote no trace"
    return path


@dataclass(frozen=True)
class Gap:
    """Time in which a GPU did nothing, between two of its kernels (or copies)."""

    microseconds: float
    after: str
    before: str
    because: str


def largest_gaps(events: list[dict], number: int = GAPS) -> tuple[list[Gap], float, float]:
    """The largest gaps of a Chrome trace. Returns: them, and the microseconds of all gaps and of the whole.

    because: the host started the next kernel too late, and in which operator it was; or the kernel had been started, and waited.
    """
    on_device = sorted((event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda event: event["ts"])
    if not on_device:
        return [], 0.0, 0.0
    launches = {event["args"]["correlation"]: event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})}
    operators = [event for event in events if event.get("cat") == "cpu_op"]

    def because(event: dict, idle_from: float) -> str:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if launch is None:
            return "unknown"
        if launch["ts"] < idle_from:
            return f"started {idle_from - launch['ts']:.0f} us before the gap: waited for another stream"
        inside = [operator for operator in operators
                  if operator["tid"] == launch["tid"] and operator["ts"] <= launch["ts"] <= operator["ts"] + operator["dur"]]
        return f"the host came {launch['ts'] - idle_from:.0f} us late, in {max(inside, key=lambda each: each['ts'])['name'] if inside else 'Python'}"

    gaps, idle, last = [], 0.0, on_device[0]
    end = last["ts"] + last["dur"]
    for event in on_device[1:]:
        if event["ts"] > end:
            idle += event["ts"] - end
            gaps.append((event["ts"] - end, end, last, event))
        if event["ts"] + event["dur"] > end:
            end, last = event["ts"] + event["dur"], event
    gaps.sort(key=lambda gap: -gap[0])
    found = [Gap(size, last["name"], event["name"], because(event, start)) for size, start, last, event in gaps[:number]]
    return found, idle, end - on_device[0]["ts"]


SECTIONS: dict[str, Callable[[], Iterator[tuple[str, Check]]]] = {
    section.__name__: section
    for section in (environment, tests, parity, waits, races, graphs, dispatchers, kernels, benchmark, profile)
}

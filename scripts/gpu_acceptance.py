#!/usr/bin/env python3
"""The first hour on a machine with GPUs: run everything that only a GPU can show, and write one dated report.

    python scripts/gpu_acceptance.py                                  all sections, into gpu_acceptance-DATE-TIME/
    python scripts/gpu_acceptance.py --only waits graphs --output FOLDER
    python scripts/gpu_acceptance.py --short                          the first line of every section: does the program itself work here?

Sections, in this order:

    environment   driver, GPUs, links, torch, CUDA, NCCL; every optional library with its version, or the error of its import
    tests         tests/gpu, one pytest for each file
    parity        every tiny preset, three steps: one process on the CPU against the GPU
    waits         training steps under torch.cuda.set_sync_debug_mode("error"), outside of the places that are documented to wait
    races         short trainings under torch's stream sanitizer (torch.cuda._sanitizer)
    graphs        captured and replayed against eager, as in tests/gpu/test_cuda_graph.py
    dispatchers   experts on 2, 4 and 8 GPUs: alltoall and allgather against one process, DeepEP and HybridEP against alltoall
    kernels       every Triton kernel against torch: numbers and time
    benchmark     scripts/bench_gpu.py: slices of large models, transformers and torchtitan where they are installed
    profile       the ten largest gaps between kernels of one training step, and what each waited for

Every section is a process of its own. A line that fails, crashes or takes longer than --time-limit is a failed line; the section goes on
behind it in a new process. Each line is "passed", "failed" or "not measured" with the reason. The folder holds report.md, report.json,
a log for each section and the profiler's trace.

Exit code: 0, nothing failed; 1, something failed; 2, the command line is wrong or there is no CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"
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


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    section: str
    name: str
    verdict: str
    detail: str
    seconds: float = 0.0
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
    import xml.etree.ElementTree as ET

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
            told = f"{ran - len(bad)} passed, {len(bad)} failed, {number['skipped']} skipped" + (f" ({why})" if why else "")
            assert not bad and number["tests"], "; ".join([told, *bad])
            if not ran:
                raise NotMeasured(told)
            return told

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
    from emulated_cuda.test_waits import CASES, LAYERS, MICROBATCHES, PER_ITERATION
    from train.layouts import argv_of

    def check(flags: str, per_layer: int) -> str:
        argv = [*argv_of("plain"), "--moe-token-dispatcher-type", "alltoall", *flags.split()]
        steps = 3
        expected = {place: times * steps for place, times in PER_ITERATION.items()}
        expected["memory/host_read.py"] = per_layer * LAYERS * MICROBATCHES * steps
        found = waits_of(argv, steps, tuple(expected))
        over = {place: times for place, times in found.items() if times > expected[place]}
        assert not over, f"waits more often than documented: {over}, allowed {expected}"
        return f"in {steps} steps " + ", ".join(f"{times} in {place}" for place, times in sorted(found.items()))

    for name, (flags, per_layer) in CASES.items():
        yield name, lambda flags=flags, per_layer=per_layer: check(flags, per_layer)


def waits_of(argv: list[str], steps: int, places: tuple[str, ...]) -> dict[str, int]:
    """How often training steps wait in files of moe_trainer/. Raises: RuntimeError, torch's, for a wait anywhere else."""
    import contextlib
    import sys

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
    import importlib

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
        return "rows equal those of alltoall bit for bit, results and gradients within the rounding of bf16"

    def check(name: str, ranks: int) -> str:
        if ranks > here:
            raise NotMeasured(f"{here} GPU{'s' if here > 1 else ''} here, {ranks} are needed")
        told = flex(name, ranks) if name in KINDS else plain(name, ranks)
        return f"{told} (NCCL's place is taken by gloo)" if emulated() else told

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
    import importlib.util

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
        told = f"torch {plain} ms, Triton {kernel} ms, {ratio} times as fast, {reaches}"
        assert float(ratio) >= SLOWER, f"slower than torch: {told}"
        return told

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


# ---- running them: this program is also the process of a section

def run_section(section: str, written: Path, skip: int, most: int | None) -> None:
    """The process of a section: check its lines from number `skip` on, up to number `most`, and add what came out to a file."""

    def write(**record) -> None:
        with written.open("a") as file:
            file.write(json.dumps(record) + "\n")

    for number, (name, check) in enumerate(SECTIONS[section]()):
        if number < skip:
            continue
        if number == most:
            break
        write(begins=name)
        start, below = time.monotonic(), []
        try:
            found = check()
            verdict, detail = PASSED, found if isinstance(found, str) else found.detail
            below = [] if isinstance(found, str) else found.below
        except NotMeasured as error:
            verdict, detail = NOT_MEASURED, str(error)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            verdict, detail = FAILED, f"{type(error).__name__}: {error}"
        write(**asdict(Line(section, name, verdict, " ".join(detail.split())[:600], time.monotonic() - start, below)))
    write(ends=True)


def supervise(section: str, folder: Path, limit: float, most: int | None, program: Path) -> Iterator[Line]:
    """Run a section in processes of its own, a new one behind each line that ended it. Yields: its lines."""
    written, log, done = folder / f"{section}.jsonl", folder / f"{section}.log", 0
    while True:
        written.unlink(missing_ok=True)
        written.touch()
        more = [] if most is None else ["--most", str(most)]
        command = [sys.executable, str(program), "--run-section", section, str(written.resolve()), str(done), *more]
        with log.open("a") as out:
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        read, running, changed, ended = 0, None, time.monotonic(), False
        try:
            while True:
                alive, records = process.poll() is None, written.read_text().splitlines()
                for record in map(json.loads, records[read:]):
                    ended, running = ended or "ends" in record, record.get("begins")
                    if "verdict" in record:
                        done += 1
                        yield Line(**record)
                changed, read = time.monotonic() if len(records) > read else changed, len(records)
                late = time.monotonic() - changed > limit
                if not alive or late:
                    break
                time.sleep(0.1)
        finally:
            _end(process)
        if ended:
            written.unlink()
            return
        why = f"took longer than {limit:.0f} s (--time-limit)" if late else f"its process ended with {process.returncode}"
        yield Line(section, running or "between lines", FAILED, f"{why}; see {log.name}", time.monotonic() - changed)
        if running is None:
            return  # what makes the lines failed
        done += 1


def _end(process: subprocess.Popen) -> None:
    """End the process and all it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def report(lines: list[Line], head: dict[str, str]) -> str:
    """The report as Markdown: what failed first, then every line."""

    def table(of: list[Line]) -> list[str]:
        return ["| line | verdict | what was found | s |", "|---|---|---|---:|",
                *(f"| {each.name} | {f'**{each.verdict}**' if each.verdict == FAILED else each.verdict} | {each.detail.replace('|', '/')} | {each.seconds:.1f} |"
                  for each in of)]

    sections = list(dict.fromkeys(line.section for line in lines))
    of = {section: [line for line in lines if line.section == section] for section in sections}
    text = ["# GPU acceptance", "", *(f"- {name}: {value}" for name, value in head.items()), "",
            f"| section | {PASSED} | {FAILED} | {NOT_MEASURED} | s |", "|---|---:|---:|---:|---:|"]
    for section in sections:
        counts = [sum(line.verdict == verdict for line in of[section]) for verdict in (PASSED, FAILED, NOT_MEASURED)]
        text.append(f"| {section} | {' | '.join(map(str, counts))} | {sum(line.seconds for line in of[section]):.0f} |")
    if failed := [Line(line.section, f"{line.section}: {line.name}", line.verdict, line.detail, line.seconds) for line in lines if line.verdict == FAILED]:
        text += ["", "## What failed", "", *table(failed)]
    for section in sections:
        text += ["", f"## {section}", "", *table(of[section])]
        for line in of[section]:
            if line.below:
                fence = [] if line.below[0].startswith("|") else ["```"]
                text += ["", f"{line.name}:", "", *fence, *line.below, *fence]
    return "\n".join(text) + "\n"


def facts() -> dict[str, str]:
    """Where and with what this ran."""
    import torch

    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "device": f"{device}, EMULATED on the CPU (docs/testing_without_gpu.md): nothing here is about speed, NCCL or compiled kernels" if emulated() else device,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}", "python": sys.version.split()[0], "commit": done.stdout.strip() or "unknown",
    }


def main(argv: list[str], program: Path = Path(__file__).resolve()) -> int:
    """Run the sections. program: what calls this, to be run for each section. Returns: the exit code."""
    if argv[:1] == ["--run-section"]:
        section, written, skip, *most = argv[1:]
        run_section(section, Path(written), int(skip), int(most[1]) if most else None)
        return 0
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Sections and exit codes: see the head of this file.")
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=SECTIONS, default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="a folder that does not exist yet")
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS", help="of one line (1800)")
    parser.add_argument("--short", action="store_true", help="the first line of every section only")
    given = parser.parse_args(argv)
    folder = given.output or Path(f"gpu_acceptance-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if given.time_limit <= 0:
        parser.error(f"--time-limit {given.time_limit:g}: a positive number of seconds is needed")
    if folder.exists():
        parser.error(f"--output {folder} exists: give the name of a new folder")
    if problem := no_device():
        parser.error(problem)
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no section outlives this process
    head, lines = facts(), []
    for section in given.only:
        for line in supervise(section, folder, given.time_limit, 1 if given.short else None, program):
            lines.append(line)
            print(f"{line.section}: {line.name}: {line.verdict}: {line.detail}", flush=True)
            (folder / "report.md").write_text(report(lines, head))
            (folder / "report.json").write_text(json.dumps({**head, "lines": [asdict(each) for each in lines]}, indent=1) + "\n")
    counts = ", ".join(f"{sum(line.verdict == verdict for line in lines)} {verdict}" for verdict in (PASSED, FAILED, NOT_MEASURED))
    print(f"{counts}; {folder / 'report.md'}")
    return int(any(line.verdict == FAILED for line in lines))


def no_device() -> str | None:
    """What is missing for the whole program; None if nothing is."""
    from moe_trainer.errors import InputError, need_packages

    try:
        need_packages("torch", "numpy", "safetensors", "pytest", "hypothesis")
    except InputError as error:
        return str(error)
    import torch

    if torch.cuda.is_available():
        return None
    why = "this torch is built without CUDA" if not torch.backends.cuda.is_built() else "torch sees no device (driver, CUDA_VISIBLE_DEVICES)"
    return (f"{why}: a machine with NVIDIA GPUs of compute capability 8.0 or later is needed. On the emulated device, from the checkout:\n"
            "EMULATED_CUDA=2 EMULATED_CUDA_LIBRARY=$(python tests/emulated_cuda/build.py) PYTHONPATH=tests/emulated_cuda/site TRITON_INTERPRET=1 "
            "python scripts/gpu_acceptance.py (docs/testing_without_gpu.md)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

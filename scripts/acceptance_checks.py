"""Checks of scripts/gpu_acceptance.py: the lines of the sections that may run side by side, each a name and a function.

Packages are imported by the checks that need them, so that a missing one fails only their lines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("qwen3", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
RUN_FLAGS = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 0 --train-iters 4 --eval-iters 0 --log-interval 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 511 --bf16"
)


class NotMeasuredError(Exception):
    """A line cannot be measured; the message is the reason."""


@dataclass(frozen=True)
class CheckResult:
    """Result of a line: one line of text, and lines to print below the table of the section."""

    detail: str
    below: list[str] = field(default_factory=list)


Check = Callable[[], "str | CheckResult"]
"""Returns the result. Raises NotMeasuredError, or another exception if the line fails."""


def is_emulated() -> bool:
    """Return whether the devices are those of tests/emulated_cuda."""
    import torch

    return torch.cuda.get_device_properties(0).uuid == "emulated"


def train(argv: list[str], device: str = "cuda", steps: int = 3, prepare: Callable | None = None):
    """Train in this process. Returns the recorded trace."""
    import torch

    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.verification import training_trace

    torch.manual_seed(7)  # dropout draws from the global generator
    torch.backends.cuda.matmul.allow_tf32 = False
    return training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), steps, prepare=prepare, device=device)


def assert_close(reference, actual, tolerances) -> str:
    """Compare two trainings. Returns how close they are.

    Raises:
        AssertionError: if a quantity differs by more than its tolerance.
    """
    from moe_trainer.verification.compare_runs import compare, describe_agreement

    differences = [str(difference) for difference in compare(reference, actual, tolerances)]
    assert not differences, f"{len(differences)} quantities differ: {'; '.join(differences[:3])}"
    return describe_agreement(reference, actual)


# ---- sections: each yields the names and checks of its lines


def environment() -> Iterator[tuple[str, Check]]:
    """Hardware, driver and libraries."""
    import torch

    from moe_trainer.commands import doctor

    def nvidia_smi(*words: str) -> str:
        try:
            process = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotMeasuredError(f"nvidia-smi does not run here ({error})") from error
        assert process.returncode == 0, (process.stdout + process.stderr).strip()
        return process.stdout.strip()

    def gpus() -> str:
        count, properties = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        return f"{count} x {properties.name}, {memory}, {properties.multi_processor_count} multiprocessors"

    def capability() -> str:
        capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        text = ", ".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
        assert min(capabilities) >= (8, 0), f"{text}: bf16 and grouped GEMMs need 8.0"
        return text

    def library(finding: doctor.Finding) -> Check:
        def check() -> str:
            if finding.problem is None:
                return finding.version or "installed"
            if finding.name == "nccl" and is_emulated():
                raise NotMeasuredError("emulated devices use gloo instead of NCCL")
            if finding.name in doctor.get_required_names(findings, []) or "cannot be imported" in finding.problem:
                raise AssertionError(finding.problem)
            raise NotMeasuredError(f"{finding.problem}: {finding.cost}")

        return check

    def driver() -> CheckResult:
        version = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
        return CheckResult(version, nvidia_smi().splitlines())

    def cudnn() -> str:
        if is_emulated():
            raise NotMeasuredError("an emulated device has no cuDNN")
        return str(torch.backends.cudnn.version())

    def packages() -> CheckResult:
        names = sorted({f"{each.name} {each.version}" for each in importlib.metadata.distributions()})
        return CheckResult(f"{len(names)} packages", names)

    yield "driver", driver
    yield "GPUs", gpus
    yield "compute capability", capability
    yield "links", lambda: CheckResult("see below", nvidia_smi("topo", "-m").splitlines())
    yield "cuDNN", cudnn
    yield "packages", packages
    findings = [
        *doctor.collect_environment(),
        doctor.find_package("torchtitan", "torchtitan", "its line of the benchmark is skipped"),
    ]
    for finding in findings:
        yield finding.name, library(finding)


def runs() -> Iterator[tuple[str, Check]]:
    """Four iterations of pretrain_moe.py, in bf16."""

    def check(preset: str) -> str:
        flags = f"--preset {preset}_tiny {RUN_FLAGS} {run_sizes(is_emulated())}"
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "pretrain_moe.py"), *flags.split()]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, sep="\n", flush=True)
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr.strip()[-400:]}"
        losses = re.findall(r"lm loss: (\S+)", done.stdout + done.stderr)
        assert len(losses) == 4, f"{len(losses)} iterations were logged"
        return f"lm loss {losses[0]} to {losses[-1]}"

    for preset in RUNS:
        yield preset, lambda preset=preset: check(preset)


def run_sizes(tiny: bool) -> str:
    """Return the flags of `runs` that depend on the device."""
    seq = 32 if tiny else 256
    return f"--seq-length {seq} --max-position-embeddings {seq}" + " --triton-kernels none" * tiny


def tests() -> Iterator[tuple[str, Check]]:
    """One line, and one pytest process, for each function of tests/gpu."""

    def run(test: str) -> Check:
        def check() -> str:
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder, "results.xml")
                options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
                command = [sys.executable, "-m", "pytest", *options, f"tests/gpu/{test}"]
                subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL)
                assert report.exists(), "pytest ended without a report; see the log"
                suite = next(ET.parse(report).getroot().iter("testsuite"))
            num_tests, num_skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failures = []
            for case in suite.iter("testcase"):
                failure = case.find("failure") if case.find("error") is None else case.find("error")
                if failure is not None:
                    failures.append(f"{case.get('name')}: {failure.get('message', '')[:200]}")
            num_run = num_tests - num_skipped
            reasons = "; ".join(sorted({skipped.get("message", "") for skipped in suite.iter("skipped")}))
            summary = f"{num_run - len(failures)} passed, {len(failures)} failed, {num_skipped} skipped"
            summary += f" ({reasons})" if reasons else ""
            assert not failures and num_tests, "; ".join([summary, *failures])
            if not num_run:
                raise NotMeasuredError(summary)
            return summary

        return check

    for file in sorted((ROOT / "tests/gpu").glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE):
            yield f"{file.stem}: {name}", run(f"{file.name}::{name}")


def parity() -> Iterator[tuple[str, Check]]:
    """Tiny presets in fp32: the CPU against the GPU."""
    from gpu.test_one_device import NEAR

    from scripts.benchmarks.bench_gpu import COMMON

    sizes = "--seq-length 64 --max-position-embeddings 64 --adam-eps 1e-5 --lr 1e-3 --train-iters 3"

    def check(preset: str) -> str:
        flags = f"--preset {preset} {COMMON.removeprefix('--bf16 ')} {sizes} --lr-warmup-fraction 0"
        argv = flags.split()
        return assert_close(train(argv, "cpu"), train(argv), NEAR)

    for file in sorted((ROOT / "model_zoo").glob("*_tiny.yaml")):
        yield file.stem, lambda preset=file.stem: check(preset)


def waits() -> Iterator[tuple[str, Check]]:
    """Training steps that may wait for the device only at the documented places."""
    from emulated_cuda.test_waits import CASES, MICROBATCHES, expected_train
    from training.layouts import make_argv

    def check(flags: str, per_layer: int) -> str:
        argv = [*make_argv("plain"), "--moe-token-dispatcher-type", "alltoall", *flags.split()]
        steps = 3
        expected = {place: times * steps for place, times in expected_train(flags, per_layer, MICROBATCHES).items()}
        counts = count_waits(argv, steps, tuple(expected))
        excess = {place: times for place, times in counts.items() if times > expected.get(place, 0)}
        assert not excess, f"waits more often than documented: {excess}, allowed {expected}"
        return f"in {steps} iterations of {MICROBATCHES} microbatches " + ", ".join(
            f"{times} in {place} ({expected[place]} allowed)" for place, times in sorted(counts.items())
        )

    for name, (flags, per_layer) in CASES.items():
        yield name, lambda flags=flags, per_layer=per_layer: check(flags, per_layer)


def count_waits(argv: list[str], steps: int, places: tuple[str, ...]) -> dict[str, int]:
    """Count the waits of training steps for the device in `places`, files of moe_trainer/ that may wait.

    Raises:
        RuntimeError: from torch, for a wait in another file.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    from arguments import parse_args
    from moe_trainer.memory.host_read import AsyncHostReader
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.run import TrainState
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    counts: dict[str, int] = {}
    original_start, package = AsyncHostReader.start, f"{ROOT / 'moe_trainer'}{os.sep}"
    syncing = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__float__, torch.Tensor.__bool__}

    @contextlib.contextmanager
    def allow_sync(place: str):
        counts[place] = counts.get(place, 0) + 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("error")

    class AllowDocumentedWaits(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            place = sys._getframe(1).f_code.co_filename.removeprefix(package)
            if place in places and function in syncing and args[0].is_cuda:
                with allow_sync(place):
                    return function(*args, **kwargs or {})
            return function(*args, **kwargs or {})

    def start(*args, **kwargs):
        values = original_start(*args, **kwargs)

        def read():
            with allow_sync("memory/host_read.py"):
                return values()

        return read

    args = parse_args(argv, 1)
    run, state = make_run(args, 0, ParallelState.single(), steps + 2, device="cuda"), TrainState()
    microbatches = args.training.global_batch_size // args.training.micro_batch_size
    for _ in range(2):  # one-time allocations, and libraries that are loaded
        train_step(run, state, microbatches)
        state.iteration += 1
    AsyncHostReader.start = start
    torch.cuda.set_sync_debug_mode("error")
    try:
        with AllowDocumentedWaits():
            for _ in range(steps):
                train_step(run, state, microbatches)
                state.iteration += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
        AsyncHostReader.start = original_start
    return counts


def races() -> Iterator[tuple[str, Check]]:
    """Trainings that use side streams, under the stream sanitizer."""
    from gpu.test_memory import HOWS, LAYERS
    from gpu.test_one_device import FURTHER, NEAR
    from training.layouts import make_argv

    def check(kind: str, flags: str) -> str:
        argv = [*make_argv(kind), *flags.split()]
        if is_emulated():
            import emulation

            emulation.DEVICE().watch(True)
            emulation.DEVICE().lib.ec_check_races(1)
            train(argv)
            raise NotMeasuredError(
                "torch's sanitizer does not see emulated streams; the access check of the emulated device passed"
            )
        from torch.cuda import _sanitizer

        plain = train(argv, steps=2)
        _sanitizer.enable_cuda_sanitizer()
        return assert_close(plain, train(argv, steps=2), NEAR)

    for name, kind, flags in (
        ("plain", "plain", ""),
        ("overlapped optimizer", "distributed optimizer, overlap", ""),
        ("DeepSeek", "deepseek", ""),
        ("shared experts overlapped with the exchange", "plain", FURTHER["shared experts"]),
        ("offload", "plain", f"{LAYERS} {HOWS['offload']}"),
    ):
        yield name, lambda kind=kind, flags=flags: check(kind, flags)


def graphs() -> Iterator[tuple[str, Check]]:
    """CUDA graphs against eager execution."""
    from gpu.test_cuda_graph import CASES, NEAR
    from memory.graphed import STEPS, line, same_accumulation_flags

    def check(kind: str, flags: str, graphed: list[str]) -> str:
        eager = line(kind, flags)
        extras = same_accumulation_flags(graphed), graphed
        return assert_close(*(train([*eager, *extra], steps=STEPS) for extra in extras), NEAR)

    for name, case in CASES.items():
        yield name, lambda case=case: check(*case)


def dispatchers() -> Iterator[tuple[str, Check]]:
    """Dispatchers with experts on 2, 4 and 8 GPUs."""
    import torch
    from gpu.test_flex_parity import library_problem, one_rank
    from gpu.test_one_device import NEAR
    from training.layouts import make_argv

    from arguments.mechanisms.dispatchers import BACKENDS

    num_gpus = torch.cuda.device_count()

    def plain(dispatcher: str, ranks: int) -> str:
        argv = [*make_argv("plain"), "--micro-batch-size", "1", "--moe-token-dispatcher-type", dispatcher]
        parallel_argv = [*argv, "--expert-model-parallel-size", str(ranks)]
        return assert_close(train(argv, "cpu"), run_on_ranks(train_on_rank, ranks, parallel_argv)[0], NEAR)

    def flex(backend: str, ranks: int) -> str:
        if problem := library_problem(backend):
            raise NotMeasuredError(problem)
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(one_rank, args=(folder, backend, 2, ranks), nprocs=ranks)
        return "tokens of every expert bitwise equal to alltoall, outputs and gradients within the rounding of bf16"

    def check(name: str, ranks: int) -> str:
        if ranks > num_gpus:
            raise NotMeasuredError(f"{ranks} GPUs are needed, {num_gpus} available")
        detail = flex(name, ranks) if name in BACKENDS else plain(name, ranks)
        return f"{detail} (with gloo instead of NCCL)" if is_emulated() else detail

    for ranks in (2, 4, 8):
        for name in ("alltoall", "allgather", *BACKENDS):
            yield f"{name}, {ranks} GPUs", lambda name=name, ranks=ranks: check(name, ranks)


def run_on_ranks(work: Callable, ranks: int, *args) -> list:
    """Call work(rank, ranks, *args) on ranks with one GPU each, over NCCL. Returns the results by rank."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, args=(ranks, folder, work, args), nprocs=ranks)
        return [torch.load(Path(folder, f"rank{rank}.pt"), weights_only=False) for rank in range(ranks)]


def _run_rank(rank: int, ranks: int, folder: str, work: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks, device_id=device
    )
    torch.save(work(rank, ranks, *args), Path(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def train_on_rank(rank: int, ranks: int, argv: list[str]):
    """Train as one rank of a group. Returns the recorded trace."""
    from training.layouts import create_groups

    from arguments import parse_args
    from moe_trainer.verification import training_trace

    return training_trace.train(parse_args(argv, ranks), rank, create_groups(argv, rank, ranks), device=f"cuda:{rank}")


def kernels() -> Iterator[tuple[str, Check]]:
    """Triton kernels against torch: results."""
    import torch

    from scripts.benchmarks.bench_kernels import MAX_ERROR, relative_error
    from scripts.benchmarks.kernel_cases import NAMES, make

    def check(name: str) -> str:
        require_triton()
        case = make(name, "tiny" if is_emulated() else "parity", torch.bfloat16, "cuda")
        error = max(relative_error(*pair) for pair in zip(case.kernel(), case.plain(), strict=True))
        assert error <= MAX_ERROR, f"relative error {error:.1e}, allowed {MAX_ERROR:.0e}"
        return f"relative error {error:.1e}{', in the interpreter of Triton' if is_emulated() else ''}"

    for name in NAMES:
        yield name, lambda name=name: check(name)


def require_triton() -> None:
    """Raise NotMeasuredError without the package triton."""
    if importlib.util.find_spec("triton") is None:
        raise NotMeasuredError("the package triton is not installed")

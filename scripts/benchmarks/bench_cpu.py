"""Train a small Mixtral on this CPU, with moe-trainer, Hugging Face transformers and torchtitan, and compare.

    python scripts/benchmarks/bench_cpu.py [--models small wide many] [--rounds 7] [--steps 4] [--threads N]
        [--dtypes fp32 bf16] [--write]

Three models. `small`: hidden 256, 4 layers, 8 experts top-2 with ffn 512, 8 heads over 4 key-value heads, sequences of
256, micro-batch 4. `wide` and `many` are large enough to be bound by GEMMs: hidden 512, 8 layers, 8 heads,
ffn 1,024, sequences of 512, micro-batch 8, with 8 experts top-2 and with 64 experts top-8 (822 M parameters: 17 GB).
All: vocabulary 8,192, balancing loss 0.01, AdamW, gradient clipping at 1. Each contender is a separate process that
builds the model and then trains steps on request. They begin one after the other; one that fails, dies or does not
answer within --limit seconds is left out, and the table shows why. With the small model rounds alternate between them,
so that a disturbance of the machine meets all alike, and the median round counts; the large ones do not fit in memory
together and run one by one, each with the GEMM rate measured before and after it. Ours is `train.train_step`,
everything a training iteration does except reading data from files.

transformers runs as fast as it can here: the fastest of its expert implementations (tried first), sdpa attention,
torch's fused AdamW; in bf16 its parameters and optimizer state are bf16 throughout, which is less work than our fp32
main parameters and gradients; "transformers, autocast" keeps fp32 parameters and multiplies in bf16, which is nearer to
what we do. torchtitan (where it is installed: it is no dependency) is its Qwen3 without the norms of queries and keys,
sdpa, without a balancing loss; its experts multiply in bf16 whatever the dtype, so it appears in bf16 only; its
releases after 0.3.0 also need the package spmd_types. All but
"default malloc" run with the allocator settings that moe-trainer makes for itself at start (memory/host_allocator.py);
"default malloc" is transformers as it comes.

Printed and (with --write) recorded in scripts/bench_results/: tokens per second, peak memory above that of the imported
libraries, and the share of the GEMM rate of this machine, measured in the same run. Operations are Megatron's model
FLOPs: 6 per active weight of the GEMMs, head included, router not, plus attention at its causal half; the
embedding is a lookup.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_trainer.exit_codes import ExitCode
from scripts import provenance
from scripts.benchmarks import bench_common
from scripts.benchmarks.bench_baselines import MODELS, Model, build_ours, build_torchtitan, build_transformers

GEMM_SIZE = 2048
LARGE_ROUNDS = 3  # of a model that is too large to run together with others
REQUIRED = ("moe-trainer", "gemm")
IMPLEMENTATIONS = ("grouped_mm", "eager")


def memory_mb() -> float:
    """Return the resident memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_memory_mb() -> float:
    """Return the largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build_gemm(model: Model, dtype: str):
    """Return a step that is one square GEMM, and a description."""
    import torch

    gemm = bench_common.make_square_gemm({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], GEMM_SIZE)

    def step() -> float:
        gemm()
        return 0.0

    return step, f"{GEMM_SIZE} x {GEMM_SIZE} x {GEMM_SIZE}"


def builders(dtype: str) -> dict:
    """Return by contender the function that builds its step; transformers for each way to compute its experts."""
    found = {"moe-trainer": build_ours}
    for implementation in IMPLEMENTATIONS if importlib.util.find_spec("transformers") else ():
        build = functools.partial(build_transformers, implementation=implementation)
        found[f"transformers/{implementation}"] = found[f"transformers, default malloc/{implementation}"] = build
        if dtype == "bf16":
            found[f"transformers, autocast/{implementation}"] = functools.partial(build, autocast=True)
    if dtype == "bf16" and importlib.util.find_spec("torchtitan"):
        found["torchtitan"] = build_torchtitan
    return {**found, "gemm": build_gemm}


class AbsentError(Exception):
    """A contender that cannot be measured, and why."""


@dataclass(frozen=True)
class Failure:
    """What a contender's process answers when something is raised in it."""

    reason: str


def contender_process(pipe: Connection, name: str, build: Callable, model: Model, dtype: str, threads: int) -> None:
    """Answer each number n with (seconds of n steps, last loss) or with a Failure. The main function of a process."""
    try:
        run_contender(pipe, name, build, model, dtype, threads)
    except Exception as error:
        pipe.send(Failure(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))


def run_contender(pipe: Connection, name: str, build: Callable, model: Model, dtype: str, threads: int) -> None:
    """Build, report what was built, and train steps on request."""
    import torch

    torch.set_num_threads(threads)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if "default malloc" not in name:
        from moe_trainer.memory.host_allocator import tune_malloc

        tune_malloc()
    if name.startswith("transformers"):
        import transformers  # noqa: F401 - its memory belongs to the libraries, not to the training
    if name == "torchtitan":
        import torchtitan.models.qwen3  # noqa: F401 - likewise
    base = memory_mb()
    step, description = build(model, dtype)
    step()
    pipe.send(description)
    while (steps := pipe.recv()) > 0:
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        pipe.send((time.perf_counter() - start, loss))
    pipe.send(peak_memory_mb() - base)


class Contender:
    """A running contender. Requests have a time limit: one that hangs or dies is ended, and AbsentError is raised."""

    def __init__(self, name: str, build: Callable, model: Model, dtype: str, threads: int, limit: float):
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._limit = limit
        self._process = context.Process(
            target=contender_process, args=(there, name, build, model, dtype, threads), daemon=True
        )
        self._process.start()
        there.close()  # so that the end of the process is the end of the pipe
        self.figures: dict = {"seconds": []}

    def _answer(self) -> Any:
        answer = Failure(f"no answer within {self._limit:.0f} s")
        try:
            if self._pipe.poll(self._limit):
                answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            answer = Failure(f"its process ended with exit code {self._process.exitcode}")
        if isinstance(answer, Failure):
            self.end()
            raise AbsentError(answer.reason)
        return answer

    def ready(self) -> "Contender":
        """Wait until it has trained its first step."""
        self.figures["what"] = self._answer()
        return self

    def turn(self, steps: int) -> float:
        """Seconds per step."""
        self._pipe.send(steps)
        seconds, self.figures["loss"] = self._answer()
        return seconds / steps

    def leave(self) -> None:
        """End it in order, with its peak memory."""
        self._pipe.send(0)
        self.figures["peak_memory_mb"] = round(self._answer())
        self._process.join(10)
        self.end()

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()


def family(name: str) -> str:
    """The contender without the implementation of its experts."""
    return name.split("/")[0]


class Race:
    """The contenders of one model and dtype: those that run, their figures, and why others are absent."""

    def __init__(self, found: Mapping[str, Callable], start: Callable[[str, Callable], Contender]):
        self.found = found
        self.start = start
        self.running: dict[str, Contender] = {}
        self.results: dict[str, dict] = {}
        self.absent: dict[str, str] = {}

    def _ask(self, name: str, action: Callable[[], Any]) -> Any:
        """Return what an action on a contender returns, or None after noting its absence. Ours must not be absent."""
        try:
            return action()
        except (AbsentError, OSError) as error:
            say(f"{name} is left out: {error}")
            if name in REQUIRED:
                raise
            self.absent[name] = str(error)
            self.running.pop(name, None)
            self.results.pop(name, None)
            return None

    def begin(self, name: str) -> Contender | None:
        """Start a contender and wait for it: while one warms up no other does."""
        one = self._ask(name, lambda: self.start(name, self.found[name]).ready())
        if one is not None:
            self.running[name] = one
            self.results[name] = one.figures
        return one

    def turn(self, name: str, steps: int) -> float | None:
        """Seconds per step of a contender's turn."""
        return self._ask(name, lambda: self.running[name].turn(steps))

    def leave(self, name: str) -> None:
        """End a contender; its figures stay."""
        self._ask(name, lambda: self.running[name].leave())
        self.running.pop(name, None)

    def together(self, rounds: int, steps: int) -> None:
        """All in turns, once each has warmed up by itself. Of each family the fastest takes part."""
        begun = time.perf_counter()
        for number, name in enumerate(self.found):
            self.begin(name)
            if number == 0:
                minutes = len(self.found) * (time.perf_counter() - begun) / 60
                say(f"{len(self.found)} contenders warm up one after the other: about {minutes:.0f} min")
        best: dict[str, tuple[float, str]] = {}
        for name in list(self.running):
            trials = [self.turn(name, steps) for _ in range(3) if name in self.running]
            if name in self.running:
                best[family(name)] = min(best.get(family(name), (float("inf"), name)), (min(trials), name))
        for name in [name for name in self.running if best[family(name)][1] != name]:
            self.leave(name)
            self.results.pop(name, None)
        minutes = rounds * steps * sum(seconds for seconds, _ in best.values()) / 60
        say(f"{rounds} rounds of {steps} steps each: about {minutes:.1f} min")
        order = list(self.running)
        for number in range(rounds):
            for name in order if number % 2 == 0 else reversed(order):
                if name in self.running and (seconds := self.turn(name, steps)) is not None:
                    self.results[name]["seconds"].append(seconds)
        for name in list(self.running):
            self.leave(name)

    def one_by_one(self, rounds: int, steps: int) -> None:
        """One after another, the GEMM's rate measured between their turns. Of each family the fastest counts."""
        self.begin("gemm")
        names = [name for name in self.found if name != "gemm"]
        begun = time.perf_counter()
        for number, name in enumerate(names):
            self.begin(name)
            for _ in range(rounds):
                if name in self.running and (seconds := self.turn(name, steps)) is not None:
                    self.results["gemm"]["seconds"].append(self.turn("gemm", 5))
                    self.results[name]["seconds"].append(seconds)
            if name in self.running:
                self.leave(name)
            if number == 0:
                minutes = len(names) * (time.perf_counter() - begun) / 60
                say(f"{len(names)} contenders one after the other: about {minutes:.0f} min")
        self.leave("gemm")
        best: dict[str, str] = {}  # the later of two entries of a family wins, so the slowest come first
        for name in sorted(self.results, key=lambda name: -statistics.median(self.results[name]["seconds"])):
            best[family(name)] = name
        self.results = {name: result for name, result in self.results.items() if best[family(name)] == name}

    def close(self) -> None:
        """End the processes that still run."""
        for one in self.running.values():
            one.end()


def say(text: str) -> None:
    """Print progress to stderr; the result goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def race(model: Model, dtype: str, found: Mapping[str, Callable], options: argparse.Namespace) -> dict:
    """All contenders of one model and dtype. Returns: name -> figures, or the reason why there are none ("absent")."""
    wanted = {family(name) for name in found} if options.contenders is None else {*REQUIRED, *options.contenders}
    names = [name for name in found if family(name) in wanted]
    if not model.together:
        names = [name for name in names if "default malloc" not in name and "autocast" not in name]

    def start(name: str, build: Callable) -> Contender:
        say(f"{dtype}: {name} begins")
        return Contender(name, build, model, dtype, options.threads, options.limit)

    running = Race({name: found[name] for name in names}, start)
    try:
        if model.together:
            running.together(options.rounds, options.steps)
        else:
            running.one_by_one(LARGE_ROUNDS, 1)
    finally:
        running.close()
    results = {family(name): result for name, result in running.results.items()}
    rate = 2.0 * GEMM_SIZE**3 / statistics.median(results["gemm"]["seconds"])
    for name, result in results.items():
        seconds = statistics.median(result["seconds"])
        result["ms_per_step"] = round(seconds * 1e3, 1)
        result["best_ms_per_step"] = round(min(result["seconds"]) * 1e3, 1)
        if name != "gemm":
            result["tokens_per_s"] = round(model.tokens / seconds)
            result["share_of_gemm_rate"] = round(model.flops_per_step() / seconds / rate, 3)
            result["ours_faster_by"] = round(speedup(result["seconds"], results["moe-trainer"]["seconds"], model), 3)
    results["gemm"]["gflops"] = round(rate / 1e9)
    for name, reason in running.absent.items():
        if family(name) not in results:
            results[family(name)] = {"absent": reason}
    return results


def speedup(seconds: list[float], ours: list[float], model: Model) -> float:
    """Return how many times as long a contender takes: the median of the rounds' pairs where rounds alternate."""
    if model.together:
        return statistics.median(theirs / mine for theirs, mine in zip(seconds, ours, strict=True))
    return statistics.median(seconds) / statistics.median(ours)


def table(figures: dict) -> str:
    columns = "| model | dtype | | tokens/s | ours is faster by | ms per step (best round) | peak memory MB |"
    lines = [f"{columns} share of GEMM rate |", f"|{'---|' * 8}"]
    for model, by_dtype in figures.items():
        for dtype, results in by_dtype.items():
            for name, r in results.items():
                if "absent" in r:
                    lines.append(f"| {model} | {dtype} | {name} | not measured: {r['absent']} | | | | |")
                elif name == "gemm":
                    lines.append(f"| {model} | {dtype} | GEMM {r['what']} | | | | | {r['gflops']} GFLOP/s |")
                else:
                    ratio = "" if name == "moe-trainer" else f"{r['ours_faster_by']:.2f} x"
                    lines.append(
                        f"| {model} | {dtype} | {name} ({r['what']}) | {r['tokens_per_s']:,} | {ratio} | "
                        f"{r['ms_per_step']:,} ({r['best_ms_per_step']:,}) | {r['peak_memory_mb']:,} | "
                        f"{r['share_of_gemm_rate']:.0%} |"
                    )
    return "\n".join(lines)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def versions() -> dict:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "torchtitan"):
        if importlib.util.find_spec(name):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> int:
    parser = bench_common.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["small"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender per round; of a large model one")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    text = "to compare with moe-trainer, by the first words of the table's rows; default: all"
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=text)
    text = "seconds after which a contender that does not answer is left out"
    parser.add_argument("--limit", type=float, default=300.0, help=text)
    parser.add_argument("--write", action="store_true", help="record the result in scripts/bench_results/")
    options = parser.parse_args()
    for library in ("transformers", "torchtitan"):
        if not importlib.util.find_spec(library):
            say(f"{library} is left out: it is not installed")
    for name in options.models:
        try:
            figures = {dtype: race(MODELS[name], dtype, builders(dtype), options) for dtype in options.dtypes}
        except AbsentError:
            say(f"error: without it ({' and '.join(REQUIRED)}) there is nothing to compare")
            return ExitCode.FAILED
        print(table({name: figures}), flush=True)
        for dtype in options.dtypes if options.write else ():
            keep(name, dtype, figures[dtype], options)
    return 0


def keep(name: str, dtype: str, results: dict, options: argparse.Namespace) -> None:
    """Record the figures of one model and dtype."""
    together = MODELS[name].together
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "commit": provenance.get_commit(),
        "processor": processor(),
        "threads": options.threads,
        "load_average": os.getloadavg(),
        "versions": versions(),
        "rounds": options.rounds if together else LARGE_ROUNDS,
        "steps_per_round": options.steps if together else 1,
        "figures": results,
    }
    file = f"cpu_{name}_{dtype}"
    provenance.write_result(f"{file}.json", json.dumps(record, indent=1))
    found = ", ".join(f"{library} {version}" for library, version in record["versions"].items())
    rounds = f"{LARGE_ROUNDS} steps, one contender after another"
    if together:
        rounds = f"{options.rounds} alternating rounds of {options.steps} steps, ratios by pairs of one round"
    head = (
        f"# The {name} Mixtral on CPU, {dtype}\n\n{record['date']}, commit {record['commit']}, {record['processor']}, "
        f"{options.threads} threads, {found}; median of {rounds}; load average {os.getloadavg()[0]:.0f} (the benchmark "
        f"alone: about {options.threads}). Method: scripts/benchmarks/bench_cpu.py.\n\n"
    )
    provenance.write_result(f"{file}.md", head + table({name: {dtype: results}}))


if __name__ == "__main__":
    sys.exit(main())

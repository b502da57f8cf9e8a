"""Train a small Mixtral on this CPU, with moe-trainer, Hugging Face transformers and torchtitan, and compare.

    python scripts/bench_cpu.py [--models small wide many] [--rounds 7] [--steps 4] [--threads N] [--dtypes fp32 bf16] [--write]

Three models. `small`: hidden 256, 4 layers, 8 experts top-2 with ffn 512, 8 heads over 4 key-value heads, sequences of 256, micro-batch 4.
`wide` and `many` are large enough to be bound by matrix products: hidden 512, 8 layers, 8 heads, ffn 1,024, sequences of 512, micro-batch 8,
with 8 experts top-2 and with 64 experts top-8 (822 M parameters: 17 GB). All: vocabulary 8,192, balancing loss 0.01, AdamW, gradient
clipping at 1. Each contender is a process of its own that builds the model and then trains steps when told to. With the small model rounds
alternate between them, so that a disturbance of the machine meets all alike, and the median round counts; the large ones do not fit
beside each other and come one by one, each with the product's rate measured around it. Ours is `train.train_step`, everything a training
iteration does except reading data from files.

transformers runs as fast as it can here: the fastest of its expert implementations (tried first), sdpa attention, torch's fused AdamW;
in bf16 its parameters and optimizer state are bf16 throughout, which is less work than our fp32 main parameters and gradients;
"transformers, autocast" keeps fp32 parameters and multiplies in bf16, which is nearer to what we do. torchtitan (where it is installed: it is no
dependency) is its Qwen3 without the norms of queries and keys, sdpa, without a balancing loss; its experts multiply in bf16 whatever the
dtype, so it appears in bf16 only. All but "default malloc" run with the allocator settings that moe-trainer makes for itself at start
(memory/host_allocator.py); "default malloc" is transformers as it comes.

Printed and (with --write) recorded in scripts/bench_results/: tokens per second, peak memory above that of the imported libraries,
and the share of the GEMM rate of this machine, measured in the same run. Operations are Megatron's model FLOPs: 6 per active weight of the
matrix products, head included, router not, plus attention at its causal half; the embedding is a lookup.
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
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import measuring  # noqa: E402 - found beside this file
from scripts.peers import MODELS, Model, build_ours, build_torchtitan, build_transformers  # noqa: E402 - found beside this file


def memory_mb() -> float:
    """Resident memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_memory_mb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build_gemm(model: Model, dtype: str):
    """The machine's GEMM rate: a step is one square product; the caller divides."""
    import torch

    product = measuring.square_product({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], GEMM_SIZE)

    def step() -> float:
        product()
        return 0.0

    return step, f"{GEMM_SIZE} x {GEMM_SIZE} x {GEMM_SIZE}"


GEMM_SIZE = 2048
LARGE_ROUNDS = 3  # of a model too large for many
IMPLEMENTATIONS = ("grouped_mm", "eager")


def builders(dtype: str) -> dict:
    """Contenders by name; each value builds a step. transformers appears once for each way to run its experts."""
    found = {"moe-trainer": build_ours}
    for implementation in IMPLEMENTATIONS:
        found[f"transformers/{implementation}"] = functools.partial(build_transformers, implementation=implementation)
        found[f"transformers, default malloc/{implementation}"] = found[f"transformers/{implementation}"]
        if dtype == "bf16":
            found[f"transformers, autocast/{implementation}"] = functools.partial(
                build_transformers, implementation=implementation, autocast=True)
    if dtype == "bf16" and importlib.util.find_spec("torchtitan"):
        found["torchtitan"] = build_torchtitan
    return {**found, "gemm": build_gemm}


def contender(pipe, model: Model, name: str, dtype: str, threads: int) -> None:
    """A process of its own: builds, then answers each number n with (seconds of n steps, last loss)."""
    import torch

    torch.set_num_threads(threads)
    sys.stdout = open(os.devnull, "w")
    if "default malloc" not in name:
        from moe_trainer.memory.host_allocator import keep_freed_memory

        keep_freed_memory()
    if name.startswith("transformers"):
        import transformers  # noqa: F401 - its memory belongs to the libraries, not to the training
    if name == "torchtitan":
        import torchtitan.models.qwen3  # noqa: F401 - likewise
    base = memory_mb()
    step, description = builders(dtype)[name](model, dtype)
    step()
    pipe.send(description)
    while (steps := pipe.recv()) > 0:
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        pipe.send((time.perf_counter() - start, loss))
    pipe.send(peak_memory_mb() - base)


class Contender:
    """A running contender."""

    def __init__(self, model: Model, name: str, dtype: str, threads: int):
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=contender, args=(there, model, name, dtype, threads), daemon=True)
        self._process.start()
        self.figures: dict = {"seconds": []}

    def ready(self) -> "Contender":
        self.figures["what"] = self._pipe.recv()
        return self

    def turn(self, steps: int) -> float:
        """Seconds per step."""
        self._pipe.send(steps)
        seconds, self.figures["loss"] = self._pipe.recv()
        return seconds / steps

    def leave(self) -> None:
        self._pipe.send(0)
        self.figures["peak_memory_mb"] = round(self._pipe.recv())
        self._process.join()


def family(name: str) -> str:
    """The contender without the implementation of its experts."""
    return name.split("/")[0]


def race_together(names: list[str], start, rounds: int, steps: int) -> dict:
    """All at once, in turns. Returns: name -> figures."""
    running = {name: start(name) for name in names}
    results = {name: one.ready().figures for name, one in running.items()}
    # of each contender that comes in several implementations, the fastest takes part
    for kind in {family(name) for name in names if "/" in name}:
        members = [name for name in names if family(name) == kind]
        best = min(members, key=lambda name: min(running[name].turn(steps) for _ in range(3)))
        for name in members:
            if name != best:
                running.pop(name).leave()
                del results[name]
    order = list(running)
    for round_number in range(rounds):
        for name in order if round_number % 2 == 0 else reversed(order):
            results[name]["seconds"].append(running[name].turn(steps))
    for one in running.values():
        one.leave()
    return results


def race_one_by_one(names: list[str], start, rounds: int, steps: int) -> dict:
    """One after another, the product's rate measured between their turns. Returns: name -> figures, of each family the fastest."""
    gemm = start("gemm").ready()
    results = {}
    for name in names:
        if name == "gemm":
            continue
        one = start(name).ready()
        for _ in range(rounds):
            gemm.figures["seconds"].append(gemm.turn(5))
            one.figures["seconds"].append(one.turn(steps))
        one.leave()
        results[name] = one.figures
    gemm.leave()
    best = {}
    for name, result in results.items():
        other = best.get(family(name))
        if other is None or statistics.median(result["seconds"]) < statistics.median(results[other]["seconds"]):
            best[family(name)] = name
    return {**{name: results[name] for name in best.values()}, "gemm": gemm.figures}


def race(model: Model, dtype: str, given: argparse.Namespace) -> dict:
    """All contenders of one model and dtype. Returns: name -> figures."""
    names = [name for name in builders(dtype) if name in ("moe-trainer", "gemm") or given.contenders is None or family(name) in given.contenders]
    if not model.together:
        names = [name for name in names if "default malloc" not in name and "autocast" not in name]

    def start(name: str) -> Contender:
        print(f"{dtype}: {name} begins", file=sys.stderr, flush=True)
        return Contender(model, name, dtype, given.threads)

    if model.together:
        results = race_together(names, start, given.rounds, given.steps)
    else:
        results = race_one_by_one(names, start, LARGE_ROUNDS, 1)
    results = {family(name): result for name, result in results.items()}
    rate = 2.0 * GEMM_SIZE**3 / statistics.median(results["gemm"]["seconds"])
    for name, result in results.items():
        seconds = statistics.median(result["seconds"])
        result["ms_per_step"] = round(seconds * 1e3, 1)
        result["best_ms_per_step"] = round(min(result["seconds"]) * 1e3, 1)
        if name != "gemm":
            result["tokens_per_s"] = round(model.tokens / seconds)
            result["share_of_gemm_rate"] = round(model.flops_per_step() / seconds / rate, 3)
    results["gemm"]["gflops"] = round(rate / 1e9)
    return results


def table(figures: dict) -> str:
    lines = [
        "| model | dtype | | tokens/s | ours is faster by | ms per step (best round) | peak memory MB | share of GEMM rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, by_dtype in figures.items():
        for dtype, results in by_dtype.items():
            ours = results["moe-trainer"]["tokens_per_s"]
            for name, r in results.items():
                if name == "gemm":
                    lines.append(f"| {model} | {dtype} | GEMM {r['what']} | | | | | {r['gflops']} GFLOP/s |")
                    continue
                ratio = "" if name == "moe-trainer" else f"{ours / r['tokens_per_s']:.2f} x"
                lines.append(f"| {model} | {dtype} | {name} ({r['what']}) | {r['tokens_per_s']:,} | {ratio} | {r['ms_per_step']:,} "
                             f"({r['best_ms_per_step']:,}) | {r['peak_memory_mb']:,} | {r['share_of_gemm_rate']:.0%} |")
    return "\n".join(lines)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def versions() -> dict:
    import torch
    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if importlib.util.find_spec("torchtitan"):
        found["torchtitan"] = importlib.metadata.version("torchtitan")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["small"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender per round; of a large model one")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="beside moe-trainer, of the table's first words; all")
    parser.add_argument("--write", action="store_true", help="record the result in scripts/bench_results/")
    given = parser.parse_args()
    for name in given.models:
        figures = {dtype: race(MODELS[name], dtype, given) for dtype in given.dtypes}
        print(table({name: figures}), flush=True)
        if given.write:
            keep(name, figures, given)


def keep(name: str, figures: dict, given: argparse.Namespace) -> None:
    """Record the figures of one model."""
    together = MODELS[name].together
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "processor": processor(),
        "threads": given.threads,
        "load_average": os.getloadavg(),
        "versions": versions(),
        "rounds": given.rounds if together else LARGE_ROUNDS,
        "steps_per_round": given.steps if together else 1,
        "figures": figures,
    }
    file = "cpu" if name == "small" else f"cpu_{name}"
    measuring.record(f"{file}.json", json.dumps(record, indent=1))
    found = ", ".join(f"{library} {version}" for library, version in record["versions"].items())
    rounds = f"{given.rounds} alternating rounds of {given.steps} steps" if together else f"{LARGE_ROUNDS} steps, one contender after another"
    head = (
        f"# The {name} Mixtral on CPU\n\n{record['date']}, {record['processor']}, {given.threads} threads, {found}; median of {rounds}; load average "
        f"{os.getloadavg()[0]:.0f} (the benchmark alone: about {given.threads}). What is measured: see scripts/bench_cpu.py.\n\n"
    )
    measuring.record(f"{file}.md", head + table({name: figures}))


if __name__ == "__main__":
    main()

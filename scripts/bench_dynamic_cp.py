#!/usr/bin/env python3
"""Padding, packing and dynamic context parallelism on two distributions of lengths.

    python scripts/bench_dynamic_cp.py [--write]

Plans are arithmetic: microbatches of Qwen3-30B-A3B on 64 ranks wait for their slowest rank, whose time is its FLOPs,
and with context parallelism the exchange of keys as the planner counts it (data/group_packing.py: KEY_EXCHANGE_COST).
The roofline executes steps of the same batches with six of the model's layers on the emulated CUDA device.
Steps are real ones of a small model on four gloo ranks: every way computes the same samples, so losses are equal.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import parse_args
from arguments.parallel import dynamic_cp_sizes
from moe_trainer.data.build import batch_format
from moe_trainer.data.group_packing import KEY_EXCHANGE_COST
from moe_trainer.data.loader import make_packed_batch
from moe_trainer.data.packing import Pack, PackFormat, PackingPlan, PackingPlanner, PackingSummary
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.length_histogram import LengthHistogram
from scripts.bench_common import Report, load_line, make_parser, provenance_line, run_on_ranks
from scripts.roofline import plan_and_roofline

NUM_RANKS, CAPACITY, LONGEST, BATCH, VOCAB_ROWS = 64, 8192, 131072, 1024, 151936
FIXED_CP = LONGEST // CAPACITY
DOCUMENTS = (".rst", ".md", ".txt", ".html")
BYTES_PER_TOKEN = 4

ROOFLINE = (
    f"--preset qwen3_30b_a3b --num-layers 6 --mock-data --train-iters 1 --seq-length {LONGEST} "
    f"--max-position-embeddings {LONGEST} --micro-batch-size 1 --global-batch-size {BATCH} --world-size {NUM_RANKS} "
    "--hardware h100 --bf16 --use-distributed-optimizer --expert-model-parallel-size 8 "
    "--moe-token-dispatcher-type alltoall --calculate-per-token-loss"
).split()
PACKED = f"--use-varlen-dataset --max-seqlen-per-dp-cp-rank {CAPACITY}".split()

STEP_LONGEST, STEP_BATCH, STEP_RANKS, REPEATS = 1024, 24, 4, 3
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 4 "
    f"--moe-router-topk 2 --moe-grouped-gemm --seq-length {STEP_LONGEST} --max-position-embeddings {STEP_LONGEST} "
    f"--micro-batch-size 1 --global-batch-size {STEP_BATCH} --train-iters 9 --lr 1e-3 --lr-decay-style constant "
    "--mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 1000 --transformer-impl local "
    "--triton-kernels none --attention-dropout 0 --hidden-dropout 0 --moe-token-dispatcher-type alltoall "
    "--use-varlen-dataset --calculate-per-token-loss"
).split()


class Method(NamedTuple):
    """How to make microbatches.

    Attributes:
        name: in tables.
        is_padded: every sequence is padded to the longest one.
        balances_cost: see PackFormat.
        is_dynamic: groups have several sizes.
    """

    name: str
    is_padded: bool = False
    balances_cost: bool = False
    is_dynamic: bool = False

    def make_format(self, capacity: int, num_ranks: int, cp: int) -> PackFormat:
        """Return the format of packs for ranks of `capacity` tokens; without dynamic groups `cp` of them share one."""
        if self.is_dynamic:
            return PackFormat(capacity, cp_sizes=dynamic_cp_sizes(num_ranks, 1))
        return PackFormat(capacity * cp, self.balances_cost, capacity * cp if self.is_padded else 2 * cp)

    @property
    def flags(self) -> list[str]:
        """The trainer's flags, with fixed groups of FIXED_CP ranks."""
        if self.is_dynamic:
            return [*PACKED, "--dynamic-context-parallel"]
        fixed = ["--context-parallel-size", str(FIXED_CP)]
        scheduler = "cost_balanced" if self.balances_cost else "dp_balanced"
        return fixed if self.is_padded else [*fixed, *PACKED, "--sequence-packing-scheduler", scheduler]


WAYS = (
    Method("padded, fixed groups", is_padded=True),
    Method("dp_balanced, fixed groups"),
    Method("cost_balanced, fixed groups", balances_cost=True),
    Method("dynamic groups", is_dynamic=True),
)


def draw_long_tail(longest: int, count: int) -> list[int]:
    """Draw lengths from a lognormal distribution whose mean is an eighth of the longest that it is cut to."""
    rng = random.Random(0)
    return [max(2, min(longest, int(rng.lognormvariate(0, 1.4) * longest / 24))) for _ in range(count)]


def read_documents(_longest: int, count: int) -> list[int]:
    """Return the lengths of documents of this machine, in random but fixed order."""
    places = [Path("/usr/share/doc"), Path(sys.prefix)]
    files = sorted(path for place in places for path in place.rglob("*") if path.suffix in DOCUMENTS and path.is_file())
    lengths = [size // BYTES_PER_TOKEN for path in files if (size := path.stat().st_size) >= 2 * BYTES_PER_TOKEN]
    return random.Random(0).choices(lengths, k=count)


def times_of_plan(plan: PackingPlan, fmt: PackFormat, get_flops: Callable[[int], float], fixed_cp: int) -> list[float]:
    """Return the cost of the slowest rank of every microbatch, with padding and the exchange of keys."""
    get_cost = fmt.group_sizes(get_flops).cost

    def rank_cost(pack: Pack) -> float:
        size = pack.cp_size or fixed_cp
        padded = fmt.pack([plan.lengths[sample] for sample in pack], pack.cp_size).padded_lengths
        return sum(get_cost(length, size) for length in padded) / size

    return [max(map(rank_cost, packs)) for packs in plan.packs]


def plan_ways(lengths: list[int]) -> list[tuple[str, PackingSummary, float]]:
    """Plan a global batch of a large model in all ways; return names, summaries and times."""
    args = parse_args(["--preset", "qwen3_30b_a3b", "--mock-data", "--train-iters", "1"], NUM_RANKS)
    get_flops = partial(training_flops, args, 1, padded_vocab_size=VOCAB_ROWS)
    lengths = [min(length, LONGEST) for length in lengths]
    found = []
    for way in WAYS:
        fmt = way.make_format(CAPACITY, NUM_RANKS, FIXED_CP)
        planner = PackingPlanner(lengths.__getitem__, get_flops, fmt, 1, NUM_RANKS // FIXED_CP)
        plan = planner.plan(0, BATCH)
        found.append((way.name, planner.summarize(plan), sum(times_of_plan(plan, fmt, get_flops, FIXED_CP))))
    return found


def report_plans(report: Report, title: str, lengths: list[int]) -> None:
    """Write what the ways do with a global batch of a large model."""
    middle, mean = sorted(lengths)[len(lengths) // 2], sum(lengths) / len(lengths)
    report.add(
        f"## Plans: {title}",
        "",
        f"{BATCH} sequences of {mean:,.0f} tokens, half of them up to {middle:,}, the longest {max(lengths):,} (cut to "
        f"{LONGEST:,}). {NUM_RANKS} ranks of {CAPACITY:,} tokens; fixed groups have {FIXED_CP} ranks.",
        "",
    )
    found = plan_ways(lengths)
    dynamic = found[-1][-1]
    report.start_table("way", "microbatches", "fill", "imbalance", "groups", "of dynamic")
    for name, summary, slowest in found:
        sizes = ", ".join(f"{count} of {size}" for size, count in summary.cp_sizes.items()) or f"of {FIXED_CP}"
        fill, imbalance = f"{100 * summary.fill:.1f} %", f"{summary.imbalance:.2f}"
        report.add_row(name, summary.num_microbatches, fill, imbalance, sizes, f"{slowest / dynamic:.2f}")
    report.add("")


def report_planning_time(report: Report) -> None:
    """Write how long it takes to plan a global batch with dynamic groups."""
    args = parse_args(["--preset", "qwen3_30b_a3b", "--mock-data", "--train-iters", "1"], NUM_RANKS)
    get_flops = partial(training_flops, args, 1, padded_vocab_size=VOCAB_ROWS)
    report.add(
        "## Time to plan a global batch", "", f"{provenance_line()}, {load_line()}, one thread, dynamic groups.", ""
    )
    report.start_table("ranks", "sequences", "s")
    for num_ranks, count in ((64, 1024), (256, 4096), (1024, 8192)):
        lengths = draw_long_tail(LONGEST, count)
        fmt = WAYS[-1].make_format(CAPACITY, num_ranks, 1)
        planner = PackingPlanner(lengths.__getitem__, get_flops, fmt, 1, 1)
        begin = time.perf_counter()
        planner.plan(0, count)
        report.add_row(num_ranks, count, f"{time.perf_counter() - begin:.2f}")
    report.add("")


def report_rooflines(report: Report, title: str, lengths: list[int]) -> None:
    """Write the time of steps that are executed on the emulated device."""
    counts = Counter(min(length, LONGEST) + 1 for length in lengths)  # ids of a sample, one more than the model reads
    rooflines = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lengths.csv")
        LengthHistogram.of(counts).write_csv(str(path))
        for way in WAYS:
            print(f"roofline of {way.name}: {title}", file=sys.stderr)
            histogram = [] if way.is_padded else ["--length-histogram", str(path)]
            rooflines.append(plan_and_roofline([*ROOFLINE, *way.flags, *histogram])[1])
    report.add(
        f"## Steps by the roofline: {title}",
        "",
        f"The same batches on {NUM_RANKS} H100, six layers of Qwen3-30B-A3B, experts over 8 ranks, eager.",
        "",
    )
    report.start_table("way", "s", "kernels", "waiting for launches", "of dynamic")
    last = rooflines[-1].time.step
    for way, roofline in zip(WAYS, rooflines):
        step, idle = roofline.time.step, roofline.busiest.idle
        kernels = f"{roofline.busiest.kernels:,.0f}"
        report.add_row(way.name, f"{step:.2f}", kernels, f"{100 * idle / step:.0f} %", f"{step / last:.2f}")
    report.add("")


def train_on_rank(rank: int, size: int, lengths: list[int]) -> list[tuple[str, float, float]]:
    """Train with every way in turn, several times; return names, losses and seconds."""
    import torch

    from moe_trainer.launch_env import LaunchEnv
    from moe_trainer.training.initialize import make_groups
    from moe_trainer.training.run import TrainState, with_batches
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.synthetic_data import RandomTokenDataset, make_null_tokenizer
    from moe_trainer.verification.training_trace import make_run

    class Samples(RandomTokenDataset):
        def length(self, index: int) -> int:
            return lengths[index]

        def tokens(self, index: int):
            return super().tokens(index)[: lengths[index] + 1]

    runs = []
    for way in WAYS:
        capacity = STEP_LONGEST // size
        layout = ["--dynamic-context-parallel"] if way.is_dynamic else ["--context-parallel-size", str(size)]
        args = parse_args([*MODEL, *layout, "--max-seqlen-per-dp-cp-rank", str(capacity)], size)
        ps = make_groups(args, LaunchEnv(rank, size, rank, None, None, "benchmark"), timedelta(seconds=1800))
        data = Samples(0, STEP_LONGEST, 1000)
        planner = PackingPlanner(
            data.length,
            partial(training_flops, args, 1, padded_vocab_size=1024),
            way.make_format(capacity, size, size),
            1,
            1,
        )
        fmt = batch_format(args.data, make_null_tokenizer(args))
        packs = list(planner.order(STEP_BATCH, 0, lambda consumed: STEP_BATCH, rank if way.is_dynamic else 0))
        batches = [
            make_packed_batch(data, pack.samples, fmt, partial(planner.format.pack, cp_size=pack.cp_size))
            for pack in packs
        ]
        runs.append((way.name, make_run(args, rank, ps, 0), batches))
    found = []
    for _ in range(1 + REPEATS):
        for name, run, batches in runs:
            torch.distributed.barrier()
            begin = time.perf_counter()
            result = train_step(with_batches(run, iter(batches)), TrainState(), len(batches))
            run.wait_params()
            torch.distributed.barrier()
            found.append((name, result.losses["lm loss"], time.perf_counter() - begin))
    return found


def report_steps(report: Report, title: str, lengths: list[int]) -> None:
    """Write losses and seconds of real steps."""
    lengths = [max(1, min(length, STEP_LONGEST)) for length in lengths[:STEP_BATCH]]
    found = run_on_ranks(train_on_rank, STEP_RANKS, lengths)[0]
    report.add(
        f"## Steps on {STEP_RANKS} CPU ranks: {title}",
        "",
        f"{provenance_line()}, {load_line()}. {STEP_BATCH} sequences of {sum(lengths) / len(lengths):,.0f} tokens, the "
        f"longest {max(lengths):,}; fixed groups have all {STEP_RANKS} ranks. Shortest of {REPEATS} steps in turn, "
        "after one that is not counted. The ranks share the cores: the time is that of the work of all.",
        "",
    )
    report.start_table("way", "first loss", "last loss", "s", "of dynamic")
    times = {way.name: min(time for name, _, time in found[len(WAYS) :] if name == way.name) for way in WAYS}
    for way in WAYS:
        losses = [loss for name, loss, _ in found if name == way.name]
        ratio = times[way.name] / times[WAYS[-1].name]
        report.add_row(way.name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{times[way.name]:.2f}", f"{ratio:.2f}")
    report.add("")


def main() -> None:
    options = make_parser(__doc__ or "", "dynamic_cp.md").parse_args()
    report = Report(
        "# Dynamic context parallelism",
        "",
        "Generated by `python scripts/bench_dynamic_cp.py --write`.",
        "",
        "Padded: one sequence of the longest length per microbatch and group. Lengths: a long tail (lognormal), and "
        f"the documents ({', '.join(DOCUMENTS)}) on this machine, {BYTES_PER_TOKEN} bytes for a token. Nothing ran "
        "on a GPU.",
        "",
        "Time of plans: FLOPs of the slowest rank of every microbatch, summed, and with several ranks the exchange of "
        f"keys: {KEY_EXCHANGE_COST} of a token's FLOPs outside attention for each other rank. Ratios, not seconds.",
    )
    for title, draw in (("a long tail", draw_long_tail), ("documents", read_documents)):
        lengths = draw(LONGEST, BATCH)
        report_plans(report, title, lengths)
        report_rooflines(report, title, lengths)
    report_planning_time(report)
    report_steps(report, "a long tail", draw_long_tail(STEP_LONGEST, STEP_BATCH))
    report_steps(report, "documents", [length // 8 for length in read_documents(LONGEST, STEP_BATCH)])
    if options.write:
        report.write("dynamic_cp.md")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Long context: plans of 256K-token runs next to published ratios, and real runs of 128K tokens on this machine.

    python scripts/benchmarks/bench_long_context.py [--write]       plans, and the recorded runs
    python scripts/benchmarks/bench_long_context.py run [NAME...]   also run the small models, and record them (minutes)

A run is one forward and backward pass of a small model on 131,072 tokens over two context-parallel ranks (gloo, one
thread each). Its memory is what torch's operators allocate during the passes: weights, gradients and optimizer state
exist before. Temporary memory inside an operator is not seen. --write: scripts/bench_results/long_context.md; runs are
recorded in long_context.json.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from arguments import parse_args
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.hardware import GIB
from moe_trainer.estimate.plan import Plan
from scripts.benchmarks.bench_common import Report, make_parser, run_on_ranks
from scripts.provenance import RESULTS, ROOT, load_line, provenance_line

if TYPE_CHECKING:
    from moe_trainer.training.run import TrainRun

RUNS = RESULTS / "long_context.json"
LENGTH, RANKS = 131072, 2
DEVICES = "--world-size 256 --hardware h100"
OFFLOAD = (
    "--bf16 --mock-data --optimizer-cpu-offload --use-precision-aware-optimizer --sequence-parallel "
    "--expert-tensor-parallel-size 1"
)
MILLION = "--seq-length 1048576 --max-position-embeddings 1048576 --world-size 1024"
DEEPEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"


class Case(NamedTuple):
    """A model with its launcher for long sequences, and flags for 4,096 tokens with as many tokens an iteration.

    `published`: MFU at 256K tokens over that at short ones, on 256 H100 (arXiv 2603.07685). `million`: what replaces
    the launcher's flags for 1,048,576 tokens on 1,024 devices. `preset`: its launch values are those of VARIANT=256k.
    """

    name: str
    preset: str
    short: str
    published: float
    million: str


CASES = (
    Case(
        "DeepSeek-V3",
        "deepseek_v3",
        f"--preset deepseek_v3 {OFFLOAD} {DEEPEP} --seq-length 4096 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Etttt|(tttt|)*14tmL "
        "--expert-model-parallel-size 16 --global-batch-size 8192 --recompute-granularity selective "
        "--recompute-modules mla_up_proj",
        0.88,
        f"{MILLION} --tensor-model-parallel-size 8 --context-parallel-size 16 --global-batch-size 32",
    ),
    Case(
        "Qwen3-235B",
        "qwen3_235b_a22b",
        f"--preset qwen3_235b_a22b {OFFLOAD} {DEEPEP} --seq-length 4096 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout Et|(tt|)*46tL "
        "--expert-model-parallel-size 16 --global-batch-size 2048 --overlap-moe-expert-parallel-comm",
        1.29,
        f"{MILLION} --context-parallel-size 64 --global-batch-size 16",
    ),
)
CHUNKS = (1, 4, 16)
"""Of --mlp-chunks-for-training in the table of peaks."""
LENGTHS = (262144, 524288, 1048576)

SMALL = (
    "--hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 256 --moe-ffn-hidden-size 128 --num-experts 4 "
    "--moe-router-topk 2 --moe-grouped-gemm --moe-router-dtype fp32 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
    f"--hidden-dropout 0 --seq-length {LENGTH} --max-position-embeddings {LENGTH} --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--mock-data --context-parallel-size 2 --transformer-impl local --on-missing-backend fallback"
)
MODELS = {
    "GQA": "--num-layers 2 --moe-layer-freq [0,1] --group-query-attention --num-query-groups 1 --kv-channels 8",
    "MLA": "--num-layers 2 --moe-layer-freq [0,1] --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm",
    "hybrid (gated DeltaNet, GQA)": "--num-layers 2 --moe-layer-freq [0,1] --group-query-attention "
    "--num-query-groups 1 --kv-channels 8 --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq [1,0] --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 2",
}
RECOMPUTE = "--recompute-granularity selective --recompute-modules mlp moe layernorm"
TILINGS = {"saved": "", "recomputed": RECOMPUTE, "8 chunks": f"{RECOMPUTE} --mlp-chunks-for-training 8"}


def launcher_flags(preset: str) -> list[str]:
    """Return the flags that the launcher would submit for 262,144 tokens."""
    env = {**os.environ, "DRY_RUN": "1", "VALIDATE": "0", "PYTHON": sys.executable, "OUTPUT_PATH": "/nonexistent"}
    env |= {"MODEL": preset, "VARIANT": "256k"}
    launcher = ["bash", str(ROOT / "scripts" / "sbatch_train.sh")]
    done = subprocess.run(launcher, env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    line = next(line for line in done.stdout.splitlines() if line.startswith("FLAGS="))
    return shlex.split(line.removeprefix("FLAGS=( ").removesuffix(" )"))


def case_plans(case: Case) -> tuple[Plan, Plan, Plan]:
    """Return the plans for 4,096 tokens, for the launcher's, and for a million."""
    flags, devices = launcher_flags(case.preset), DEVICES.split()
    lines = [*case.short.split(), *devices], [*flags, *devices], [*flags, *devices, *case.million.split()]
    short, long, million = map(plan_of_flags, lines)
    return short, long, million


def _mapping(plan: Plan) -> str:
    sizes = plan.args.parallel
    return (
        f"TP{sizes.tensor_model_parallel_size} CP{sizes.context_parallel_size} "
        f"PP{sizes.pipeline_model_parallel_size} EP{sizes.expert_model_parallel_size}"
    )


def add_plans(report: Report) -> None:
    report.add(
        "## 262,144 tokens on 256 H100, a million on 1,024",
        "",
        "The launch values of deepseek_v3 and qwen3_235b_a22b with VARIANT=256k, bf16, optimizer state on the "
        "host, next to 4,096 tokens with as many tokens an iteration. The published ratios are of arXiv 2603.07685.",
        "",
    )
    report.start_table(
        "model",
        "tokens",
        "GPUs",
        "mapping",
        "GiB of 79.6",
        "tokens/s/GPU",
        "TFLOP/s/GPU",
        "MFU",
        "of short",
        "published",
    )
    for case in CASES:
        short, *longer = case_plans(case)
        long = longer[0]
        for plan in (short, *longer):
            ratio = (f"{100 * long.mfu / short.mfu:.0f} %", f"{100 * case.published:.0f} %")
            report.add_row(
                case.name,
                f"{plan.args.data.seq_length:,}",
                plan.world_size,
                _mapping(plan),
                f"{plan.peak.total / GIB:.1f}",
                f"{plan.tokens_per_second:,.0f}",
                f"{plan.tflops:.1f}",
                f"{100 * plan.mfu:.1f} %",
                *(ratio if plan is long else ("", "")),
            )
    report.add("", *EXPLANATION)


EXPLANATION = (
    "What differs, and why:",
    "",
    "- The planned MFU rises with the length, because core attention is 90 % of the FLOPs at 262,144 tokens and faster "
    "than the rest. Its rates are cuDNN's at 4K and 16K tokens, continued by a curve "
    "(moe_trainer/estimate/layer_time.py).",
    "- Qwen3-235B: the plan agrees with the source.",
    "- DeepSeek-V3: the source reports a loss, the plan a gain. Queries and keys of latent attention have 192 channels "
    "and values 128; kernels that pad values do 20 % more work than is counted, and the plan takes the rates of equal "
    "widths. That would explain about half of the difference; the rest is not explained. Mapping, precision and "
    "recomputation of the published run are not known here.",
)


def add_peaks(report: Report) -> None:
    """Add the largest temporary memory by length and chunks."""
    report.add(
        "",
        "## Temporary memory of a layer",
        "",
        "What the feed-forward part of DeepSeek-V3 needs while a layer is computed, GiB a rank: buffers of the token "
        "exchange and what recompute restores (mlp, moe, norms and up-projections recomputed, TP4 CP8 PP8 EP16), by "
        "--mlp-chunks-for-training.",
        "",
    )
    report.start_table("tokens", *(f"{chunks} chunk{'s' * (chunks > 1)}" for chunks in CHUNKS))
    base = launcher_flags(CASES[0].preset)
    for length in LENGTHS:
        sizes = []
        for chunks in CHUNKS:
            more = f"--seq-length {length} --max-position-embeddings {length} --mlp-chunks-for-training {chunks}"
            stage = plan_of_flags([*base, *more.split(), *DEVICES.split()]).peak
            sizes.append(f"{(stage.dispatch + stage.working) / GIB:.1f}")
        report.add_row(f"{length:,}", *sizes)


class PeakMemory:
    """Bytes of the storages that operators make and that are alive, and their peak. A context manager."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        owner = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                outputs = function(*args, **(kwargs or {}))
                owner.add(outputs)
                return outputs

        self.peak = 0
        self._alive: dict[int, tuple] = {}
        self._mode = Mode()

    def __enter__(self) -> PeakMemory:
        import torch

        self._tensor = torch.Tensor
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def add(self, outputs: object) -> None:
        """Count the new storages of an operator's outputs."""
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._pytree import tree_leaves

        is_new = False
        for x in tree_leaves(outputs):
            if isinstance(x, self._tensor):
                storage = x.untyped_storage()
                entry = self._alive.get(storage._cdata)
                if entry is None or entry[0].expired():
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    is_new = True
        if is_new:
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Return the bytes that are alive."""
        self._alive = {address: entry for address, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())


def run_pass(rank: int, size: int, argv: list[str]) -> dict[str, float]:
    """Run one forward and backward pass on a rank. Returns loss, seconds, bytes after forward, and their peak."""
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.step import reduce_loss, run_microbatches
    from moe_trainer.verification.training_trace import make_run

    args = parse_args(argv, size)
    ps = ParallelState.create(size, rank, cp=size)
    run: TrainRun = make_run(args, rank, ps, 1)
    memory, after = PeakMemory(), []
    run.chunks[0].register_forward_hook(lambda *_: after.append(memory.now()))
    start = time.monotonic()
    with memory:
        sums = run_microbatches(run, iter(run.train_batches), 1, 1)
        run.grads.finish()
    seconds = time.monotonic() - start
    loss, tokens = reduce_loss(run, sums)
    return {"loss": loss / tokens, "seconds": seconds, "forward": after[0], "peak": memory.peak}


def run_models(names: list[str]) -> None:
    """Run the small models whose titles contain one of `names`, and record them one by one."""
    found = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else {}
    cases = {f"{model}, {tiling}": (MODELS[model], TILINGS[tiling]) for model in MODELS for tiling in TILINGS}
    for title, flags in cases.items():
        if names and not any(name in title for name in names):
            continue
        argv = [*SMALL.split(), *" ".join(flags).split()]
        plan = plan_of_flags([*argv, "--world-size", str(RANKS), "--hardware", "cpu"]).peak
        ranks = run_on_ranks(run_pass, RANKS, argv)
        found[title] = {
            "loss": ranks[0]["loss"],
            "seconds": max(rank["seconds"] for rank in ranks),
            "forward": max(rank["forward"] for rank in ranks),
            "peak": max(rank["peak"] for rank in ranks),
            "planned_forward": plan.kept,
            "planned_peak": plan.kept + plan.dispatch + plan.working,
            "where": f"{provenance_line()}, {load_line()}",
        }
        print(f"{title}: {found[title]}", flush=True)
        found = {name: found[name] for name in cases if name in found}
        RUNS.write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")


def add_runs(report: Report) -> None:
    found = json.loads(RUNS.read_text(encoding="utf-8"))
    report.add(
        "",
        f"## Runs of {LENGTH:,} tokens on two CPU ranks",
        "",
        f"{next(iter(found.values()))['where']}. Two layers, a dense one and one with four experts, hidden size 32, "
        f"context parallelism over {RANKS} ranks, fp32, one forward and backward pass. MiB a rank: what layers and "
        "loss save in forward, and the peak, without weights, gradients and optimizer state. saved: nothing "
        "recomputed; recomputed: mlp, moe, layernorm; 8 chunks: with --mlp-chunks-for-training 8. Times are those of "
        "a busy machine.",
        "",
    )
    report.start_table("model", "saved MiB", "planned", "peak MiB", "planned", "loss", "s")
    for name, row in found.items():
        report.add_row(name, *_memory_cells(row), f"{row['loss']:.6f}", f"{row['seconds']:.0f}")
    report.add(
        "",
        "What is measured in addition to the plan after forward is the batch and the rotary tables. The planned peak "
        "adds up buffers that do not exist at the same time.",
    )


def _memory_cells(row: dict[str, float]) -> Iterator[str]:
    for name in ("forward", "planned_forward", "peak", "planned_peak"):
        yield f"{row[name] / 2**20:.1f}"


def main() -> None:
    parser = make_parser(__doc__, "long_context.md")
    parser.add_argument("words", nargs="*", metavar="run [NAME...]")
    options = parser.parse_args()
    if options.words and options.words[0] != "run":
        parser.error(f"{options.words[0]}: run is the only mode")
    if options.words:
        run_models(options.words[1:])
    report = Report("# Long context", "", "Generated by `python scripts/benchmarks/bench_long_context.py --write`.", "")
    add_plans(report)
    add_peaks(report)
    if RUNS.exists():
        add_runs(report)
    if options.write:
        report.write("long_context.md")


if __name__ == "__main__":
    main()

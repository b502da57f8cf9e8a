"""Train slices of large models on one GPU: speed relative to the GEMM rate, memory, and a breakdown of the time.

    python scripts/benchmarks/bench_gpu.py [--shapes qwen3 mixtral deepseek] [--steps 8] [--flags "..."] [--write]

Shapes, all at sequences of 4,096 in bf16 with random tokens; they fit a device of 80 GB:
* qwen3: four layers of Qwen3-30B-A3B;
* mixtral: two layers of Mixtral-8x7B;
* deepseek: a dense and an MoE layer of DeepSeek-V3 with 16 experts, and one multi-token prediction depth.

Measured for each shape, in a separate process: median seconds of `train_step`, tokens per second, model FLOPs (formula
of Megatron-LM, estimate/flops.py) per second and as a share of the GEMM rate of the same process (8,192 cubed, bf16),
and peak memory of the allocator. A profile of one step gives the device time by kind of kernel, and the idle time. If
the packages are installed, MixtralForCausalLM of transformers and the layers of torchtitan (bench_baselines.py, without
a balancing loss) train mixtral too.

--device cpu --tiny runs the same program on small slices as a test; its figures are meaningless.
"""

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_trainer.exit_codes import ExitCode
from scripts.benchmarks.bench_common import Report, gemm_rate, make_parser, timed
from scripts.provenance import provenance_line

SEQ = 4096
COMMON = (
    "--bf16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --lr-decay-style constant --train-iters 1000 "
    "--eval-iters 0 --mock-data --tokenizer-type NullTokenizer --transformer-impl local --logging-level 30"
)
SHAPES = {
    "qwen3": "--preset qwen3_30b_a3b --num-layers 4 --vocab-size 151935",
    "mixtral": "--preset mixtral_8x7b --num-layers 2 --vocab-size 31999",
    "deepseek": "--preset deepseek_v3 --num-layers 2 --num-experts 16 --moe-router-num-groups 8 "
    "--moe-router-group-topk 4 --moe-layer-freq ([0]*1+[1]*1) --vocab-size 32767",
}
TINY = (
    "--hidden-size 64 --ffn-hidden-size 64 --moe-ffn-hidden-size 32 --num-attention-heads 8 --num-experts 64 "
    "--vocab-size 255 --global-batch-size 2"
)
# kinds of kernels by substrings of their names; the first match counts
KINDS = {
    "GEMMs": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "grouped", "_mm"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "communication": ("nccl",),
    "sort, gather, scatter": ("sort", "index", "gather", "scatter", "scan", "radix"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "elementwise": ("elementwise", "vectorized", "reduce", "softmax", "triton"),
}


def command_line(shape: str, seq: int, tiny: bool, extra: str) -> list[str]:
    sizes = f"--seq-length {seq} --max-position-embeddings {seq} {TINY if tiny else ''}"
    return f"{SHAPES[shape]} {COMMON} {sizes} {extra}".split()


class Result(NamedTuple):
    """Figures of one contender."""

    seconds: float
    tokens_per_s: float
    flops_per_s: float
    gemm_share: float
    peak_gib: float
    breakdown: list[str]


def measure(step, device: str, steps: int, tokens: int, flops: float, gemm_flops_per_s: float) -> Result:
    """Measure a training step of `tokens` tokens and `flops` model FLOPs, after three warm-up steps."""
    import torch

    for _ in range(3):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed(step, device) for _ in range(steps))
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    share = flops / seconds / gemm_flops_per_s
    return Result(seconds, tokens / seconds, flops / seconds, share, peak_gib, profile_kinds(step, device))


def profile_kinds(step, device: str) -> list[str]:
    """Profile one step. Returns the shares of each kind of kernel, and of the idle time."""
    import torch
    from torch.profiler import profile

    with profile() as profiler:
        wall = timed(step, device)
    device_type = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    sums: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.device_type == device_type:
            microseconds = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
            name = event.key.lower()
            kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
            sums[kind] = sums.get(kind, 0.0) + microseconds / 1e6
    sums["idle"] = max(0.0, wall - sum(sums.values()))
    return [
        f"{kind} {seconds / wall:.0%}"
        for kind, seconds in sorted(sums.items(), key=lambda item: -item[1])
        if seconds / wall >= 0.005
    ]


def build_moe_trainer(args, steps: int, device: str):
    """Return a training step of this program."""
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.run import TrainState
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    run = make_run(args, 0, ParallelState.single(), steps + 4, device=device)  # with warm-up and profile
    state, microbatches = TrainState(), args.training.global_batch_size // args.training.micro_batch_size

    def step() -> None:
        train_step(run, state, microbatches)
        state.iteration += 1

    return step


def build_transformers(args, steps: int, device: str):
    """Return a step of MixtralForCausalLM of the same shape, with bf16 parameters and fused AdamW."""
    import torch

    from scripts.benchmarks.bench_baselines import make_mixtral

    module = make_mixtral(make_baseline(args), "grouped_mm", device).bfloat16()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    batch = args.training.global_batch_size
    tokens = torch.randint(0, args.data.vocab_size + 1, (batch, args.data.seq_length), device=device)

    def step() -> None:
        for sample in tokens:
            module(input_ids=sample[None], labels=sample[None]).loss.div(batch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def build_torchtitan(args, steps: int, device: str):
    """Return a step of torchtitan's model of the same shape, with bf16 parameters, fused AdamW, the batch at once."""
    from scripts.benchmarks import bench_baselines

    return bench_baselines.build_torchtitan(make_baseline(args), "bf16", device)[0]


def make_baseline(args):
    """Return the sizes of a run for the builders of bench_baselines.py."""
    from scripts.benchmarks.bench_baselines import Model

    model, moe = args.model, args.moe
    return Model(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        experts=moe.num_experts,
        topk=moe.moe_router_topk,
        kv_heads=model.query_groups,
        seq=args.data.seq_length,
        micro=args.training.global_batch_size,
        heads=model.num_attention_heads,
        vocab=args.data.vocab_size + 1,
    )


CONTENDERS = {"moe-trainer": build_moe_trainer, "transformers": build_transformers, "torchtitan": build_torchtitan}


def get_contenders(shape: str) -> tuple[str, ...]:
    """Return the contenders that have a model of this shape."""
    return tuple(CONTENDERS) if shape == "mixtral" else ("moe-trainer",)


def find_problem(contender: str) -> str | None:
    """Return why a contender cannot train here; None if it can."""
    if contender == "moe-trainer" or find_spec(contender) is not None:
        return None
    return f"the package {contender} is not installed"


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), called in a separate process, which frees all of its memory, also if it fails."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure_contender(contender: str, argv: list[str], steps: int, device: str, tiny: bool) -> Result:
    """Build and measure a contender in a separate process."""
    return in_new_process(_measure_contender, contender, argv, steps, device, tiny)


def _measure_contender(contender: str, argv: list[str], steps: int, device: str, tiny: bool) -> Result:
    import torch

    import arguments
    from arguments.vocabulary import get_padded_vocab_size
    from moe_trainer.estimate.flops import training_flops

    args = arguments.parse_args(argv, 1)
    batch, seq = args.training.global_batch_size, args.data.seq_length
    flops = training_flops(args, batch, seq, get_padded_vocab_size(args, args.data.vocab_size + 1))
    rate = gemm_rate(torch.bfloat16, 512 if tiny else 8192, device)
    return measure(CONTENDERS[contender](args, steps, device), device, steps, batch * seq, flops, rate)


def main() -> None:
    parser = make_parser(__doc__, "gpu.md")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="(default: all)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps (default: %(default)s)")
    parser.add_argument("--flags", default="", help="more flags of pretrain_moe.py, in one string")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, as a test")
    options = parser.parse_args()
    from arguments.machine import ALLOCATOR, EXPANDABLE

    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = EXPANDABLE  # as pretrain_moe.py, for every contender; torch reads it once
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_gpu.py: no CUDA device (--device cpu --tiny tests the program)", file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)
    machine = provenance_line(torch.cuda.get_device_name() if options.device == "cuda" else "CPU")
    flags = f", flags {options.flags}" if options.flags else ""
    head = f"{machine}, median of {options.steps} steps{flags}. Method: scripts/benchmarks/bench_gpu.py."
    report = Report("# Slices of large models on one GPU", "", head)
    rates = "s per step", "tokens/s", "TFLOP/s", "share of GEMM rate"
    report.start_table("shape", "program", *rates, "peak GiB", "breakdown of the time")
    for shape in options.shapes:
        argv = command_line(shape, 64 if options.tiny else SEQ, options.tiny, options.flags)
        for name in get_contenders(shape):
            if reason := find_problem(name):
                print(f"{name} is skipped: {reason}", file=sys.stderr)
                continue
            result = measure_contender(name, argv, options.steps, options.device, options.tiny)
            report.add_row(
                shape,
                name,
                f"{result.seconds:.3f}",
                f"{result.tokens_per_s:,.0f}",
                f"{result.flops_per_s / 1e12:.2f}",
                f"{result.gemm_share:.0%}",
                f"{result.peak_gib:.1f}",
                ", ".join(result.breakdown),
            )
    if options.write:
        report.write("gpu.md")


if __name__ == "__main__":
    main()

"""Train slices of large models on one GPU: speed relative to the GEMM rate, memory, and a breakdown of the time.

    python scripts/bench_gpu.py [--shapes mixtral deepseek qwen3] [--steps 8] [--flags "..."] [--write]

Shapes, all at sequences of 4,096 in bf16 with random tokens:
* mixtral: four layers of Mixtral-8x7B;
* deepseek: four layers of DeepSeek-V3 with 64 experts, one of them dense, and one multi-token prediction depth;
* qwen3: four layers of Qwen3-30B-A3B.

Measured for each shape, in a separate process: median seconds of `train_step`, tokens per second, model FLOPs (formula
of Megatron-LM, estimate/flops.py) per second and as a share of the GEMM rate of the same process (8,192 cubed, bf16),
and peak memory of the allocator. A profile of one step gives the device time by kind of kernel, and the idle time. If
the packages are installed, MixtralForCausalLM of transformers and the layers of torchtitan (bench_baselines.py, without
a balancing loss) train the first shape too. --write records the table in scripts/bench_results/gpu.md.

--device cpu --tiny runs the same program on small slices as a test; its figures are meaningless.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_trainer.exit_codes import ExitCode  # noqa: E402
from scripts.bench_common import gemm_rate, provenance_line, timed, write_result  # noqa: E402 - this checkout's

SEQ = 4096
COMMON = (
    "--bf16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --lr-decay-style constant --train-iters 1000 "
    "--eval-iters 0 --mock-data --tokenizer-type NullTokenizer --transformer-impl local --logging-level 30"
)
SHAPES = {
    "mixtral": "--preset mixtral_8x7b --num-layers 4 --vocab-size 31999",
    "deepseek": "--preset deepseek_v3 --num-layers 4 --num-experts 64 --moe-router-num-groups 8 "
    "--moe-router-group-topk 4 "
    "--moe-layer-freq ([0]*1+[1]*3) --vocab-size 129279",
    "qwen3": "--preset qwen3_30b_a3b --num-layers 4 --vocab-size 151935",
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
    flags = (
        f"{SHAPES[shape]} {COMMON} --seq-length {seq} --max-position-embeddings {seq} {TINY if tiny else ''} {extra}"
    )
    return flags.split()


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
    flops_per_s = flops / seconds
    return Result(
        seconds, tokens / seconds, flops_per_s, flops_per_s / gemm_flops_per_s, peak_gib, breakdown(step, device)
    )


def breakdown(step, device: str) -> list[str]:
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


def gemm_flops_per_s(device: str, tiny: bool) -> float:
    """Return the GEMM rate of this process."""
    import torch

    return gemm_rate(torch.bfloat16, 512 if tiny else 8192, device)


def bench_moe_trainer(pipe, argv: list[str], steps: int, device: str, tiny: bool) -> None:
    """Train with this program and send the result; the main function of a process."""
    import arguments
    from arguments.vocabulary import get_padded_vocab_size
    from moe_trainer.estimate.flops import training_flops
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.context import TrainState
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    args = arguments.parse_args(argv, 1)
    rate = gemm_flops_per_s(device, tiny)
    run = make_run(args, 0, ParallelState.single(), steps + 4, device=device)
    state, training = TrainState(), args.training
    microbatches = training.global_batch_size // training.micro_batch_size
    vocab = get_padded_vocab_size(args, args.data.vocab_size + 1)
    flops = training_flops(args, training.global_batch_size, args.data.seq_length, vocab)

    def step() -> None:
        train_step(run, state, microbatches)
        state.iteration += 1

    pipe.send(measure(step, device, steps, training.global_batch_size * args.data.seq_length, flops, rate))


def bench_transformers(pipe, argv: list[str], steps: int, device: str, tiny: bool) -> None:
    """Train MixtralForCausalLM of the same shape, with bf16 parameters and fused AdamW."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    import arguments
    from moe_trainer.estimate.flops import training_flops

    args = arguments.parse_args(argv, 1)
    model, moe, seq, batch = args.model, args.moe, args.data.seq_length, args.training.global_batch_size
    vocab = args.data.vocab_size + 1
    config = MixtralConfig(
        vocab_size=vocab,
        hidden_size=model.hidden_size,
        intermediate_size=moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.query_groups,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.moe_router_topk,
        max_position_embeddings=seq,
        output_router_logits=True,
        attn_implementation="sdpa",
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    rate = gemm_flops_per_s(device, tiny)
    with torch.device(device):
        module = MixtralForCausalLM(config).bfloat16().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, vocab, (batch, seq), device=device)

    def step() -> None:
        for sample in tokens:
            module(input_ids=sample[None], labels=sample[None]).loss.div(batch).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    pipe.send(measure(step, device, steps, batch * seq, training_flops(args, batch, seq, vocab), rate))


def bench_torchtitan(pipe, argv: list[str], steps: int, device: str, tiny: bool) -> None:
    """Train the torchtitan model of the same shape, with bf16 parameters, fused AdamW and the full batch at once."""
    import arguments
    from moe_trainer.estimate.flops import training_flops
    from scripts.bench_baselines import Model, build_torchtitan

    args = arguments.parse_args(argv, 1)
    model, moe, seq, batch = args.model, args.moe, args.data.seq_length, args.training.global_batch_size
    shape = Model(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        experts=moe.num_experts,
        topk=moe.moe_router_topk,
        kv_heads=model.query_groups,
        seq=seq,
        micro=batch,
        together=False,
        heads=model.num_attention_heads,
        vocab=args.data.vocab_size + 1,
    )
    rate = gemm_flops_per_s(device, tiny)
    step, _ = build_torchtitan(shape, "bf16", device)
    pipe.send(measure(step, device, steps, batch * seq, training_flops(args, batch, seq, shape.vocab), rate))


CONTENDERS = {"moe-trainer": bench_moe_trainer, "transformers": bench_transformers, "torchtitan": bench_torchtitan}


def contenders(shape: str) -> tuple[str, ...]:
    """Return the contenders that have a model of this shape."""
    return tuple(CONTENDERS) if shape == "mixtral" else ("moe-trainer",)


def problem(contender: str) -> str | None:
    """Return why a contender cannot train here; None if it can."""
    from importlib.util import find_spec

    return (
        None
        if contender == "moe-trainer" or find_spec(contender) is not None
        else f"the package {contender} is not installed"
    )


def run_in_process(work, *args) -> Result:
    """Run `work` in a separate process, which frees all of its memory. Returns what it sent."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, *args))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        sys.exit(f"bench_gpu.py: {work.__name__} failed; see above")
    finally:
        process.join()


def table(options: argparse.Namespace) -> list[str]:
    """Run all shapes and contenders. Returns the table; each line is also printed."""
    lines = [
        "| shape | program | s per step | tokens/s | TFLOP/s | share of GEMM rate | peak GiB | breakdown of the time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    seq = 64 if options.tiny else SEQ
    for shape in options.shapes:
        argv = command_line(shape, seq, options.tiny, options.flags)
        for name in contenders(shape):
            if reason := problem(name):
                print(f"{name} is skipped: {reason}", file=sys.stderr)
                continue
            result = run_in_process(CONTENDERS[name], argv, options.steps, options.device, options.tiny)
            lines.append(
                f"| {shape} | {name} | {result.seconds:.3f} | {result.tokens_per_s:,.0f} "
                f"| {result.flops_per_s / 1e12:.2f} | {result.gemm_share:.0%} | {result.peak_gib:.1f} "
                f"| {', '.join(result.breakdown)} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="(default: all)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps (default: %(default)s)")
    parser.add_argument("--flags", default="", help="more flags of pretrain_moe.py, in one string")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, as a test")
    parser.add_argument("--write", action="store_true", help="record the table in scripts/bench_results/gpu.md")
    options = parser.parse_args()
    from arguments.machine import ALLOCATOR, EXPANDABLE

    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = EXPANDABLE  # as pretrain_moe.py, for every contender; torch reads it once
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_gpu.py: no CUDA device (--device cpu --tiny tests the program)", file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    flags = f", flags {options.flags}" if options.flags else ""
    head = f"{provenance_line(name)}, median of {options.steps} steps{flags}. Method: scripts/bench_gpu.py."
    text = ["# Slices of large models on one GPU", "", head, "", *table(options)]
    print("\n".join(text))
    if options.write:
        write_result("gpu.md", "\n".join(text))


if __name__ == "__main__":
    main()

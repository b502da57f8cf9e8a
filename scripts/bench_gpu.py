"""Train slices of large models on one GPU: speed against the GPU's own GEMM rate, memory, and where the time goes.

    python scripts/bench_gpu.py [--shapes mixtral deepseek qwen3] [--steps 8] [--flags "..."] [--write]

Shapes: four layers of Mixtral-8x7B; four of DeepSeek-V3 with 64 experts, one of them dense, and one multi-token prediction depth;
four of Qwen3-30B-A3B; all at sequences of 4,096 in bf16, weights from the named initialisation, random tokens. --flags adds flags of
pretrain_moe.py to every shape (say --recompute-granularity), and the table names them.

Measured, for each shape in a process of its own: median seconds of `train_step`, tokens per second, model FLOPs (Megatron-LM's formula,
shape/flops.py) per second and as a share of the GEMM rate of the same process (8,192 cubed, bf16), peak memory by the allocator; then
from a profile of one step: the device's time by kind of kernel, and how long it had nothing to do. Where the packages are installed,
transformers' MixtralForCausalLM of the first shape trains beside it, and torchtitan's layers (peers.py; without a balancing loss). --write records the table in scripts/bench_results/gpu.md.

--device cpu --tiny runs the same program on small slices, to see that it works; its figures mean nothing.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.measuring import gemm_rate, record, stamp, timed  # noqa: E402 - found beside this file

SEQ = 4096
COMMON = (
    "--bf16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --lr-decay-style constant --train-iters 1000 --eval-iters 0 --mock-data "
    "--tokenizer-type NullTokenizer --transformer-impl local --logging-level 30"
)
SHAPES = {
    "mixtral": "--preset mixtral_8x7b --num-layers 4 --vocab-size 31999",
    "deepseek": "--preset deepseek_v3 --num-layers 4 --num-experts 64 --moe-router-num-groups 8 --moe-router-group-topk 4 "
                "--moe-layer-freq ([0]*1+[1]*3) --vocab-size 129279",
    "qwen3": "--preset qwen3_30b_a3b --num-layers 4 --vocab-size 151935",
}
TINY = "--hidden-size 64 --ffn-hidden-size 64 --moe-ffn-hidden-size 32 --num-attention-heads 8 --num-experts 64 --vocab-size 255 --global-batch-size 2"
# kinds of kernels by what their names hold, the first that fits
KINDS = {
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "grouped", "_mm"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "communication": ("nccl",),
    "sort, gather, scatter": ("sort", "index", "gather", "scatter", "scan", "radix"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "elementwise": ("elementwise", "vectorized", "reduce", "softmax", "triton"),
}


def command_line(shape: str, seq: int, tiny: bool, extra: str) -> list[str]:
    flags = f"{SHAPES[shape]} {COMMON} --seq-length {seq} --max-position-embeddings {seq} {TINY if tiny else ''} {extra}"
    return flags.split()


def measured(step, steps: int, device: str) -> tuple[float, float]:
    """Median seconds of a step after three others, and the peak of memory in GiB."""
    import torch

    for _ in range(3):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed(step, device) for _ in range(steps))
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")


def breakdown(step, device: str) -> list[str]:
    """Device time of one step by kind of kernel, and the time without any."""
    import torch
    from torch.profiler import profile

    with profile() as found:
        wall = timed(step, device)
    of_device = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    sums: dict[str, float] = {}
    for event in found.key_averages():
        if event.device_type == of_device:
            spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
            name = event.key.lower()
            kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
            sums[kind] = sums.get(kind, 0.0) + spent / 1e6
    sums["nothing to do"] = max(0.0, wall - sum(sums.values()))
    return [f"{kind} {seconds / wall:.0%}" for kind, seconds in sorted(sums.items(), key=lambda item: -item[1]) if seconds / wall >= 0.005]


def ours(pipe, argv: list[str], steps: int, device: str, tiny: bool) -> None:
    """A process of its own: train, and send the row's figures."""
    import torch

    import arguments
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.proof.observe import make_run
    from moe_trainer.run import TrainState
    from moe_trainer.shape.flops import training_flops
    from moe_trainer.shape.vocab import vocab_rows
    from moe_trainer.training.step import train_step

    args = arguments.parse_args(argv, 1)
    rate = gemm_rate(torch.bfloat16, 512 if tiny else 8192, device)
    run = make_run(args, 0, ParallelState.single(), steps + 4, device=device)
    state, training = TrainState(), args.training
    microbatches = training.global_batch_size // training.micro_batch_size

    def step() -> None:
        train_step(run, state, microbatches)
        state.iteration += 1

    seconds, peak = measured(step, steps, device)
    flops = training_flops(args, training.global_batch_size, args.data.seq_length, vocab_rows(args, args.data.vocab_size + 1)) / seconds
    pipe.send((seconds, training.global_batch_size * args.data.seq_length / seconds, flops, flops / rate, peak, breakdown(step, device)))


def theirs(pipe, argv: list[str], steps: int, device: str, tiny: bool) -> None:
    """MixtralForCausalLM of the same shape, bf16 parameters and fused AdamW."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    import arguments
    from moe_trainer.shape.flops import training_flops

    args = arguments.parse_args(argv, 1)
    model, moe, seq, batch = args.model, args.moe, args.data.seq_length, args.training.global_batch_size
    vocab = args.data.vocab_size + 1
    config = MixtralConfig(
        vocab_size=vocab, hidden_size=model.hidden_size, intermediate_size=moe.moe_ffn_hidden_size or model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads, num_key_value_heads=model.query_groups,
        num_local_experts=moe.num_experts, num_experts_per_tok=moe.moe_router_topk, max_position_embeddings=seq, output_router_logits=True,
        attn_implementation="sdpa", use_cache=False, experts_implementation="grouped_mm")
    rate = gemm_rate(torch.bfloat16, 512 if tiny else 8192, device)
    with torch.device(device):
        net = MixtralForCausalLM(config).bfloat16().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, vocab, (batch, seq), device=device)

    def step() -> None:
        for row in tokens:
            net(input_ids=row[None], labels=row[None]).loss.div(batch).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, peak = measured(step, steps, device)
    flops = training_flops(args, batch, seq, vocab) / seconds
    pipe.send((seconds, batch * seq / seconds, flops, flops / rate, peak, breakdown(step, device)))


def titan(pipe, argv: list[str], steps: int, device: str, tiny: bool) -> None:
    """torchtitan's model of the same shape, bf16 parameters and fused AdamW; as many microbatches at once as a step has."""
    import torch

    import arguments
    from moe_trainer.shape.flops import training_flops
    from scripts.peers import Model, build_torchtitan

    args = arguments.parse_args(argv, 1)
    model, moe, seq, batch = args.model, args.moe, args.data.seq_length, args.training.global_batch_size
    shape = Model(layers=model.num_layers, hidden=model.hidden_size, ffn=moe.moe_ffn_hidden_size or model.ffn_hidden_size, experts=moe.num_experts,
                  topk=moe.moe_router_topk, kv_heads=model.query_groups, seq=seq, micro=batch, together=False, heads=model.num_attention_heads,
                  vocab=args.data.vocab_size + 1)
    rate = gemm_rate(torch.bfloat16, 512 if tiny else 8192, device)
    step, _ = build_torchtitan(shape, "bf16", device)
    seconds, peak = measured(step, steps, device)
    flops = training_flops(args, batch, seq, shape.vocab) / seconds
    pipe.send((seconds, batch * seq / seconds, flops, flops / rate, peak, breakdown(step, device)))


CONTENDERS = {"moe-trainer": ours, "transformers": theirs, "torchtitan": titan}


def contenders(shape: str) -> tuple[str, ...]:
    """Who trains a shape: the others have Mixtral's."""
    return tuple(CONTENDERS) if shape == "mixtral" else ("moe-trainer",)


def problem(contender: str) -> str | None:
    """Why a contender cannot train here; None if it can."""
    from importlib.util import find_spec

    return None if contender == "moe-trainer" or find_spec(contender) is not None else f"the package {contender} is not installed"


def apart(work, *given) -> tuple:
    """Run `work` in a process of its own, so that nothing it allocated stays. Returns: what it sent."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, *given))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        sys.exit(f"bench_gpu.py: {work.__name__} failed; see above")
    finally:
        process.join()


def table(given: argparse.Namespace) -> list[str]:
    lines = ["| shape | by | s per step | tokens/s | TFLOP/s | of the GEMM rate | peak GiB | where the time goes |", "|---|---|---|---|---|---|---|---|"]
    seq = 64 if given.tiny else SEQ
    for shape in given.shapes:
        argv = command_line(shape, seq, given.tiny, given.flags)
        for name in contenders(shape):
            if missing := problem(name):
                print(f"{name} is left out: {missing}", file=sys.stderr)
                continue
            seconds, tokens, flops, share, peak, kinds = apart(CONTENDERS[name], argv, given.steps, given.device, given.tiny)
            lines.append(f"| {shape} | {name} | {seconds:.3f} | {tokens:,.0f} | {flops / 1e12:.2f} | {share:.0%} | {peak:.1f} | {', '.join(kinds)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--flags", default="", help="more flags of pretrain_moe.py, in one string")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    from arguments.machine import ALLOCATOR, EXPANDABLE

    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = EXPANDABLE  # as pretrain_moe.py, for every contender; torch reads it once
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("bench_gpu.py: no CUDA device here (--device cpu --tiny shows that the program works)", file=sys.stderr)
        sys.exit(2)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    head = (f"{stamp(name)}, median of {given.steps} steps"
            f"{', flags ' + given.flags if given.flags else ''}. What is measured: see scripts/bench_gpu.py.")
    text = ["# Slices of large models on one GPU", "", head, "", *table(given)]
    print("\n".join(text))
    if given.write:
        record("gpu.md", "\n".join(text))


if __name__ == "__main__":
    main()

"""Train a small Mixtral on this CPU, with moe-trainer and with Hugging Face transformers, and compare.

    python scripts/bench_cpu.py [--rounds 7] [--steps 4] [--threads N] [--dtypes fp32 bf16] [--write]

The model: hidden 256, 4 layers, 8 experts top-2 with ffn 512, 8 heads over 4 key-value heads, sequences of 256, micro-batch 4,
vocabulary 8,192, balancing loss 0.01, AdamW, gradient clipping at 1. Each contender is a process of its own that builds the model
and then trains steps when told to; rounds alternate between them, so that a disturbance of the machine meets all alike, and the
median round counts. Ours is `train.train_step`, everything a training iteration does except reading data from files.

transformers runs as fast as it can here: the fastest of its expert implementations (tried first), sdpa attention, torch's fused AdamW;
in bf16 its parameters and optimizer state are bf16 throughout, which is less work than our fp32 main parameters and gradients;
"transformers, autocast" keeps fp32 parameters and multiplies in bf16, which is nearer to what we do. All but "default malloc" run with the
allocator settings that moe-trainer makes for itself at start (memory/host_allocator.py); "default malloc" is transformers as it comes.

Printed and (with --write) recorded in scripts/bench_results/: tokens per second, peak memory above that of the imported libraries,
and the share of the GEMM rate of this machine, measured in the same run. Operations per token: 6 per active weight of all matrix products, head
and router included, plus attention at its causal half; the embedding is a lookup.
"""

import argparse
import datetime
import functools
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

LAYERS, HIDDEN, FFN, EXPERTS, TOPK, HEADS, KV_HEADS = 4, 256, 512, 8, 2, 8, 4
SEQ, MICRO, VOCAB = 256, 4, 8192
TOKENS = SEQ * MICRO
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} "
    f"--group-query-attention --num-query-groups {KV_HEADS} --num-experts {EXPERTS} --moe-router-topk {TOPK} "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    f"--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {MICRO} --global-batch-size {MICRO} "
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0 "
    "--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --train-iters 1000000 --eval-iters 0 --eval-interval 1000 "
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --transformer-impl local --logging-level 30"
).split()


def flops_per_step() -> float:
    """Operations of the matrix products of one forward and backward."""
    attention = HIDDEN * HIDDEN * 2 + HIDDEN * (HIDDEN // HEADS) * KV_HEADS * 2
    experts = HIDDEN * EXPERTS + TOPK * 3 * HIDDEN * FFN
    weights = LAYERS * (attention + experts) + HIDDEN * VOCAB
    scores = LAYERS * SEQ * HIDDEN  # q k^T and p v: 2 products, causal half
    return 6.0 * TOKENS * (weights + scores)


def memory_mb() -> float:
    """Resident memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_memory_mb() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_batches():
    """Endless random (tokens, labels), the same for all contenders."""
    import torch

    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, VOCAB, (MICRO, SEQ + 1), generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_ours(dtype: str):
    """Returns step() -> loss, and a description."""
    from dataclasses import replace

    import torch

    import arguments
    from moe_trainer.data.loader import Batch
    from moe_trainer.data.tokenizer import build_tokenizer
    from moe_trainer.initialize import initialize
    from moe_trainer.place import Place
    from moe_trainer.run import TrainState, build_run
    from moe_trainer.train import set_training, train_step

    args = arguments.parse_args(FLAGS + (["--bf16"] if dtype == "bf16" else []), world_size=1)
    threads = torch.get_num_threads()
    runtime = initialize(args, Place(0, 1, 0, None, None, "benchmark"))
    torch.set_num_threads(threads)
    run = build_run(args, runtime, build_tokenizer(args.data))
    positions = torch.arange(SEQ).repeat(MICRO, 1)
    mask = torch.ones(MICRO, SEQ)
    batches = (Batch(tokens, labels, mask, positions) for tokens, labels in make_batches())
    run = replace(run, train_batches=batches)
    set_training(run.chunks, True)
    state = TrainState(iteration=0)

    def step() -> float:
        result = train_step(run, state, 1)
        state.iteration += 1
        return result.losses["lm loss"]

    return step, "train_step"


def build_theirs(dtype: str, implementation: str, autocast: bool = False):
    """Returns step() -> loss, and a description."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, num_local_experts=EXPERTS, num_experts_per_tok=TOPK, max_position_embeddings=SEQ,
        output_router_logits=True, router_aux_loss_coef=0.01, attn_implementation="sdpa", use_cache=False,
        experts_implementation=implementation,
    )
    torch.manual_seed(1)
    model = MixtralForCausalLM(config).train()
    if dtype == "bf16" and not autocast:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return make_their_step(model, optimizer, make_batches(), autocast), f"experts: {implementation}, attention: sdpa"


def make_their_step(model, optimizer, batches, autocast: bool):
    import torch
    import torch.nn.functional as F

    def step() -> float:
        tokens, labels = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(input_ids=tokens)
        loss = F.cross_entropy(output.logits.view(-1, VOCAB).float(), labels.view(-1))
        (loss + 0.01 * output.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def build_gemm(dtype: str):
    """The machine's GEMM rate: a step is one square product; the caller divides."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE).to(kind), torch.randn(GEMM_SIZE, GEMM_SIZE).to(kind)
    out = torch.empty(GEMM_SIZE, GEMM_SIZE, dtype=kind)

    def step() -> float:
        torch.mm(a, b.t(), out=out)
        return 0.0

    return step, f"{GEMM_SIZE} x {GEMM_SIZE} x {GEMM_SIZE}"


GEMM_SIZE = 2048
IMPLEMENTATIONS = ("grouped_mm", "eager")


def builders(dtype: str) -> dict:
    """Contenders by name; each value builds a step. transformers appears once for each way to run its experts."""
    found = {"moe-trainer": build_ours}
    for implementation in IMPLEMENTATIONS:
        found[f"transformers/{implementation}"] = functools.partial(build_theirs, implementation=implementation)
        found[f"transformers, default malloc/{implementation}"] = found[f"transformers/{implementation}"]
        if dtype == "bf16":
            found[f"transformers, autocast/{implementation}"] = functools.partial(
                build_theirs, implementation=implementation, autocast=True)
    return {**found, "gemm": build_gemm}


def contender(pipe, name: str, dtype: str, threads: int) -> None:
    """A process of its own: builds, then answers each number n with (seconds of n steps, last loss)."""
    import torch

    torch.set_num_threads(threads)
    sys.stdout = open(os.devnull, "w")
    if "default malloc" not in name:
        from moe_trainer.memory.host_allocator import keep_freed_memory

        keep_freed_memory()
    if name.startswith("transformers"):
        import transformers  # noqa: F401 - its memory belongs to the libraries, not to the training
    base = memory_mb()
    step, description = builders(dtype)[name](dtype)
    step()
    pipe.send(description)
    while (steps := pipe.recv()) > 0:
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        pipe.send((time.perf_counter() - start, loss))
    pipe.send(peak_memory_mb() - base)


def start(name: str, dtype: str, threads: int):
    """Start a contender. Returns: the process, and the pipe to it (its first message describes it)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=contender, args=(there, name, dtype, threads), daemon=True)
    process.start()
    return process, here


def race(dtype: str, rounds: int, steps: int, threads: int) -> dict:
    """All contenders of one dtype, in turns. Returns: name -> figures."""
    running = {name: start(name, dtype, threads) for name in builders(dtype)}
    results = {name: {"what": pipe.recv(), "seconds": []} for name, (_, pipe) in running.items()}

    def turn(name: str) -> float:
        running[name][1].send(steps)
        seconds, results[name]["loss"] = running[name][1].recv()
        return seconds / steps

    def leave(name: str) -> None:
        process, pipe = running.pop(name)
        pipe.send(0)
        results[name]["peak_memory_mb"] = round(pipe.recv())
        process.join()

    # of each contender that comes in several implementations, the fastest takes part
    for family in {name.split("/")[0] for name in running if "/" in name}:
        members = [name for name in running if name.split("/")[0] == family]
        best = min(members, key=lambda name: min(turn(name) for _ in range(3)))
        for name in members:
            if name != best:
                leave(name)
                del results[name]
    names = list(running)
    for round_number in range(rounds):
        for name in names if round_number % 2 == 0 else reversed(names):
            results[name]["seconds"].append(turn(name))
    for name in names:
        leave(name)
    results = {name.split("/")[0]: result for name, result in results.items()}
    rate = 2.0 * GEMM_SIZE**3 / statistics.median(results["gemm"]["seconds"])
    for name, result in results.items():
        seconds = statistics.median(result["seconds"])
        result["ms_per_step"] = round(seconds * 1e3, 1)
        result["best_ms_per_step"] = round(min(result["seconds"]) * 1e3, 1)
        if name != "gemm":
            result["tokens_per_s"] = round(TOKENS / seconds)
            result["share_of_gemm_rate"] = round(flops_per_step() / seconds / rate, 3)
    results["gemm"]["gflops"] = round(rate / 1e9)
    return results


def table(figures: dict) -> str:
    lines = [
        "| dtype | | tokens/s | ours is faster by | ms per step (best round) | peak memory MB | share of GEMM rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype, results in figures.items():
        ours = results["moe-trainer"]["tokens_per_s"]
        for name, r in results.items():
            if name == "gemm":
                lines.append(f"| {dtype} | GEMM {r['what']} | | | | | {r['gflops']} GFLOP/s |")
                continue
            ratio = "" if name == "moe-trainer" else f"{ours / r['tokens_per_s']:.2f} x"
            lines.append(f"| {dtype} | {name} ({r['what']}) | {r['tokens_per_s']:,} | {ratio} | {r['ms_per_step']} ({r['best_ms_per_step']}) "
                         f"| {r['peak_memory_mb']:,} | {r['share_of_gemm_rate']:.0%} |")
    return "\n".join(lines)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender per round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--write", action="store_true", help="record the result in scripts/bench_results/")
    given = parser.parse_args()
    figures = {dtype: race(dtype, given.rounds, given.steps, given.threads) for dtype in given.dtypes}
    print(table(figures))
    if given.write:
        import torch
        import transformers

        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
            "processor": processor(),
            "threads": given.threads,
            "load_average": os.getloadavg(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
            "rounds": given.rounds,
            "steps_per_round": given.steps,
            "figures": figures,
        }
        folder = ROOT / "scripts" / "bench_results"
        folder.mkdir(exist_ok=True)
        (folder / "cpu.json").write_text(json.dumps(record, indent=1) + "\n")
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        head = (
            f"# A small Mixtral on CPU\n\n{record['date']}, {record['processor']}, {given.threads} threads, {versions}; median of "
            f"{given.rounds} alternating rounds of {given.steps} steps; load average {os.getloadavg()[0]:.0f} (the benchmark alone: about "
            f"{given.threads}). What is measured: see scripts/bench_cpu.py.\n\n"
        )
        (folder / "cpu.md").write_text(head + table(figures) + "\n")


if __name__ == "__main__":
    main()

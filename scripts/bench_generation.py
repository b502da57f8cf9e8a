#!/usr/bin/env python3
"""Measure generation with a cache against full passes over the text for every token, on one CPU thread.

    python scripts/bench_generation.py [--prompt 256] [--new 64] [--texts 4] [--write]

Models of 8 layers with 8 experts and random weights: grouped queries, latent attention, and three layers of gated
DeltaNet for each one of grouped queries. Times are seconds of the processor (other work on the machine counts little).
"--write" records the table. The same tokens are written in both ways; the script stops if they differ.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from arguments import parse_args
from moe_trainer.inference.generator import GenerationOptions, Generator
from moe_trainer.inference.model import Model
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.model.build import build_chunks
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.schedule import Schedule
from scripts.bench_common import Report, make_parser, provenance_line

VOCAB_SIZE, LAYERS = 8192, 8
MODEL = (
    f"--num-layers {LAYERS} --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-grouped-gemm --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE - 1} --transformer-impl local --no-rope-fusion"
)
GROUPED = "--group-query-attention --num-query-groups 2 --kv-channels 64"
ATTENTION = {
    "grouped queries": GROUPED,
    "latent attention": "--multi-latent-attention --rope-type rope --q-lora-rank 192 --kv-lora-rank 128 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm",
    "3 of 4 layers gated DeltaNet": f"{GROUPED} --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 64 "
    "--linear-value-head-dim 64",
}


def make_model(flags: str) -> Model:
    """Build a model on one rank."""
    ps, cpu = ParallelState.single(), torch.device("cpu")
    chunks = build_chunks(parse_args(f"{MODEL} {flags}".split(), 1), ps, VOCAB_SIZE)
    return Model(chunks, Schedule(ScheduleKind(), ps.pp, cpu), ps, cpu, 4096, VOCAB_SIZE)


def continue_by_full_passes(chunk: Transformer, prompts: torch.Tensor, new: int) -> list[list[int]]:
    """Return the greedy tokens after prompts of one length; every token is a pass over the whole text."""
    tokens_BS = prompts
    with torch.no_grad():
        for _ in range(new):
            positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
            tokens_BS = torch.cat([tokens_BS, chunk(tokens_BS, positions_BS)[:, -1:].argmax(-1)], 1)
    return tokens_BS[:, prompts.shape[1] :].tolist()


def seconds(action: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return the processor's time of an action, and what it returns."""
    start = time.process_time()
    found = action()
    return time.process_time() - start, found


def cache_bytes(model: Model, prompts: torch.Tensor) -> int:
    """Return the bytes of the cache after the first pass over prompts, which fill it."""
    length = prompts.shape[1]
    cache = KVCache([length] * len(prompts), length, model.device)
    with model.evaluating():
        model.chunks[0](prompts, torch.arange(length).expand_as(prompts), borders=SequenceBorders(cache=cache))
    return cache.num_bytes


def measure(report: Report, name: str, num_texts: int, length: int, new: int) -> None:
    """Add the row of a model."""
    torch.manual_seed(1)
    model = make_model(ATTENTION[name])
    prompts = torch.randint(VOCAB_SIZE, (num_texts, length))
    options = GenerationOptions(new, lambda tokens: False)
    generator = Generator(model, num_texts, VOCAB_SIZE)
    generator.generate(prompts[:, :8].tolist(), GenerationOptions(2, lambda tokens: False))
    first, _ = seconds(lambda: generator.generate(prompts.tolist(), GenerationOptions(1, lambda tokens: False)))
    cached, found = seconds(lambda: generator.generate(prompts.tolist(), options))
    full, wanted = seconds(lambda: continue_by_full_passes(model.chunks[0].eval(), prompts, new))
    if found != wanted:
        raise SystemExit(f"{name}: the tokens differ")
    later = (cached - first) / (new - 1)
    report.add_row(
        name,
        f"{first * 1000:,.0f} ms",
        f"{later * 1000:,.1f} ms",
        f"{num_texts * new / cached:,.1f}",
        f"{num_texts * new / full:,.1f}",
        f"{full / cached:.1f}",
        f"{cache_bytes(model, prompts) / (num_texts * length):,.0f}",
    )


def main() -> None:
    """Run the program."""
    parser = make_parser(__doc__, "scripts/bench_results/generation.md")
    parser.add_argument("--prompt", type=int, default=256, metavar="N", help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="new tokens of a text")
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="texts of the batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(
        "# Generation with a cache",
        f"`scripts/bench_generation.py`: {options.texts} texts, prompts of {options.prompt} tokens, {options.new} new "
        "ones, fp32, one thread, seconds of the processor.",
        provenance_line(),
    )
    columns = ("first pass", "later pass", "tokens/s", "tokens/s by full passes", "ratio", "cache, bytes per position")
    report.start_table("attention", *columns)
    for name in ATTENTION:
        measure(report, name, options.texts, options.prompt, options.new)
    if options.write:
        report.write("generation.md")


if __name__ == "__main__":
    main()

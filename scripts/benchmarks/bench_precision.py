"""Measure what training in 8 and 4 bits costs in loss: one tiny model, the same text and initial weights, every recipe.

    python scripts/benchmarks/bench_precision.py [--iterations 300] [--recipes NAME...] [--seeds 1] [--write]

The text is the bytes of the sources of this Python installation, which every machine has; the model reads bytes. The
recipes are computed as defined (quantize, dequantize, GEMM in fp32), so the losses are those of devices with such
units but for the order of sums. Reported: the mean loss of the last iterations and of held-out text, and both as a
difference to bf16, of the same seed and averaged, with its standard error. fp32 shows how far two runs diverge that
differ in rounding alone. Gaps of such a model over so few iterations say that a recipe works, not what it costs at
scale.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from arguments import parse_args
from moe_trainer.data.loader import Batch
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.run import TrainRun, TrainState, with_batches
from moe_trainer.training.step import reduce_loss, run_microbatches, train_step
from moe_trainer.verification.training_trace import make_run
from scripts.benchmarks.bench_common import Report, make_parser
from scripts.provenance import provenance_line
from scripts.quickstart_text import python_sources

SEQ, BATCH, LAST, HELD_OUT = 64, 8, 50, 64
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --moe-ffn-hidden-size 64 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 --moe-router-dtype fp32 "
    f"--moe-aux-loss-coeff 1e-2 --seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {BATCH} "
    f"--global-batch-size {BATCH} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 "
    "--attention-dropout 0 --hidden-dropout 0 --mock-data --eval-iters 0 --tokenizer-type NullTokenizer "
    "--vocab-size 255 --transformer-impl local"
).split()
RECIPES = {
    "bf16": "--bf16",
    "fp32": "",
    "delayed, hybrid": "--bf16 --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "tensorwise, hybrid": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise, e4m3": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8, e4m3": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--bf16 --fp4-format e2m1",
    "nvfp4, last layer in bf16": "--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0",
}


def read_text_bytes(sequences: int) -> torch.Tensor:
    """Return the bytes of real text, [sequences, SEQ + 1]."""
    wanted = sequences * (SEQ + 1)
    data = "\n".join(python_sources(2 * wanted)).encode()[:wanted]
    assert len(data) == wanted, "this Python installation has too little text"
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(sequences, SEQ + 1).long()


def make_batch(text: torch.Tensor) -> Batch:
    """Return a batch that predicts every next byte."""
    return Batch(text[:, :-1], text[:, 1:], torch.ones(len(text), SEQ), torch.arange(SEQ).expand(len(text), SEQ))


def train(flags: str, text: torch.Tensor, iterations: int, seed: int) -> tuple[float, float, float]:
    """Return the mean loss of the last iterations, the loss of held-out text, and seconds per iteration."""
    argv = [*MODEL, *flags.split(), "--train-iters", str(iterations), "--seed", str(1234 + seed)]
    run = make_run(parse_args(argv, 1), 0, ParallelState.single(), 0)
    order = torch.randperm(len(text) - HELD_OUT, generator=torch.Generator().manual_seed(seed))[: iterations * BATCH]
    run = with_batches(run, (make_batch(text[rows]) for rows in order.split(BATCH)))
    state, losses, began = TrainState(), [], time.perf_counter()
    for _ in range(iterations):
        losses.append(train_step(run, state, 1).losses["lm loss"])
        state.iteration, state.scheduled_samples = state.iteration + 1, state.scheduled_samples + BATCH
    seconds = (time.perf_counter() - began) / iterations
    return statistics.fmean(losses[-LAST:]), evaluate(run, text[-HELD_OUT:]), seconds


def evaluate(run: TrainRun, text: torch.Tensor) -> float:
    """Return the mean loss of some sequences."""
    for chunk in run.chunks:
        chunk.train(False)
    with torch.no_grad():
        batches = (make_batch(rows) for rows in text.split(BATCH))
        sums = run_microbatches(run, batches, len(text) // BATCH, forward_only=True)
    loss, tokens = reduce_loss(run, sums)
    return loss / tokens


def _gap(gaps: list[float]) -> str:
    """Format the mean over the seeds, with its standard error if there are several."""
    error = f" (+- {statistics.stdev(gaps) / len(gaps) ** 0.5:.2%})" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.2%}{error}"


def main() -> None:
    parser = make_parser(__doc__, "precision.md")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = read_text_bytes(options.iterations * BATCH + HELD_OUT)
    report = Report(
        "# Loss of training in 8 and 4 bits",
        "",
        f"{provenance_line()}, {options.iterations} iterations of {BATCH} x {SEQ} bytes, {options.seeds} seed(s), mean "
        f"of the last {LAST} iterations; gaps to bf16. Method: scripts/benchmarks/bench_precision.py.",
    )
    report.start_table("recipe", "flags", "last iterations", "gap", "held out", "gap", "seconds an iteration")
    reference = None
    for name in dict.fromkeys(["bf16", *options.recipes]):
        runs = [train(RECIPES[name], text, options.iterations, seed) for seed in range(options.seeds)]
        reference = reference or runs
        last, held_out, seconds = map(statistics.fmean, zip(*runs))
        gaps = [
            _gap([(run[part] - other[part]) / other[part] for run, other in zip(runs, reference)]) for part in (0, 1)
        ]
        losses = f"{last:.4f}", gaps[0], f"{held_out:.4f}", gaps[1]
        report.add_row(name, f"`{RECIPES[name]}`", *losses, f"{seconds:.2f}")
    if options.write:
        report.write("precision.md")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Train a tiny dense model, upcycle it in three ways, and train all four on with equally many tokens.

    python scripts/bench_upcycling.py FOLDER [--iterations 150] [--more 75] [--data runs/quickstart/data]

FOLDER is new. The dense model has the sizes of the preset finermoe_tiny. Copies: 4 experts, top-2; pieces: 8 experts of
half the width in virtual groups, top-4; FineRMoE: 16 experts, 4-2-1-2, plus the dense network. Tokens/s: the median
over the second half of a run. Source of the recorded run: scripts/bench_results/upcycling.md.
"""

import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments.paths import local_path
from scripts.bench_common import Report, make_parser, provenance_line

VOCAB_SIZE, BATCH = 4096, 16
MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --add-qkv-bias --max-position-embeddings 1024 --position-embedding-type rope "
    "--rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 "
    f"--global-batch-size {BATCH} --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 "
    "--eval-interval 100000 --eval-iters 8 --save-interval 100000 --log-interval 1"
)
BALANCED = (
    "--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm"
)
WAYS = {
    "dense, trained on": "",
    "copies": f"--num-experts 4 --moe-router-topk 2 {BALANCED}",
    "pieces (granularity 2)": "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 "
    f"--moe-ffn-hidden-size 192 {BALANCED}",
    "FineRMoE 4-2-1-2": "--finermoe-intermediate-granularity 4 --finermoe-output-granularity 2 "
    "--finermoe-intermediate-expansion 1 --finermoe-output-expansion 2 --moe-router-topk 2 "
    f"--moe-shared-expert-intermediate-size 384 --moe-shared-expert-gate {BALANCED}",
}


def run_script(name: str, flags: str) -> None:
    """Run a script of this repository without its output; `flags` is text as a shell reads it."""
    subprocess.run([sys.executable, ROOT / name, *shlex.split(flags)], check=True, stdout=subprocess.DEVNULL)


def make_text(folder: Path) -> None:
    """Make the text, the tokenizer and the tokens of the quickstart."""
    folder = shlex.quote(str(folder))
    run_script("scripts/quickstart_text.py", f"{folder} --vocab-size {VOCAB_SIZE}")
    run_script(
        "scripts/preprocess_data.py",
        f"--input {folder}/text.jsonl --output-prefix {folder}/text --tokenizer-type SentencePieceTokenizer "
        f"--tokenizer-model {folder}/tokenizer.model --workers 2 --append-eod",
    )


def train(folder: Path, flags: str) -> tuple[float, float]:
    """Run a job that saves its metrics in the folder. Returns its validation loss and its tokens/s."""
    folder.mkdir(parents=True, exist_ok=True)
    output = shlex.quote(str(folder))
    run_script("pretrain_moe.py", f"{flags} --save {output} --metrics-file {output}/metrics.jsonl")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["lm loss"] for record in records if record.get("validation") == "validation"]
    rates = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    rates = rates[len(rates) // 2 :]
    return losses[-1], statistics.median(rates) if rates else float("nan")


def count_parameters(flags: str) -> list[str]:
    """Return all parameters of a model and the active ones of a token, in millions."""
    import arguments
    from moe_trainer.estimate import parameters

    run = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --seq-length 128 --train-iters 1"
    counts = parameters.count_parameters(
        arguments.parse_args(f"{MODEL} {flags} {run} --lr 1e-3".split(), 1), VOCAB_SIZE
    )
    return [f"{count / 1e6:.2f} M" for count in (counts.total, counts.active)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=local_path)
    parser.add_argument("--iterations", type=int, default=150, help="of the dense model")
    parser.add_argument("--more", type=int, default=75, help="iterations after upcycling")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument(
        "--data", type=local_path, help="folder with text and tokenizer of a quickstart (default: make them)"
    )
    options = parser.parse_args()
    data, dense = options.data or options.folder / "data", options.folder / "dense"
    if options.data is None:
        make_text(data)
    corpus = shlex.quote(str(data))
    common = (
        f"{MODEL} --seq-length {options.seq_length} --data-path {corpus}/text_text_document --split 95,5,0 "
        f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {corpus}/tokenizer.model --lr-warmup-fraction 0.1"
    )
    tokens = BATCH * options.seq_length
    loss, rate = train(dense, f"{common} --train-iters {options.iterations} --lr 2e-3 --min-lr 2e-4")
    report = Report(
        "# Upcycling a dense model",
        "",
        f"{provenance_line()}. Method: scripts/bench_upcycling.py. The dense model is trained on "
        f"{options.iterations * tokens:,} tokens, then each model on {options.more * tokens:,} more, on the same "
        "text from its beginning.",
    )
    columns = "model", "parameters", "active", "tokens/s", "validation loss: as upcycled", "trained on"
    report.start_table(*columns)
    report.add_row("dense", *count_parameters(""), f"{rate:,.0f}", f"{loss:.4f}", "")
    for name, flags in WAYS.items():
        folder = options.folder / f"more_{name.split()[0].strip(',').lower()}"
        start = f"{'--moe-use-upcycling' if flags else '--finetune'} --load {shlex.quote(str(dense))}"
        job = f"{common} {flags} {start} --train-iters {options.more} --lr 1e-3 --min-lr 1e-4"
        before, _ = train(folder / "before", f"{job} --skip-train")
        after, rate = train(folder / "after", job)
        report.add_row(name, *count_parameters(flags), f"{rate:,.0f}", f"{before:.4f}", f"{after:.4f}")


if __name__ == "__main__":
    main()

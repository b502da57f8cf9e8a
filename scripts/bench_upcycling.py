#!/usr/bin/env python3
"""Train a tiny dense model, upcycle it in three ways, and train all four on with equally many tokens.

    python scripts/bench_upcycling.py FOLDER [--iterations 150] [--more 75] [--data runs/quickstart/data]

FOLDER is new. The dense model has the sizes of the preset finermoe_tiny. Copies: 4 experts, top-2; pieces: 8 experts of
half the width in virtual groups, top-4; FineRMoE: 16 experts, 4-2-1-2, plus the dense network. Tokens/s: the median
over the second half of a run. Source of the recorded run: scripts/bench_results/upcycling.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from scripts.bench_common import provenance_line  # noqa: E402

VOCABULARY = 4096
MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --add-qkv-bias "
    "--max-position-embeddings 1024 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm "
    "--norm-epsilon 1e-6 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 4 --global-batch-size 16 "
    "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --eval-interval 100000 --eval-iters "
    "8 --save-interval 100000 "
    "--log-interval 1"
).split()
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


def make_text(folder: Path) -> None:
    """The quickstart's text, its tokenizer and its tokens."""
    for words in (
        ("quickstart_text.py", folder, "--vocab-size", VOCABULARY),
        (
            "preprocess_data.py",
            "--input",
            folder / "text.jsonl",
            "--output-prefix",
            folder / "text",
            "--tokenizer-type",
            "SentencePieceTokenizer",
            "--tokenizer-model",
            folder / "tokenizer.model",
            "--workers",
            2,
            "--append-eod",
        ),
    ):
        subprocess.run(
            [sys.executable, str(_ROOT / "scripts" / words[0]), *map(str, words[1:])],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def train(folder: Path, flags: list[str]) -> tuple[float, float]:
    """Run a job that keeps its metrics in the folder. Returns: its validation loss and its tokens/s.

    Raises: RuntimeError when it fails.
    """
    metrics = folder / "metrics.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(_ROOT / "pretrain_moe.py"), *flags, "--save", str(folder), "--metrics-file", str(metrics)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(flags)}: {done.stderr[-2000:]}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [record["lm loss"] for record in records if record.get("validation") == "validation"]
    rates = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    rates = rates[len(rates) // 2 :]
    return losses[-1], statistics.median(rates) if rates else float("nan")


def parameters(flags: list[str]) -> tuple[int, int]:
    """All parameters of a model and those that a token meets."""
    import arguments
    from moe_trainer.estimate.parameters import count_parameters

    counts = count_parameters(
        arguments.parse_args(
            [
                *MODEL,
                *flags,
                "--mock-data",
                "--tokenizer-type",
                "NullTokenizer",
                "--vocab-size",
                str(VOCABULARY),
                "--seq-length",
                "128",
                "--train-iters",
                "1",
                "--lr",
                "1e-3",
            ],
            1,
        ),
        VOCABULARY,
    )
    return counts.total, counts.active


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=150, help="of the dense model")
    parser.add_argument("--more", type=int, default=75, help="iterations after upcycling")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--data", type=Path, help="folder with text and tokenizer of a quickstart; else they are made")
    options = parser.parse_args(words)
    data = options.data or options.folder / "data"
    if options.data is None:
        make_text(data)
    common = [
        *MODEL,
        "--seq-length",
        str(options.seq_length),
        "--data-path",
        str(data / "text_text_document"),
        "--split",
        "95,5,0",
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-model",
        str(data / "tokenizer.model"),
    ]
    dense = options.folder / "dense"
    tokens = 16 * options.seq_length
    loss, rate = train(
        dense,
        [
            *common,
            "--train-iters",
            str(options.iterations),
            "--lr",
            "2e-3",
            "--min-lr",
            "2e-4",
            "--lr-warmup-fraction",
            "0.1",
        ],
    )
    print(
        f"{provenance_line()}. See scripts/bench_upcycling.py. The dense model: {options.iterations * tokens:,} "
        f"tokens; then {options.more * tokens:,} each, on the "
        "same text from its beginning.\n"
    )
    print(
        "| model | parameters | active | tokens/s | validation loss: as upcycled | trained on "
        "|\n|---|---|---|---|---|---|"
    )
    print(
        f"| dense | {parameters([])[0] / 1e6:.2f} M | {parameters([])[1] / 1e6:.2f} M | {rate:,.0f} | {loss:.4f} | |",
        flush=True,
    )
    for name, spelled in WAYS.items():
        flags, folder = spelled.split(), options.folder / name.split()[0].strip(",").lower()
        folder = folder.with_name(f"more_{folder.name}")
        start = ["--moe-use-upcycling"] if flags else ["--finetune"]
        more = [
            *common,
            *flags,
            *start,
            "--load",
            str(dense),
            "--train-iters",
            str(options.more),
            "--lr",
            "1e-3",
            "--min-lr",
            "1e-4",
            "--lr-warmup-fraction",
            "0.1",
        ]
        before, _ = train(folder / "before", [*more, "--skip-train"])
        after, rate = train(folder / "after", more)
        total, active = parameters(flags)
        print(
            f"| {name} | {total / 1e6:.2f} M | {active / 1e6:.2f} M | {rate:,.0f} | {before:.4f} | {after:.4f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

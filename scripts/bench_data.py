"""Measure what surrounds training: flags, start-up, text to tokens, checkpoints.

    python scripts/bench_data.py [--rounds 5] [--megabytes 16] [--parameters 60] [--write]

* flags: resolving and judging 1,000 command lines (the model zoo's presets with different ranks and batches) in one
  process, and `pretrain_moe.py --validate-only` as a command;
* start: from the command to the end of the first iteration of a tiny model, and what importing torch alone takes;
* tokens: `preprocess_data.py` with one worker on text that every machine has (the sources of this Python), next to the
  tokenizer library alone on the same documents, in memory, without reading, splitting or writing anything: the share is
  what our part leaves of it;
* checkpoints: saving and loading `--parameters` million parameters with their optimizer state, next to writing (and
  fsync) and reading the same bytes as one plain file on the same disk, in turns.

Medians of some rounds; ratios are within one run. --write records the table in scripts/bench_results/data.md.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench_common import load_line, provenance_line, write_result

BLOCK_BYTES = 64 << 20
TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 "
    "--swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 64 "
    "--max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --eval-iters 0 --lr 1e-4 --lr-decay-style constant "
    "--mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local"
).split()


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def command(*argv: str) -> float:
    """Processor seconds of a command, its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def flags(rounds: int) -> list[str]:
    from arguments.report import run_validate_only
    from moe_trainer.estimate.parameters import params_report

    presets = sorted(path.stem for path in (ROOT / "model_zoo").glob("*.yaml"))
    lines = [
        [
            "--preset",
            presets[number % len(presets)],
            "--world-size",
            str(8 << number % 8),
            "--global-batch-size",
            str(4096 + 4096 * (number % 7)),
            "--mock-data",
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            "32000",
        ]
        for number in range(1000)
    ]

    def all_of_them() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            for line in lines:
                run_validate_only(line, params_report)

    before = time.process_time()
    all_of_them()
    once = time.process_time() - before
    alone = statistics.median(command("pretrain_moe.py", "--validate-only", *TINY) for _ in range(rounds))
    return [
        f"| flags | 1,000 command lines in one process | {len(lines) / once:.0f} a second of one core |",
        f"| flags | `--validate-only` as a command | {alone:.2f} s CPU |",
    ]


def start(rounds: int) -> list[str]:
    times = {"torch": [], "job": []}
    for _ in range(rounds):
        times["torch"].append(command("-c", "import torch"))
        times["job"].append(command("pretrain_moe.py", *TINY))
    torch_s, job_s = (statistics.median(times[name]) for name in ("torch", "job"))
    return [
        f"| start | importing torch | {torch_s:.2f} s CPU |",
        f"| start | from the command to the end of a one-iteration job | {job_s:.2f} s CPU, {job_s / torch_s:.2f} x "
        "torch alone |",
    ]


def tokens(rounds: int, megabytes: float, folder: Path) -> list[str]:
    from quickstart_text import python_sources
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    documents = list(python_sources(int(megabytes * 1e6)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        documents[::8], trainers.BpeTrainer(vocab_size=8192, show_progress=False, special_tokens=["<|end|>"])
    )
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(
            command(
                "scripts/preprocess_data.py",
                "--input",
                str(folder / "text.jsonl"),
                "--output-prefix",
                str(folder / "out"),
                "--workers",
                "1",
                "--tokenizer-type",
                "HuggingFaceTokenizer",
                "--tokenizer-model",
                str(folder / "tokenizer"),
                "--append-eod",
            )
        )
        before = time.process_time()
        count = sum(len(tokenizer.encode(document, add_special_tokens=False).ids) for document in documents)
        theirs.append(time.process_time() - before)
    one, two = statistics.median(ours), statistics.median(theirs)
    return [
        f"| tokens | `preprocess_data.py`, {megabytes:.0f} MB of text | {count / one:,.0f} tokens a second of one core "
        "|",
        f"| tokens | the library `tokenizers` alone | {count / two:,.0f} tokens a second of one core; ours reaches "
        f"{two / one:.0%} of it |",
    ]


def write_plain(path: Path, size: int, block: bytes) -> None:
    with open(path, "wb") as file:
        for begin in range(0, size, len(block)):
            file.write(block[: min(len(block), size - begin)])
        file.flush()
        os.fsync(file.fileno())


def read_plain(path: Path, buffer: bytearray) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def checkpoints(rounds: int, millions: int, folder: Path) -> list[str]:
    import torch

    import arguments
    from moe_trainer.checkpoint.manager import load, save
    from moe_trainer.checkpoint.options import CheckpointState, LoadOptions, SaveOptions
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.verification.training_trace import make_run

    torch.set_num_threads(1)
    width = 1024
    experts = max(2, round(millions * 1e6 / (3 * width * width)))
    argv = [
        *TINY,
        "--num-layers",
        "1",
        "--hidden-size",
        str(width),
        "--moe-ffn-hidden-size",
        str(width),
        "--num-experts",
        str(experts),
    ]
    args = arguments.parse_args(argv, 1)
    run = make_run(args, 0, ParallelState.single(), 0)
    times: dict[str, list[float]] = {"save": [], "load": [], "write": [], "read": []}
    plain = folder / "plain"
    for number in range(1, rounds + 1):
        target, content = folder / "checkpoints", CheckpointState(iteration=number, args=args.as_dict())
        times["save"].append(
            seconds(partial(save, target, content, run.chunks, run.optimizer, run.ps, SaveOptions(save_rng=False)))
        )
        saved = target / f"iter_{number:07d}"
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        times["load"].append(
            seconds(
                partial(load, target, run.chunks, run.optimizer, run.ps, LoadOptions(args.as_dict(), load_rng=False))
            )
        )
        times["write"].append(seconds(partial(write_plain, plain, size, bytes(BLOCK_BYTES))))
        times["read"].append(seconds(partial(read_plain, plain, bytearray(BLOCK_BYTES))))
        for path in saved.iterdir():
            path.unlink()
    median = {name: statistics.median(values) for name, values in times.items()}
    return [
        f"| checkpoints | {name} {size / 1e9:.2f} GB (weights, moments) | {size / median[name] / 1e9:.2f} GB/s; a "
        f"plain {plainly} of as many bytes "
        f"{size / median[plainly] / 1e9:.2f} GB/s; {median[plainly] / median[name]:.0%} of it |"
        for name, plainly in (("save", "write"), ("load", "read"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=16.0, help="of text to tokenize")
    parser.add_argument("--parameters", type=int, default=60, help="millions of them in the checkpoint")
    parser.add_argument("--write", action="store_true")
    parsed = parser.parse_args()
    machine = provenance_line(software=f"python {platform.python_version()}")
    head = (
        f"{machine}, median of {parsed.rounds} rounds, {load_line()} before the run. "
        "What is measured: see scripts/bench_data.py."
    )
    text = ["# Flags, start, tokens, checkpoints", "", head, "", "| what | | |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in (
            lambda: flags(parsed.rounds),
            lambda: start(parsed.rounds),
            lambda: tokens(parsed.rounds, parsed.megabytes, folder),
            lambda: checkpoints(parsed.rounds, parsed.parameters, folder),
        ):
            text += part()
            print(*text[-2:], sep="\n", flush=True)
    if parsed.write:
        write_result("data.md", "\n".join(text))


if __name__ == "__main__":
    main()

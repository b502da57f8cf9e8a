"""Measure what surrounds training: flags, start-up, text to tokens, checkpoints.

    python scripts/benchmarks/bench_data.py [--rounds 5] [--megabytes 16] [--parameters 60] [--write]

* flags: resolving and validating 1,000 command lines (the model zoo's presets with different ranks and batches) in one
  process, and `pretrain_moe.py --validate-only` as a command;
* start: from the command to the end of the first iteration of a tiny model, and what importing torch alone takes;
* tokens: `preprocess_data.py` with one and two workers on text that every machine has (the sources of this Python),
  next to the tokenizer library alone on the same documents, in memory, without reading, splitting or writing anything:
  the share is what our part leaves of it. `encode_batch_fast` is the call that ours makes;
* checkpoints: saving and loading `--parameters` million parameters with their optimizer state, next to writing (and
  fsync) and reading the same bytes as one plain file on the same disk, in turns.

Medians of some rounds; ratios are within one run.
"""

import contextlib
import io
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.benchmarks.bench_common import Report, make_parser, timed
from scripts.provenance import load_line, provenance_line

BLOCK_BYTES = 64 << 20
TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --eval-iters 0 --lr 1e-4 "
    "--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local"
).split()
Rows = list[tuple[str, str]]
"""What was measured, and the result."""


def command_seconds(*argv: str) -> float:
    """Return the processor seconds of a Python command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def flags(rounds: int) -> Rows:
    from moe_trainer.commands.validate_only import run_validate_only

    presets = sorted(path.stem for path in (ROOT / "model_zoo").glob("*.yaml"))
    lines = [
        f"--preset {presets[number % len(presets)]} --world-size {8 << number % 8} --global-batch-size "
        f"{4096 + 4096 * (number % 7)} --mock-data --tokenizer-type NullTokenizer --vocab-size 32000".split()
        for number in range(1000)
    ]
    before = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        for line in lines:
            run_validate_only(line)
    once = time.process_time() - before
    alone = statistics.median(command_seconds("pretrain_moe.py", "--validate-only", *TINY) for _ in range(rounds))
    return [
        ("1,000 command lines in one process", f"{len(lines) / once:.0f} a second of one core"),
        ("`--validate-only` as a command", f"{alone:.2f} s CPU"),
    ]


def start(rounds: int) -> Rows:
    commands = ("-c", "import torch"), ("pretrain_moe.py", *TINY)
    times = [[command_seconds(*command) for command in commands] for _ in range(rounds)]
    torch_s, job_s = map(statistics.median, zip(*times))
    return [
        ("importing torch", f"{torch_s:.2f} s CPU"),
        (
            "from the command to the end of a one-iteration job",
            f"{job_s:.2f} s CPU, {job_s / torch_s:.2f} x torch alone",
        ),
    ]


def tokens(rounds: int, megabytes: float, folder: Path) -> Rows:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from scripts.quickstart_text import python_sources

    documents = list(python_sources(int(megabytes * 1e6)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8192, show_progress=False, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(documents[::8], trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(f"{folder}/tokenizer/tokenizer.json")
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = (
        f"--input {folder}/text.jsonl --output-prefix {folder}/out --append-eod "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/tokenizer"
    ).split()

    def in_batches(encode: Callable) -> int:
        batches = (documents[first : first + 256] for first in range(0, len(documents), 256))
        return sum(len(each.ids) for batch in batches for each in encode(batch, add_special_tokens=False))

    ours: dict[int, list[float]] = {1: [], 2: []}
    theirs: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": []}
    for _ in range(rounds):
        for workers, times in ours.items():
            times.append(command_seconds("scripts/preprocess_data.py", *options, "--workers", str(workers)))
        for method, times in theirs.items():
            before = time.process_time()
            count = in_batches(getattr(tokenizer, method))
            times.append(time.process_time() - before)
    ours_s = {workers: statistics.median(times) for workers, times in ours.items()}
    theirs_s = {method: statistics.median(times) for method, times in theirs.items()}

    def rate(seconds: float) -> str:
        return f"{count / seconds:,.0f} tokens, {megabytes / seconds:.2f} MB a second of one core"

    return [
        *(
            (f"`preprocess_data.py --workers {workers}`, {megabytes:.0f} MB of text", rate(seconds))
            for workers, seconds in ours_s.items()
        ),
        *(
            (f"`{method}` of `tokenizers` alone", f"{rate(seconds)}; ours reaches {seconds / ours_s[1]:.0%} of it")
            for method, seconds in theirs_s.items()
        ),
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


def checkpoints(rounds: int, millions: int, folder: Path) -> Rows:
    import torch

    import arguments
    from moe_trainer.checkpoint.manager import load, save
    from moe_trainer.checkpoint.options import CheckpointState, LoadOptions, SaveOptions
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.verification.training_trace import make_run

    torch.set_num_threads(1)
    width = 1024
    experts = max(2, round(millions * 1e6 / (3 * width * width)))
    sizes = f"--num-layers 1 --hidden-size {width} --moe-ffn-hidden-size {width} --num-experts {experts}"
    args = arguments.parse_args([*TINY, *sizes.split()], 1)
    run = make_run(args, 0, ParallelState.single(), 0)
    times: dict[str, list[float]] = {"save": [], "load": [], "write": [], "read": []}
    target, plain, model = folder / "checkpoints", folder / "plain", (run.chunks, run.optimizer, run.ps)
    for number in range(1, rounds + 1):
        content = CheckpointState(iteration=number, args=args.as_dict())
        times["save"].append(timed(partial(save, target, content, *model, SaveOptions(save_rng=False))))
        saved = target / f"iter_{number:07d}"
        size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        times["load"].append(timed(partial(load, target, *model, LoadOptions(args.as_dict(), load_rng=False))))
        times["write"].append(timed(partial(write_plain, plain, size, bytes(BLOCK_BYTES))))
        times["read"].append(timed(partial(read_plain, plain, bytearray(BLOCK_BYTES))))
        shutil.rmtree(saved)
    gigabytes = size / 1e9
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return [
        (
            f"{name} {gigabytes:.2f} GB (weights, moments)",
            f"{gigabytes / seconds[name]:.2f} GB/s; a plain {plainly} of as many bytes "
            f"{gigabytes / seconds[plainly]:.2f} GB/s; {seconds[plainly] / seconds[name]:.0%} of it",
        )
        for name, plainly in (("save", "write"), ("load", "read"))
    ]


def main() -> None:
    parser = make_parser(__doc__, "data.md")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=16.0, help="of text to tokenize")
    parser.add_argument("--parameters", type=int, default=60, help="millions of them in the checkpoint")
    options = parser.parse_args()
    machine = provenance_line(software=f"python {platform.python_version()}")
    report = Report(
        "# Flags, start, tokens, checkpoints",
        "",
        f"{machine}, median of {options.rounds} rounds, {load_line()} before the run. Method: scripts/benchmarks/"
        "bench_data.py.",
    )
    report.start_table("what", "", "")
    with tempfile.TemporaryDirectory() as folder:
        for measure, *sizes in (
            (flags,),
            (start,),
            (tokens, options.megabytes, Path(folder)),
            (checkpoints, options.parameters, Path(folder)),
        ):
            for row in measure(options.rounds, *sizes):
                report.add_row(measure.__name__, *row)
    if options.write:
        report.write("data.md")


if __name__ == "__main__":
    main()

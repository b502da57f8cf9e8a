#!/usr/bin/env python3
"""Compare FineRMoE with copies, pieces and a dense model: equal tokens, several seeds, in under an hour on two cores.

    python scripts/study_finermoe.py OUT            the study; the same command continues one that was interrupted
    python scripts/study_finermoe.py OUT --smoke    the same with a few iterations, in about two minutes

For every seed, a dense model with the sizes of finermoe_tiny is trained on the sources of this Python installation,
upcycled in the three ways of WAYS, and all four are trained on with equally many tokens in an order of their own.
Documents that no model was trained on give the validation loss and the bits per byte. Needs no network.

Prints the tables of docs/records/study_finermoe.md, and writes them to OUT/report.md. OUT/runs has log, metrics and
weights of every run. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import arguments
from arguments.paths import local_path
from moe_trainer.comparison.intervals import difference, interval
from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.errors import UserError
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import atomic_write
from scripts.provenance import provenance_line

SEQ_LENGTH, BATCH = 128, 16
MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --add-qkv-bias --max-position-embeddings 1024 --position-embedding-type rope "
    "--rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--micro-batch-size {BATCH} --global-batch-size {BATCH} --seq-length {SEQ_LENGTH} --lr-decay-style cosine "
    "--lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 "
    "--log-interval 5 --eval-iters 8 --save-interval 100000"
)
BALANCED = (
    "--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm"
)
WAYS = MappingProxyType(
    {
        "dense, trained on": "",
        "copies": f"--num-experts 4 --moe-router-topk 2 {BALANCED}",
        "pieces (granularity 2)": "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 "
        f"--moe-ffn-hidden-size 192 {BALANCED}",
        "FineRMoE 4-2-1-2": "--finermoe-intermediate-granularity 4 --finermoe-output-granularity 2 "
        "--finermoe-intermediate-expansion 1 --finermoe-output-expansion 2 --moe-router-topk 2 "
        f"--moe-shared-expert-intermediate-size 384 --moe-shared-expert-gate {BALANCED}",
    }
)
DENSE, START = next(iter(WAYS)), "dense before"

Results = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Size:
    """How much a study reads, and how long it trains."""

    megabytes: float
    vocab_size: int
    dense_iterations: int
    iterations: int
    evaluations: int


FULL, SMOKE = Size(10.0, 2048, 1600, 800, 4), Size(0.6, 1024, 6, 6, 2)


def run_program(script: str, words: Sequence[str], log: Path) -> None:
    """Run a script of this repository on one thread, which makes its losses repeatable.

    Raises:
        UserError: if it fails; the message has the end of its output.
    """
    command = [sys.executable, str(ROOT / script), *words]
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise UserError(f"{script} ended with exit code {code}; the end of {log}:\n{end}")


def make_data(data: Path, size: Size) -> None:
    """Make the tokenizer and the token files, once; the documents are in a shuffled, fixed order."""
    if (data / "done").exists():
        return
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    words = f"--vocab-size {size.vocab_size} --megabytes {size.megabytes}"
    run_program("scripts/quickstart_text.py", [str(data), *words.split()], data / "log.txt")
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{data}/tokenizer.model"]
    paths = ["--input", f"{data}/text.jsonl", "--output-prefix", f"{data}/text"]
    run_program("scripts/preprocess_data.py", [*paths, *tokenizer, "--append-eod"], data / "log.txt")
    (data / "done").touch()


def execute(folder: Path, size: Size, way: str, seed: int) -> dict[str, Any]:
    """Execute a run of a study and return its result: losses and routing. One that is finished is not repeated.

    Args:
        folder: of the study.
        size: of the study.
        way: one of WAYS, or START for the dense model before upcycling.
        seed: of the run.
    """
    run = folder / "runs" / f"{way.split(',')[0].split(' (')[0].replace(' ', '-')}-seed{seed}"
    if (run / "result.json").exists():
        return read_json(run / "result.json")
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted study
    run.mkdir()
    data = folder / "data"
    job = [*MODEL.split(), *WAYS.get(way, "").split(), "--tokenizer-type", "SentencePieceTokenizer"]
    job += ["--tokenizer-model", f"{data}/tokenizer.model", "--data-path", f"{data}/text_text_document"]
    job += "--split 97,3,0 --full-validation --no-save-optim --moe-per-layer-logging".split()
    records: list[dict[str, Any]] = []
    if way == START:
        job += f"--lr 2e-3 --min-lr 2e-4 --seed {seed} --train-iters {size.dense_iterations}".split()
        interval = size.dense_iterations + 1
    else:
        # The seed also orders the documents: another one than the dense model's reads them in another order.
        job += f"--lr 1e-3 --min-lr 1e-4 --seed {1000 + seed} --train-iters {size.iterations}".split()
        job += ["--load", str(folder / "runs" / f"{START.replace(' ', '-')}-seed{seed}" / "checkpoints")]
        job.append("--finetune" if way == DENSE else "--moe-use-upcycling")
        first = ["--skip-train", "--eval-interval", "1", "--save", f"{run}/upcycled"]
        run_program("pretrain_moe.py", [*job, *first, "--metrics-file", f"{run}/upcycled.jsonl"], run / "log.txt")
        shutil.rmtree(run / "upcycled", ignore_errors=True)
        records = read_records(run / "upcycled.jsonl")
        interval = size.iterations // size.evaluations + 1  # the end is always evaluated, too
    job += ["--eval-interval", str(interval), "--save", f"{run}/checkpoints"]
    run_program("pretrain_moe.py", [*job, "--metrics-file", f"{run}/metrics.jsonl"], run / "log.txt")
    result = {"way": way, "seed": seed} | read_result(records, read_records(run / "metrics.jsonl"))
    with atomic_write(run / "result.json") as file:
        json.dump(result, file, indent=1)
    return result


def read_json(path: Path) -> dict[str, Any]:
    """Return what a study wrote.

    Raises:
        UserError: if it is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        error: object = "no table"
    except (OSError, ValueError) as problem:
        error = problem
    raise UserError(f"{path} is damaged ({error}); remove it to write it again")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_result(start: Results, records: Results) -> dict[str, Any]:
    """Return what the report needs of the records of a run, and of the evaluation of the weights it started from."""
    losses = [record["lm loss"] for record in records if record.get("validation") == "validation"]
    result: dict[str, Any] = {"loss": losses[-1]}
    for record in start:
        if record.get("validation") == "validation":
            result["loss_at_start"] = record["lm loss"]
            # Only an evaluation that makes no model counts bytes: that of the dense model.
            result |= {name: record[name] for name in ("tokens", "bytes") if name in record}
    routing = [record["routing"]["tokens_per_expert"] for record in records if "routing" in record]
    if routing:
        last = routing[-max(1, len(routing) // 10) :]
        result["tokens_per_expert"] = [
            [sum(expert) for expert in zip(*layers, strict=True)] for layers in zip(*last, strict=True)
        ]
    return result


def of_way(results: Results, way: str) -> list[dict[str, Any]]:
    """Return the results of a way, by seed."""
    return sorted((result for result in results if result["way"] == way), key=lambda result: result["seed"])


def losses_table(results: Results, size: Size) -> list[str]:
    """Return the table of all ways: their sizes, and losses with 95 % intervals over the seeds."""
    counted = of_way(results, DENSE)[0]  # the validation text is the same in all runs
    bits, dense_flops, rows = counted["tokens"] / counted["bytes"] / math.log(2.0), 0.0, []
    for way, flags in WAYS.items():
        tokens = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {size.vocab_size} --train-iters 1 --lr 1e-3"
        args, runs = arguments.parse_args(f"{MODEL} {flags} {tokens}".split(), 1), of_way(results, way)
        counts, flops = count_parameters(args, size.vocab_size), training_flops(args, 1, SEQ_LENGTH, size.vocab_size)
        dense_flops = dense_flops or flops
        sizes = (f"{counts.total / 1e6:.2f} M", f"{counts.active / 1e6:.2f} M", f"{flops / dense_flops:.2f} x dense")
        losses = (interval([run[name] for run in runs]) for name in ("loss_at_start", "loss"))
        rows.append((way, *sizes, *losses, interval([run["loss"] * bits for run in runs])))
    columns = ("model", "parameters", "active", "FLOPs per token", "loss at start", "loss", "bits per byte")
    return markdown_table(columns, rows)


def differences_table(results: Results) -> list[str]:
    """Return the table of the differences of final losses.

    Runs of one seed start from one dense model and read one order of documents, so what these change cancels.
    """
    rows = []
    for other, way in combinations(WAYS, 2):
        found = difference(*([run["loss"] for run in of_way(results, each)] for each in (way, other)), paired=True)
        meaning = f"{way} is {'worse' if found.mean > 0 else 'better'}" if found.excludes_zero else "not distinguished"
        rows.append((f"{way} - {other}", f"{found.mean:+.4f}", f"{found.half:.4f}", meaning))
    return markdown_table(("pair", "difference", "+-", "result"), rows)


def routing_summary(tokens_per_expert: Sequence[Sequence[int]]) -> tuple[float, float, int]:
    """Return the mean entropy of layers (1 is balanced), the largest load over its mean, and the dead experts."""
    entropies, largest = [], 0.0
    for loads in tokens_per_expert:
        shares = [load / sum(loads) for load in loads]
        entropies.append(-sum(share * math.log(share) for share in shares if share) / math.log(len(loads)))
        largest = max(largest, max(shares) * len(loads))
    return statistics.mean(entropies), largest, sum(load == 0 for loads in tokens_per_expert for load in loads)


def routing_table(results: Results) -> list[str]:
    """Return the table of the routing of all ways with experts, over the last tenth of the logged iterations."""
    rows = []
    for way in WAYS:
        runs = of_way(results, way)
        if "tokens_per_expert" in runs[0]:
            entropies, largest, dead = zip(*(routing_summary(run["tokens_per_expert"]) for run in runs), strict=True)
            without = f"{', '.join(map(str, dead))} of {sum(map(len, runs[0]['tokens_per_expert']))}"
            rows.append((way, f"{statistics.mean(entropies):.3f}", f"{max(largest):.2f}", without))
    return markdown_table(("model", "entropy", "fullest expert", "experts without a token"), rows)


def runs_table(results: Results) -> list[str]:
    """Return the table of the losses of every run."""
    columns = zip(*([run["loss"] for run in of_way(results, way)] for way in (START, *WAYS)), strict=True)
    rows = [(seed, *(f"{loss:.4f}" for loss in losses)) for seed, losses in enumerate(columns, 1)]
    return markdown_table(("seed", START, *WAYS), rows)


def open_folder(folder: Path, seeds: int, size: Size) -> None:
    """Make the study's folder, or check that it is one of the same study.

    Raises:
        UserError: if it is something else.
    """
    path, settings = folder / "study.json", {"seeds": seeds, **asdict(size), "flags": MODEL, "ways": dict(WAYS)}
    if path.exists():
        old = read_json(path)
        differing = sorted(key for key in {*settings, *old} - {"seeds"} if old.get(key) != settings.get(key))
        if differing:
            raise UserError(f"{folder} has another study (different: {', '.join(differing)}); give a new folder")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and has no study.json; give a new folder, or one of an earlier study")
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        json.dump(settings, file, indent=1)


def main(words: list[str]) -> int:
    """Run the study. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path, metavar="OUT", help="a new folder, or that of a study to continue")
    parser.add_argument("--seeds", type=int, choices=range(2, 11), default=3, help="runs of every way (default: 3)")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), metavar="N", help="runs at a time (default: cores)")
    parser.add_argument("--smoke", action="store_true", help="a few iterations and two seeds, to see that it works")
    options = parser.parse_args(words)
    folder, size = options.folder.absolute(), SMOKE if options.smoke else FULL
    seeds = range(1, (2 if options.smoke else options.seeds) + 1)

    def finish(run: tuple[str, int]) -> dict[str, Any]:
        result = execute(folder, size, *run)
        print(f"{run[0]}, seed {run[1]}: validation loss {result['loss']:.4f}", flush=True)
        return result

    try:
        open_folder(folder, len(seeds), size)
    except (UserError, OSError) as error:
        print(f"study_finermoe.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    try:
        make_data(folder / "data", size)
        with ThreadPoolExecutor(options.jobs or os.cpu_count()) as pool:  # a failure cancels the runs that wait
            results = [*pool.map(finish, [(START, seed) for seed in seeds])]
            results += pool.map(finish, [(way, seed) for seed in seeds for way in WAYS])
        head = f"{provenance_line()}. Method: scripts/study_finermoe.py, {len(seeds)} seeds."
        tables = (losses_table(results, size), differences_table(results), routing_table(results), runs_table(results))
        text = "\n\n".join([head, *("\n".join(table) for table in tables)]) + "\n"
        print(text)
        with atomic_write(folder / "report.md") as file:
            file.write(text)
    except (ValueError, OSError) as error:  # UserError is a ValueError; results that were recorded stay
        print(f"study_finermoe.py: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

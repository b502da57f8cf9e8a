#!/usr/bin/env python3
"""Compare FineRMoE with copies, pieces and a dense model: equal tokens, several seeds, in under an hour on two cores.

    python scripts/study_finermoe.py OUT            the study; the same command continues one that was interrupted
    python scripts/study_finermoe.py OUT --smoke    the same with a few iterations, in about two minutes

For every seed, a dense model with the sizes of finermoe_tiny is trained on the sources of this Python installation,
upcycled in the three ways of WAYS, and all four are trained on with equally many tokens in an order of
their own. Documents that no model was trained on give the validation loss, the bits per byte and, if lm-eval is
installed, a task of multiple choice. Needs no network.

Writes OUT/report.md, OUT/report.html, OUT/*.svg, OUT/results.json, and a folder with log, metrics, dashboard and
weights of every run in OUT/runs. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import arguments
from arguments.paths import local_path
from moe_trainer.errors import UserError
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import atomic_write
from scripts.study_data import TASK, Size, make_data, run_program
from scripts.study_report import MAX_SEEDS, Arm, write_study_report

SEQ_LENGTH, BATCH = 128, 16
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
ARMS = MappingProxyType(dict(zip(("dense", "copies", "granular", "finermoe"), WAYS, strict=True)))
"""Short names of the runs, and their names in the table of upcycling."""
RELATIVE_TIME = MappingProxyType({"dense": 1.0, "copies": 2.0, "granular": 2.1, "finermoe": 1.4})
"""Time per token relative to the dense model's, for the first estimate of the time left only."""
TOKENS_PER_S, TOKENS_PER_PROGRAM = 9000, 60_000
"""Dense tokens that a core trains in a second, and in the time that a program takes to start and end. Both are for the
first estimate only."""
FULL = Size(10.0, 2048, 1600, 800, 4, 0.03, 300)
SMOKE = Size(0.6, 1024, 6, 6, 2, 0.03, 8)


@dataclass(frozen=True)
class Study:
    """A study: where it is, its size, and whether it runs a task of lm-eval."""

    folder: Path
    size: Size
    seeds: int
    has_task: bool

    def flags(self) -> list[str]:
        """Return the flags of all runs. Later ones replace those of MODEL."""
        data = self.folder / "data"
        text = (
            f"--seq-length {SEQ_LENGTH} --micro-batch-size {BATCH} --lr-warmup-fraction 0.1 --full-validation "
            "--tokenizer-type SentencePieceTokenizer --no-save-optim --log-interval 5 --moe-per-layer-logging"
        )
        files = ["--tokenizer-model", f"{data}/tokenizer.model", "--train-data-path", f"{data}/train_text_document"]
        return [*MODEL.split(), *text.split(), *files, "--valid-data-path", f"{data}/valid_text_document"]

    def dense_checkpoint(self, seed: int) -> Path:
        """Return the checkpoint of the dense model that the runs of a seed start from."""
        return self.folder / "runs" / f"start-seed{seed}" / "checkpoints"


@dataclass(frozen=True)
class Run:
    """One run: `arm` is one of ARMS, or "start" for the dense model before upcycling."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.arm}-seed{self.seed}"

    def weight(self, size: Size) -> float:
        """Return how long it takes, in dense training tokens: training, evaluations at a third of it, and programs."""
        validation = size.megabytes * 1e6 / 3 * size.validation_share / 3
        if self.arm == "start":
            return size.dense_iterations * BATCH * SEQ_LENGTH + validation + TOKENS_PER_PROGRAM
        task = size.questions * 4 * 80 / 3
        tokens = size.iterations * BATCH * SEQ_LENGTH + (size.evaluations + 1) * validation + task
        return RELATIVE_TIME[self.arm] * tokens + TOKENS_PER_PROGRAM * (1 if self.arm == "dense" else 2)


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


def execute(study: Study, run: Run) -> dict[str, Any]:
    """Execute a run and return its result: losses, speed, routing, accuracy, seconds."""
    folder, size, started = study.folder / "runs" / run.name, study.size, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir(parents=True)
    log, metrics = folder / "log.txt", folder / "metrics.jsonl"
    job = [*study.flags(), *shlex.split(WAYS.get(ARMS.get(run.arm, ""), ""))]
    evaluate_start: list[dict[str, Any]] = []
    if run.arm == "start":
        iterations, interval = size.dense_iterations, size.dense_iterations + 1
        rates = ["--lr", "2e-3", "--min-lr", "2e-4", "--seed", str(run.seed)]
    else:
        # The end is always evaluated, so the interval does not divide the iterations.
        iterations, interval = size.iterations, size.iterations // size.evaluations + 1
        # The seed also orders the documents: another one than the dense model's reads them in another order.
        rates = ["--lr", "1e-3", "--min-lr", "1e-4", "--seed", str(1000 + run.seed), "--load"]
        start = "--finetune" if run.arm == "dense" else "--moe-use-upcycling"
        rates += [str(study.dense_checkpoint(run.seed)), start]
        first = [*job, *rates, "--train-iters", str(iterations), "--skip-train", "--save", str(folder / "upcycled")]
        run_program("pretrain_moe.py", [*first, "--metrics-file", str(folder / "upcycled.jsonl")], log)
        evaluate_start = read_records(folder / "upcycled.jsonl")
        shutil.rmtree(folder / "upcycled", ignore_errors=True)
    job += [*rates, "--train-iters", str(iterations), "--eval-interval", str(interval)]
    if study.has_task and run.arm != "start":
        path = str(study.folder / "data" / "tasks")
        job += ["--eval-tasks", TASK, "--eval-tasks-interval", str(iterations), "--eval-tasks-path", path]
    run_program("pretrain_moe.py", [*job, "--save", str(folder / "checkpoints"), "--metrics-file", str(metrics)], log)
    result = {"arm": run.arm, "seed": run.seed, "seconds": time.monotonic() - started}
    return result | read_result(evaluate_start, read_records(metrics))


def read_result(start: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the report needs of the records of a run, and of the evaluation of the weights it started from."""
    losses = {record["iteration"]: record["lm loss"] for record in records if record.get("validation") == "validation"}
    curve = [[iteration * BATCH * SEQ_LENGTH, loss] for iteration, loss in sorted(losses.items())]
    rates = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    result: dict[str, Any] = {
        "loss": curve[-1][1],
        "curve": curve,
        "tokens_per_s": statistics.median(rates[len(rates) // 2 :]),
        "accuracy": {
            record["metric"]: [record["value"], record.get("stderr")] for record in records if record.get("task")
        },
    }
    for record in start:
        if record.get("validation") == "validation":
            result |= {"loss_at_start": record["lm loss"], "curve": [[0, record["lm loss"]], *curve]}
            # Only an evaluation that makes no model counts bytes: that of the dense model.
            result |= {name: record[name] for name in ("tokens", "bytes") if name in record}
    routing = [record["routing"]["tokens_per_expert"] for record in records if "routing" in record]
    if routing:
        last = routing[-max(1, len(routing) // 10) :]
        result["tokens_per_expert"] = [
            [sum(expert) for expert in zip(*layers, strict=True)] for layers in zip(*last, strict=True)
        ]
    return result


def execute_all(study: Study, jobs: int, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Execute the runs that have no result yet, `jobs` at a time, and return all results.

    Raises:
        UserError: if a run fails. Those that are running end first and are recorded; those that wait are not started.
    """
    runs = [Run(arm, seed) for seed in range(1, study.seeds + 1) for arm in ("start", *ARMS)]
    paths = {run: study.folder / "runs" / f"{run.name}.json" for run in runs}
    results = {run: read_json(path) for run, path in paths.items() if path.exists()}
    if results:
        show(f"{len(results)} of {len(runs)} runs are finished already")
    active: dict[Future[dict[str, Any]], Run] = {}
    with ThreadPoolExecutor(jobs) as pool:

        def execute_and_record(run: Run) -> dict[str, Any]:
            result = execute(study, run)
            with atomic_write(paths[run]) as file:
                json.dump(result, file, indent=1)
            return result

        def start(run: Run) -> None:
            if run not in results:
                active[pool.submit(execute_and_record, run)] = run

        for run in runs:
            if run.arm == "start" or Run("start", run.seed) in results:
                start(run)
        show(f"about {minutes_left(study.size, runs, results, jobs):.1f} minutes left, {jobs} runs at a time")
        try:
            while active:
                for future in wait(active, return_when=FIRST_COMPLETED).done:
                    run = active.pop(future)
                    results[run] = future.result()
                    if run.arm == "start":
                        for arm in ARMS:
                            start(Run(arm, run.seed))
                    left = minutes_left(study.size, runs, results, jobs)
                    result = f"validation loss {results[run]['loss']:.4f} after {results[run]['seconds']:.0f} s"
                    show(f"{len(results)} of {len(runs)}: {run.name}: {result}; about {left:.1f} minutes left")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[run] for run in runs]


def minutes_left(size: Size, runs: Sequence[Run], results: dict[Run, dict[str, Any]], jobs: int) -> float:
    """Return how long the unfinished runs take if they are as fast as the finished ones of their kind, or of any."""

    def seconds(run: Run) -> float:
        alike = [results[other]["seconds"] for other in results if other.arm == run.arm]
        return statistics.mean(alike) if alike else run.weight(size) * pace

    done = sum(run.weight(size) for run in results)
    pace = sum(result["seconds"] for result in results.values()) / done if done else 1 / TOKENS_PER_S
    return sum(seconds(run) for run in runs if run not in results) / jobs / 60


def describe_arms(size: Size) -> list[Arm]:
    """Return the kinds of models that are compared, with their parameters and FLOPs."""
    tokens = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {size.vocab_size} --seq-length {SEQ_LENGTH}"
    arms: list[Arm] = []
    for name, title in ARMS.items():
        args = arguments.parse_args(f"{MODEL} {WAYS[title]} {tokens} --train-iters 1 --lr 1e-3".split(), 1)
        counts = count_parameters(args, size.vocab_size)
        flops = training_flops(args, 1, SEQ_LENGTH, size.vocab_size) / SEQ_LENGTH
        arms.append(Arm(name, title, counts.total, counts.active, flops))
    return arms


def open_folder(study: Study) -> None:
    """Make the study's folder, or check that it is one of the same study.

    Raises:
        UserError: if it is something else.
    """
    path = study.folder / "study.json"
    settings = {"seeds": study.seeds, "has_task": study.has_task, **asdict(study.size), "flags": MODEL, "arms": WAYS}
    if path.exists():
        old = read_json(path)
        differing = sorted(key for key in {*settings, *old} - {"seeds"} if old.get(key) != settings.get(key))
        if differing:
            raise UserError(f"{study.folder} has another study (different: {', '.join(differing)}); give a new folder")
    elif study.folder.exists() and (not study.folder.is_dir() or any(study.folder.iterdir())):
        raise UserError(f"{study.folder} exists and has no study.json; give a new folder, or one of an earlier study")
    (study.folder / "runs").mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        json.dump(settings, file, indent=1)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""

    def seeds(text: str) -> int:
        if not re.fullmatch("[0-9]+", text) or not 2 <= int(text) <= MAX_SEEDS:
            raise argparse.ArgumentTypeError(f"{text}: give 2 to {MAX_SEEDS}, an interval needs two")
        return int(text)

    def jobs(text: str) -> int:
        if not re.fullmatch("[0-9]+", text) or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text}: give at least 1")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="exit codes: 0 done, 1 a run failed, 2 an option or the folder is wrong, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=local_path, metavar="OUT", help="a new folder, or that of a study to continue")
    parser.add_argument("--seeds", type=seeds, default=3, metavar="N", help="runs of every kind (default: 3)")
    parser.add_argument("--jobs", type=jobs, metavar="N", help="runs at a time, of one thread each (default: cores)")
    parser.add_argument("--smoke", action="store_true", help="a few iterations and two seeds, to see that it works")
    parser.add_argument("--no-task", action="store_true", help="leave out the task of lm-eval")
    return parser


def main(words: list[str]) -> int:
    """Run the study. Returns the exit code."""
    options = make_parser().parse_args(words)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    has_task = not options.no_task and importlib.util.find_spec("lm_eval") is not None
    size = SMOKE if options.smoke else FULL
    study = Study(options.folder.absolute(), size, 2 if options.smoke else options.seeds, has_task)

    def show(line: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)

    try:
        open_folder(study)
    except (UserError, OSError) as error:
        print(f"study_finermoe.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    try:
        make_data(study.folder / "data", size)
        results = execute_all(study, options.jobs or cores, show)
        tokens = [iterations * BATCH * SEQ_LENGTH for iterations in (size.dense_iterations, size.iterations)]
        write_study_report(study.folder, describe_arms(size), results, tokens[0], tokens[1])
    except (ValueError, OSError) as error:  # UserError is a ValueError; results that were recorded stay
        print(f"study_finermoe.py: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print("study_finermoe.py: interrupted; the same command continues after the finished runs", file=sys.stderr)
        return ExitCode.INTERRUPTED
    show(f"written: {study.folder}/report.md and report.html")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

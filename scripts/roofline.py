#!/usr/bin/env python3
"""Estimate the time of a training step from its operators, each at the limit of the device. Needs no GPU.

    python scripts/roofline.py FLAGS --world-size N --hardware H     one command line
    python scripts/roofline.py pieces FLAGS --world-size N --hardware H
                                                                     what each piece of the stack is worth, by planner
                                                                     and roofline
    python scripts/roofline.py pieces --write                        DeepSeek-V3 and Qwen3-235B on H100, GB200, GB300:
                                                                     scripts/bench_results/pieces.md
    python scripts/roofline.py models [--write]                      seven models of the zoo on H100 and GB200;
                                                                     --write: scripts/bench_results/roofline.md

One rank of every kind of pipeline stage is executed on the emulated CUDA device of tests/emulated_cuda, with the shapes
of the real run and without arithmetic. This needs g++ and the headers of torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments import ArgumentError
from arguments.parse import as_plan
from arguments.pasted_line import read_pasted_line
from arguments.tokens import drop_flags
from moe_trainer.commands.checkpoint_flags import spell_checkpoint
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.executed_step import EXECUTED_MICROBATCHES, rank_of_stage, recording_key, stages_to_execute
from moe_trainer.estimate.pieces import PIECES, Row, make_row
from moe_trainer.estimate.pieces_text import markdown_lines, pieces_lines
from moe_trainer.estimate.plan import Plan
from moe_trainer.estimate.published_runs import PUBLISHED_RUNS
from moe_trainer.estimate.roofline import Roofline, make_roofline
from moe_trainer.estimate.roofline_text import roofline_json, roofline_lines, table_lines
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import command_output
from scripts.provenance import get_commit

DEVICE = ROOT / "tests" / "emulated_cuda"
RECORD = ROOT / "scripts" / "bench_results" / "roofline.md"
QWEN3_NEXT = (
    "--preset qwen3_next_80b_a3b --mock-data --seq-length 4096 --pipeline-model-parallel-size 4 "
    "--num-virtual-stages-per-pipeline-rank 3 --expert-model-parallel-size 32 --micro-batch-size 1 "
    "--global-batch-size 256 --recompute-granularity selective --recompute-modules moe_act shared_experts layernorm"
).split()
PUBLISHED = (
    "Mixtral-8x22B 128xH100 BF16",
    "Qwen2-57B 64xH100 BF16",
    "Moonlight-16B 8xH100 BF16",
    "Qwen3-30B 16xH100 BF16",
    "Qwen3-235B 256xH100 BF16",
    "DeepSeek-V3 1024xH100 FP8",
)
ON_GB200 = ("Qwen3-235B 256xGB200 BF16", "DeepSeek-V3 256xGB200 BF16")
RUNS = {run.name: run for run in PUBLISHED_RUNS}
# preset, hardware, GPUs, flags. The flags are those of a published run on that hardware, on GB200 otherwise those of
# the run on H100; for Qwen3-Next those of the public model zoo
MODELS = (
    *((RUNS[name].model, "h100", RUNS[name].gpus, RUNS[name].argv()) for name in PUBLISHED),
    ("qwen3_next_80b_a3b", "h100", 128, QWEN3_NEXT),
    *((RUNS[name].model, "gb200", RUNS[name].gpus, RUNS[name].argv()) for name in (*PUBLISHED[:4], *ON_GB200)),
    ("qwen3_next_80b_a3b", "gb200", 128, QWEN3_NEXT),
)
PIECES_RECORD = RECORD.with_name("pieces.md")
PIECES_HEAD = """\
# What each piece of the stack is worth

`python scripts/roofline.py pieces --write`. Gains of an iteration by planner and roofline, and published pairs.
Executed on the emulated CUDA device; nothing here was measured on a GPU.
[What the columns mean](../../docs/planning.md#what-each-piece-is-worth). The mappings are those of published runs, with
six layers on one pipeline stage and eight microbatches, so that every piece can be executed in seconds.
"""
PIECE_RUNS = (
    "DeepSeek-V3 1024xH100 FP8",
    "DeepSeek-V3 256xGB200 MXFP8",
    "DeepSeek-V3 256xGB300 MXFP8",
    "Qwen3-235B 256xH100 BF16",
    "Qwen3-235B 256xGB200 BF16",
    "Qwen3-235B 256xGB300 MXFP8",
)
SIX_LAYERS = (
    "--num-layers 6 --mtp-num-layers 0 --pipeline-model-parallel-size 1 --global-batch-size 512 --world-size 64".split()
)
DENSE_FIRST = ("--moe-layer-freq", "([0]+[1]*5)")
PIPELINE_FLAGS = frozenset(
    "pipeline_model_parallel_layout num_virtual_stages_per_pipeline_rank account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split pipeline_model_parallel_size global_batch_size".split()
)
NUM_PROCESSES = 2  # stages executed at the same time


def piece_cases() -> Iterator[tuple[str, list[str]]]:
    """Yield (title, command line) of PIECE_RUNS, with six layers."""
    for name in PIECE_RUNS:
        run = RUNS[name]
        dense = DENSE_FIRST if run.model == "deepseek_v3" else ()
        yield name, [*drop_flags(run.argv(), PIPELINE_FLAGS), *SIX_LAYERS, *dense, "--hardware", run.hardware]


class ExecutionError(Exception):
    """The step cannot be executed on the emulated device."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; a command line without a mode is one of the trainer."""
    parser = argparse.ArgumentParser(
        prog="roofline.py",
        usage="roofline.py FLAGS --world-size N [--hardware H] [--report FILE]\n       roofline.py pieces FLAGS "
        "--world-size N [--hardware H]\n       roofline.py pieces --write\n       roofline.py models [--write]",
        description=__doc__,
        epilog="FLAGS are the trainer's, with or without --preset NAME. H is as for scripts/plan.py (default: h100).\n"
        "--report FILE writes all results as JSON. docs/planning.md explains the output.\n"
        "Exit code: 0; 2 if the flags allow no plan, or the emulated device cannot be built.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    modes = parser.add_subparsers(title="modes", prog="roofline.py", metavar="MODE")
    modes.add_parser("pieces", help="what each piece of the stack is worth", allow_abbrev=False)
    models_parser = modes.add_parser("models", help="print the table of seven models", allow_abbrev=False)
    models_parser.add_argument("--write", action="store_true", help="record it in scripts/bench_results/roofline.md")
    return parser


def main(words: list[str]) -> int:
    parser = make_parser()
    if not words:
        parser.print_help()
        return ExitCode.USER_ERROR
    try:
        if words[0] == "models":
            return print_models(parser.parse_args(words).write)
        if words == ["pieces", "--write"]:
            return write_pieces()
        if words[0] == "pieces" and len(words) > 1 and not {"--help", "-h"} & set(words):
            plan, rows = pieces_of_flags(_read_flags(words[1:]), {})
            print("\n".join(pieces_lines(plan, rows)))
            return ExitCode.OK
        if words[0] == "pieces" or {"--help", "-h"} & set(words):
            parser.parse_args(["--help"])
        plan, roofline = plan_and_roofline(_read_flags(words))
        print("\n".join(roofline_lines(plan, roofline)))
        if plan.args.output.report is not None:
            write_report(plan.args.output.report, plan, roofline)
    except ExecutionError as error:
        print(f"roofline.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def _read_flags(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line, which may be pasted.

    Raises:
        ExecutionError: if its launcher or its checkpoint cannot be read.
    """
    try:
        return as_plan(spell_checkpoint(read_pasted_line(words)))
    except ValueError as error:
        raise ExecutionError(str(error)) from None


def print_models(write: bool) -> int:
    """Print the table of MODELS, and record it if `write`. Returns the exit code.

    Raises:
        ExecutionError: if a step cannot be executed.
    """
    rows, recordings = [], {}
    for name, hardware, gpus, flags in MODELS:
        print(f"{name} on {gpus} {hardware}: {' '.join(flags)}", file=sys.stderr)
        argv = [*flags, "--world-size", str(gpus), "--hardware", hardware]
        rows.append((name, *plan_and_roofline(argv, recordings)))
    lines = table_lines(rows, get_commit("--dirty"))
    print("\n".join(lines))
    if write:
        RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ExitCode.OK


def pieces_of_flags(flags: Sequence[str], recordings: dict[tuple, dict]) -> tuple[Plan, list[Row]]:
    """Plan and execute a command line with and without every piece of the stack.

    A step that cannot be executed gives a row with the reason.

    Raises:
        ExecutionError: if the flags allow no plan, or their own step cannot be executed.
    """
    plan, _ = plan_and_roofline(flags, recordings)

    def step(line: Sequence[str], _plan: Plan) -> float:
        return plan_and_roofline(line, recordings)[1].time.step

    rows = []
    for piece in PIECES:
        print(f"{piece.name} ...", file=sys.stderr)
        try:
            rows.append(make_row(piece, flags, plan, step))
        except ExecutionError as error:
            planned = make_row(piece, flags, plan)
            rows.append(replace(planned, difference=str(error)))
    return plan, rows


def write_pieces() -> int:
    """Write PIECES_RECORD: the pieces of two models on three machines. Returns the exit code.

    Raises:
        ExecutionError: if a step cannot be executed.
    """
    lines, recordings = [PIECES_HEAD], {}
    for title, argv in piece_cases():
        print(title, file=sys.stderr)
        lines += markdown_lines(title, " ".join(argv), pieces_of_flags(argv, recordings)[1])
    PIECES_RECORD.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return ExitCode.OK


def write_report(path: str, plan: Plan, roofline: Roofline) -> None:
    """Write all results as JSON.

    Raises:
        ExecutionError: if the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(roofline_json(plan, roofline), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ExecutionError(f"--report {path}: the file cannot be written ({error.strerror})") from None


def plan_and_roofline(flags: Sequence[str], recordings: dict[tuple, dict] | None = None) -> tuple[Plan, Roofline]:
    """Plan a command line and execute its step.

    `recordings` is a cache by `recording_key`.

    Raises:
        ExecutionError: if the flags allow no plan, or the step cannot be executed.
    """
    try:
        plan = plan_of_flags(list(flags))
    except ArgumentError as error:
        raise ExecutionError(f"no estimate, since the trainer rejects this: {error}") from None
    except ValueError as error:
        raise ExecutionError(str(error)) from None
    report = plan.args.output.report
    if report is not None and (Path(report).is_dir() or not Path(report).absolute().parent.is_dir()):
        reason = "its directory is missing, or it is a directory"
        raise ExecutionError(f"--report {report}: the file cannot be written ({reason})")
    if plan.args.output.report_html is not None:
        raise ExecutionError("--report-html draws plans: use it with scripts/plan.py")
    if plan.hardware.synchronous:
        raise ExecutionError(
            f"--hardware {plan.hardware.name}: a CUDA device is needed, since CUDA operators are executed"
        )
    if plan.args.has_frozen_weights:
        raise ExecutionError(
            "a roofline describes training steps, and these flags update no weights (--skip-train, "
            "--freeze-all-layers, --train-iters 0)"
        )
    recordings = {} if recordings is None else recordings
    try:
        key = recording_key(plan)
    except ValueError as error:
        raise ExecutionError(str(error)) from None
    if key not in recordings:
        recordings[key] = execute(plan, flags)
    return plan, make_roofline(plan, recordings[key])


def execute(plan: Plan, flags: Sequence[str]) -> dict[int, dict[str, list]]:
    """Record one rank of every kind of stage.

    Raises:
        ExecutionError: if a process fails, or the emulated device cannot be built.
    """
    microbatches = min(EXECUTED_MICROBATCHES, plan.num_microbatches)
    env = environment("10.0" if plan.hardware.is_blackwell else "9.0")

    def run(stage: int, path: Path) -> dict[str, list]:
        rank = rank_of_stage(plan.args, plan.world_size, stage)
        numbers = map(str, (rank, plan.world_size, microbatches))
        command = [sys.executable, str(DEVICE / "record_step.py"), str(path), *numbers, *flags]
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ExecutionError(
                f"the step of pipeline stage {stage} cannot be executed on the emulated device: {reason}"
            )
        return json.loads(path.read_text(encoding="utf-8"))

    stages = stages_to_execute(plan.args)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_PROCESSES) as pool:
        return dict(zip(stages, pool.map(run, stages, [Path(folder, f"{stage}.json") for stage in stages])))


def environment(capability: str) -> dict[str, str]:
    """Return the environment of a process with the emulated device.

    Raises:
        ExecutionError: if the device cannot be built.
    """
    if not (DEVICE / "record_step.py").is_file():
        raise ExecutionError(f"{DEVICE} is missing: the emulated device needs a source checkout")
    sys.path.insert(0, str(DEVICE.parent))
    try:
        from emulated_cuda import build
    except ImportError as error:
        raise ExecutionError(f"the emulated device needs torch ({error})") from None
    try:
        return build.environment(1) | {"EMULATED_CUDA_CAPABILITY": capability}
    except build.CannotBuildError as error:
        raise ExecutionError(str(error)) from None


if __name__ == "__main__":
    with command_output():
        sys.exit(main(sys.argv[1:]))

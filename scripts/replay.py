#!/usr/bin/env python3
"""Replay a recorded iteration, with another mapping or dtype if wanted, and print the first tensor that differs.

    python pretrain_moe.py ... --save DIR --record-step N          record iteration N in DIR/recorded_step_N
    python scripts/replay.py DIR/recorded_step_N                   same flags: bitwise equal on the same machine
    python scripts/replay.py DIR/recorded_step_N --tensor-model-parallel-size 2 --sequence-parallel
    python scripts/replay.py DIR/recorded_step_N --one-process --fp32
    torchrun --nproc-per-node 8 scripts/replay.py DIR/recorded_step_N FLAGS...     on GPUs; on several nodes with
                                                                                   --keep on a shared file system

Flags after the directory replace recorded ones. The gloo ranks they need are forked on the CPU of this machine; under
torchrun or srun the launched ranks are used. Compared, in order of computation: outputs of embedding, attention, MLPs
and experts of every layer, token by token; logits, choices and weights of the routers; token losses, logged losses,
every gradient, the gradient norm.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments.mechanisms.formats import FLAGS
from arguments.paths import local_path
from moe_trainer.drawing.report_page import write_report
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import cannot_write

if TYPE_CHECKING:
    from moe_trainer.debug.step_record import Record
    from moe_trainer.launch_env import LaunchEnv
    from moe_trainer.verification.replay import ReplayPlan

DEFAULT_TIMEOUT_S = 600.0
MAX_FORKED_RANKS = 8  # for repeating the recorded flags after a mismatch


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this script's own options; all other words are flags of the trainer."""
    parser = argparse.ArgumentParser(
        prog="replay.py",
        usage="replay.py DIR [FLAGS] [options]",
        description=__doc__,
        epilog="All other flags are the trainer's. Exit code: 0 equal within the tolerances, 1 different, 2 the\n"
        "record or the flags are wrong, or the ranks failed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("record", type=local_path, metavar="DIR", help="directory of the record; the first argument")
    add("--one-process", action="store_true", help="drop all flags of parallelism, recompute and offloading")
    narrow = ", ".join(f"--{flags.name}-format" for flags in FLAGS)
    add("--fp32", action="store_true", help=f"drop --bf16, --fp16, {narrow} and dependent flags")
    add("--without", action="append", default=[], metavar="FLAG", help="drop a recorded flag; can be repeated")
    add(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks (default: as recorded if the mapping allows, else one model replica)",
    )
    add(
        "--against",
        type=local_path,
        metavar="DIR",
        help="run nothing; compare with another record of the same iteration",
    )
    add("--keep", type=local_path, metavar="DIR", help="store the record of the replay in DIR")
    add("--all", action="store_true", help="print every quantity, not only those that differ")
    add("--report-html", type=local_path, metavar="FILE", help="write a page with this text and a picture of the model")
    text = f"maximum seconds of the ranks (default: {DEFAULT_TIMEOUT_S:g})"
    add("--timeout", type=float, metavar="S", help=text)
    return parser


def main(words: list[str]) -> int:
    if not words:
        make_parser().print_help()
        return ExitCode.USER_ERROR
    options, flags = _parse(words)
    from moe_trainer.errors import require_packages
    from moe_trainer.launch_env import read_launch_env

    try:
        require_packages("torch", "numpy", "safetensors")
        launch = read_launch_env(os.environ)
        return _replay(options, flags) if launch.source == "single process" else _replay_as_rank(options, flags, launch)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"replay.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split this script's own options from the trainer's flags."""
    parser = make_parser()
    if {"-h", "--help"} & set(words):
        parser.parse_args(["--help"])
    # join --without and its value: argparse would take the value for an option
    words = [
        f"--without={after}" if word == "--without" else word
        for word, after, before in zip(words, [*words[1:], ""], ["", *words], strict=False)
        if before != "--without"
    ]
    if words[0].startswith("--"):
        parser.error("the directory of the record comes first")
    options, flags = parser.parse_known_args(words)
    problems = []
    if options.world_size is not None and options.world_size < 1:
        problems.append(f"--world-size {options.world_size} must be above 0")
    if options.timeout is not None and not (options.timeout > 0 and math.isfinite(options.timeout)):
        problems.append(f"--timeout {options.timeout} must be a number of seconds above 0")
    if options.keep is not None and options.keep.exists():
        problems.append(f"--keep {options.keep}: already exists")
    of_runs = (options.keep, options.world_size, options.timeout, options.without, options.one_process, options.fp32)
    if options.against is not None and (flags or any(of_runs)):
        problems.append("--against runs nothing, so it takes no flags of the trainer, and no options of a replay")
    if options.report_html is not None and cannot_write(options.report_html):
        problems.append(f"--report-html {options.report_html}: the file cannot be written")
    if problems:
        parser.error("; ".join(problems))
    options.command_line = shlex.join(["python", "scripts/replay.py", *words])
    return options, flags


def _replay(options: argparse.Namespace, flags: list[str]) -> int:
    """Replay on forked ranks, or compare two records. Returns the exit code."""
    from moe_trainer.debug.step_record import Record
    from moe_trainer.verification.replay import expected_differences, plan_replay

    record = Record.open(options.record)
    if options.against is not None:
        return _compare(record, Record.open(options.against), [], options, None)
    plan = plan_replay(record, _changes(options, flags, options.world_size))
    with tempfile.TemporaryDirectory(prefix="replay") as temporary:
        folder = options.keep or Path(temporary, "replay")
        _run(record, plan, folder, options.timeout or DEFAULT_TIMEOUT_S)
        return _compare(
            record,
            Record.open(folder),
            list(expected_differences(record, plan)),
            options,
            None if plan.as_recorded else lambda: _repeat_recorded(record, Path(temporary, "repeated"), options),
        )


def _changes(options: argparse.Namespace, flags: Sequence[str], world_size: int | None):
    from moe_trainer.verification.replay import ReplayChanges

    return ReplayChanges(tuple(flags), tuple(options.without), options.one_process, options.fp32, world_size)


def _run(record: Record, plan: ReplayPlan, folder: Path, timeout_s: float) -> None:
    """Fork the ranks of a replay, which record in `folder`.

    Raises:
        ValueError: if the ranks fail.
    """
    import torch

    from moe_trainer.verification.rank_pool import RankPool, RankPoolError
    from moe_trainer.verification.replay import replay_on_cpu

    torch.set_num_threads(1)  # before ranks are forked
    folder.parent.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    # the recorded number of threads gives the same order of summation
    is_same_size = plan.world_size == record.head["world_size"]
    threads = record.head["threads"] if is_same_size else max(1, cores // plan.world_size)
    with RankPool(plan.world_size, timeout_s) as pool:
        try:
            pool.run(replay_on_cpu, plan.world_size, record, plan, str(folder), threads)
        except RankPoolError as error:
            tracebacks = [text.strip().splitlines() for text in error.by_rank.values() if "UserError: " in text]
            if tracebacks:
                raise ValueError(_last_message(tracebacks[0])) from None
            raise ValueError(f"the replay failed\n{error}") from None


def _last_message(lines: Sequence[str]) -> str:
    """Return the message of the last UserError of a traceback."""
    start = max(number for number, line in enumerate(lines) if "UserError: " in line)
    return "\n".join(lines[start:]).partition("UserError: ")[2]


def _repeat_recorded(record: Record, folder: Path, options: argparse.Namespace) -> dict[tuple[str, str], float] | None:
    """Return the differences from the record if the recorded flags run on this machine; None if it lacks the ranks."""
    from moe_trainer.debug.step_record import Record
    from moe_trainer.verification.compare_records import compare_records
    from moe_trainer.verification.replay import ReplayChanges, plan_replay

    if record.head["world_size"] > MAX_FORKED_RANKS:
        return None
    _run(record, plan_replay(record, ReplayChanges()), folder, options.timeout or DEFAULT_TIMEOUT_S)
    return {(row.quantity, row.name): row.difference for row in compare_records(record, Record.open(folder))}


def _compare(
    record: Record,
    other: Record,
    notes: Sequence[str],
    options: argparse.Namespace,
    repeat: Callable[[], dict[tuple[str, str], float] | None] | None,
) -> int:
    """Compare two records, print the result and write the report. Returns the exit code.

    `repeat` is called after a mismatch; it measures the differences of the recorded flags on this machine.
    """
    from moe_trainer.verification.compare_records import compare_records
    from moe_trainer.verification.format_comparison import first_lines, head_lines, table_lines
    from moe_trainer.verification.pictures import comparison_figure

    head = list(head_lines(record, other, notes))
    print("\n".join(head), flush=True)
    rows = compare_records(record, other)
    is_different = any(row.exceeds_tolerance for row in rows)
    lines = [*first_lines(rows, repeat() if is_different and repeat is not None else None)]
    lines += table_lines(rows, options.all)
    print("\n".join(lines))
    if options.report_html is not None:
        title = f"Iteration {record.head['iteration']}, recorded and replayed"
        figures = [comparison_figure(rows)]
        write_report(options.report_html, title, options.command_line, figures, [*head, *lines])
    return int(is_different)


def _replay_as_rank(options: argparse.Namespace, flags: list[str], launch: LaunchEnv) -> int:
    """Replay on the ranks a launcher has started. Returns the exit code."""
    from arguments import parse_args
    from moe_trainer.debug.step_record import Record
    from moe_trainer.parallel import collectives
    from moe_trainer.parallel.state import close_groups
    from moe_trainer.training.initialize import initialize
    from moe_trainer.verification.replay import expected_differences, plan_replay, replay

    if options.against is not None:
        raise ValueError("--against runs nothing: start it without a launcher")
    if options.world_size not in (None, launch.world_size):
        raise ValueError(f"--world-size {options.world_size}: the launcher has started {launch.world_size} ranks")
    record = Record.open(options.record)
    plan = plan_replay(record, _changes(options, flags, launch.world_size))
    args = parse_args(list(plan.argv), launch.world_size)
    runtime = initialize(args, launch)
    temporary = tempfile.mkdtemp(prefix="replay") if launch.rank == 0 else None
    temporary = collectives.broadcast_object(temporary, runtime.ps.world)
    folder = options.keep or Path(temporary, "replay")
    replay(record, args, runtime, folder)
    collectives.barrier(runtime.ps.world)
    code = 0
    if launch.rank == 0:
        code = _compare(record, Record.open(folder), list(expected_differences(record, plan)), options, None)
        shutil.rmtree(temporary, ignore_errors=True)
    code = collectives.broadcast_object(code, runtime.ps.world)
    close_groups(runtime.ps)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

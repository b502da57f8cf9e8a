#!/usr/bin/env python3
"""Run a recorded iteration again, under another mapping or dtype, and print the first tensor that parts.

    python pretrain_moe.py ... --save DIR --record-step N          records iteration N in DIR/recorded_step_N
    python scripts/replay.py DIR/recorded_step_N                   the same flags again: bit for bit on the same machine
    python scripts/replay.py DIR/recorded_step_N --tensor-model-parallel-size 2 --sequence-parallel
    python scripts/replay.py DIR/recorded_step_N --one-process --fp32
    torchrun --nproc-per-node 8 scripts/replay.py DIR/recorded_step_N FLAGS...     on GPUs (several nodes: with --keep on a shared disk)

Flags behind the folder replace recorded ones. As many gloo ranks as they need are forked on this machine's CPU; under torchrun (or srun)
the ranks that were started do it. Compared are, in order of computation: what embedding, attention, feed-forward parts and experts of
every layer put out, token by token; the routers' logits, choices and weights; token losses, logged losses, every gradient, the gradient
norm. Exit code: 0 equal within the tolerances, 1 something parts, 2 the record or the flags are wrong, or the
ranks failed.

Options (everything else is a flag of the trainer):
  --one-process     leave out every parallel flag, recomputation and offloading
  --fp32            leave out --bf16, --fp16, --fp8-format, --fp4-format and what belongs to them
  --without FLAG    leave out a recorded flag; may be repeated
  --world-size N    ranks; default: those recorded where they fit the mapping, else one replica of the model
  --against DIR     run nothing, compare with another record of the same iteration
  --keep DIR        keep the record of the replay there
  --all             print every quantity, not only those that part
  --timeout S       seconds that the ranks may take (default 600)
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from moe_trainer.guard.record import Record
    from moe_trainer.proof.replay import Plan

_MOST_RANKS = 8  # that are forked to see what the recorded flags give again


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    if not words or "--help" in words or "-h" in words:
        print(__doc__.strip())
        return ExitCode.OK if words else ExitCode.USER_ERROR
    options, flags = _options(words)
    from moe_trainer.errors import need_packages
    from moe_trainer.place import find_place

    try:
        need_packages("torch", "numpy", "safetensors")
        place = find_place(os.environ)
        return _replay(options, flags) if place.source == "single process" else _replay_as_rank(options, flags, place)
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"replay.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR


def _options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split our own options from the trainer's flags."""
    parser = argparse.ArgumentParser(prog="replay.py", add_help=False, allow_abbrev=False)
    parser.add_argument("record", type=Path, metavar="DIR")
    for name in ("--one-process", "--fp32", "--all"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--without", action="append", default=[], metavar="FLAG")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--timeout", type=float, default=600.0)
    # a word behind --without would be taken for an option of its own
    words = [f"--without={after}" if word == "--without" else word
             for word, after, before in zip(words, [*words[1:], ""], ["", *words], strict=False) if before != "--without"]
    if words[0].startswith("--"):
        parser.error("the folder of the record comes first")
    options = parser.parse_args(words[:1])
    options, flags = parser.parse_known_args(words)
    problems = []
    if options.world_size is not None and options.world_size < 1:
        problems.append(f"--world-size {options.world_size} must be above 0")
    if not (options.timeout > 0 and math.isfinite(options.timeout)):
        problems.append(f"--timeout {options.timeout} must be a number of seconds above 0")
    if options.keep is not None and options.keep.exists():
        problems.append(f"--keep {options.keep}: there is something already")
    if options.against is not None and (flags or options.keep):
        problems.append("--against runs nothing, so it takes no flags and keeps nothing")
    if problems:
        parser.error("; ".join(problems))
    return options, flags


def _replay(options: argparse.Namespace, flags: list[str]) -> int:
    """The whole program in one process, which forks ranks."""
    from moe_trainer.guard.record import Record
    from moe_trainer.proof.replay import plan_replay, what_cannot_be_equal

    record = Record.open(options.record)
    if options.against is not None:
        return _tell(record, Record.open(options.against), [], options, None)
    plan = plan_replay(record, _changes(options, flags, options.world_size))
    with tempfile.TemporaryDirectory(prefix="replay") as name:
        folder = options.keep or Path(name, "replay")
        _run(record, plan, folder, options.timeout)
        return _tell(record, Record.open(folder), list(what_cannot_be_equal(record, plan)), options,
                     None if plan.as_recorded else lambda: _again(record, Path(name, "again"), options))


def _changes(options: argparse.Namespace, flags: Sequence[str], world_size: int | None):
    from moe_trainer.proof.replay import Changes

    return Changes(tuple(flags), tuple(options.without), options.one_process, options.fp32, world_size)


def _run(record: Record, plan: Plan, folder: Path, timeout_s: float) -> None:
    """Fork the ranks of a replay, which record in `folder`. Raises: ValueError when they cannot."""
    import torch

    from moe_trainer.proof.pool import Pool, RanksFailed
    from moe_trainer.proof.replay import replay_on_cpu

    torch.set_num_threads(1)  # before ranks are forked
    folder.parent.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    # as many threads as recorded give the same sums in the same order
    threads = record.head["threads"] if plan.world_size == record.head["world_size"] else max(1, cores // plan.world_size)
    with Pool(plan.world_size, timeout_s) as pool:
        try:
            pool.run(replay_on_cpu, plan.world_size, record, plan, str(folder), threads)
        except RanksFailed as error:
            told = [text.strip().splitlines() for text in error.by_rank.values() if "InputError: " in text]
            if told:
                raise ValueError("\n".join(_last_message(told[0]))) from None
            raise ValueError(f"the replay failed\n{error}") from None


def _last_message(lines: Sequence[str]) -> list[str]:
    """The message of the last InputError of a traceback."""
    start = max(number for number, line in enumerate(lines) if "InputError: " in line)
    return [lines[start].partition("InputError: ")[2], *lines[start + 1:]]


def _again(record: Record, folder: Path, options: argparse.Namespace) -> dict[tuple[str, str], float] | None:
    """How far the recorded flags, run again here, are from the record; None where this machine has not the ranks for it."""
    from moe_trainer.guard.record import Record
    from moe_trainer.proof.parting import compare_records
    from moe_trainer.proof.replay import Changes, plan_replay

    if record.head["world_size"] > _MOST_RANKS:
        return None
    _run(record, plan_replay(record, Changes()), folder, options.timeout)
    return {(part.kind, part.name): part.size for part in compare_records(record, Record.open(folder))}


def _tell(record: Record, other: Record, notes: Sequence[str], options: argparse.Namespace,
          again: Callable[[], dict[tuple[str, str], float] | None] | None) -> int:
    """Compare and print. again: measures how far the recorded flags are when they run again. Returns the exit code."""
    from moe_trainer.proof.parting import compare_records
    from moe_trainer.proof.parting_text import first_lines, head_lines, table_lines

    print("\n".join(head_lines(record, other, notes)), flush=True)
    parts = compare_records(record, other)
    parted = any(part.parts for part in parts)
    print("\n".join(first_lines(parts, again() if parted and again is not None else None)))
    print("\n".join(table_lines(parts, options.all)))
    return int(parted)


def _replay_as_rank(options: argparse.Namespace, flags: list[str], place) -> int:
    """One of the ranks that a launcher has started."""
    from arguments import parse_args
    from moe_trainer.guard.record import Record
    from moe_trainer.initialize import initialize
    from moe_trainer.parallel import collectives
    from moe_trainer.parallel.state import close_groups
    from moe_trainer.proof.replay import plan_replay, replay, what_cannot_be_equal

    if options.against is not None:
        raise ValueError("--against runs nothing: start it without a launcher")
    if options.world_size not in (None, place.world_size):
        raise ValueError(f"--world-size {options.world_size}: the launcher has started {place.world_size} ranks")
    record = Record.open(options.record)
    plan = plan_replay(record, _changes(options, flags, place.world_size))
    args = parse_args(list(plan.argv), place.world_size)
    runtime = initialize(args, place)
    made = tempfile.mkdtemp(prefix="replay") if place.rank == 0 else None
    made = collectives.broadcast_object(made, runtime.ps.world)
    folder = options.keep or Path(made, "replay")
    replay(record, args, runtime, folder)
    collectives.barrier(runtime.ps.world)
    code = 0
    if place.rank == 0:
        code = _tell(record, Record.open(folder), list(what_cannot_be_equal(record, plan)), options, None)
        shutil.rmtree(made, ignore_errors=True)
    code = collectives.broadcast_object(code, runtime.ps.world)
    close_groups(runtime.ps)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure which micro-batch size is the fastest on this machine.

    python scripts/tune.py --micro-batch-size 1,2,4,8 --preset qwen3_tiny --mock-data
    python scripts/tune.py --micro-batch-size 1,2,4,8 torchrun --nproc-per-node 8 -m moe_trainer train FLAGS

Runs some iterations of each size with the launcher, model and data of the line, one after the other, and prints
medians without the first two iterations. A size that runs out of memory, or that the trainer refuses, is a row.
Of the line's folders only the cache of sample indices is written to. The options below stand before the line.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from arguments.pasted_line import split_pasted_line
from arguments.program import program_name
from arguments.settings import shorten
from arguments.tokens import parse_tokens
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.errors import UserError, as_user_error, require_packages
from moe_trainer.exit_codes import ExitCode
from moe_trainer.launch.trial import WARMUP, Trial, run_trial

_OWN = ("--micro-batch-size", "--iterations", "--timeout")
_SIZE = r"0*[1-9]\d{0,8}"
_AS_FAST = 1.02  # medians that differ less count as equal


def main(words: Sequence[str]) -> int:
    """Run the trials and print the table. Returns the exit code."""
    parser = make_command_parser(
        "tune", __doc__, usage=f"{program_name('tune')} --micro-batch-size SIZES [options] LINE"
    )
    parser.add_argument("--micro-batch-size", required=True, metavar="SIZES", help="sizes to try, as 1,2,4,8")
    parser.add_argument(
        "--iterations", type=int, default=8, metavar="N", help="iterations of each size (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="maximum seconds of each size (default: %(default)g)"
    )
    split = _own_words(words)
    options = parser.parse_args(["--help"] if {"-h", "--help"} & set(words) else words[:split])
    if not re.fullmatch(rf"{_SIZE}(,{_SIZE})*", options.micro_batch_size):
        parser.error(f"--micro-batch-size {shorten(options.micro_batch_size)}: numbers above 0 are needed, as 1,2,4,8")
    sizes = list(dict.fromkeys(map(int, options.micro_batch_size.split(","))))
    if options.iterations <= WARMUP:
        parser.error(f"--iterations {options.iterations}: more than {WARMUP} are needed, since the first do not count")
    if not options.timeout > 0:
        parser.error(f"--timeout {options.timeout:g} must be above 0")
    try:
        before, start, flags = split_pasted_line(words[split:])
    except ValueError as error:
        parser.error(str(error))
    flags = [*before, *flags]
    if not flags:
        parser.error("the command line of a run is missing: its flags, or all of it with torchrun")
    problems = parse_tokens(flags).violations
    if problems:
        parser.error("\n  ".join(problem.message for problem in problems))
    # a trial's processes are ended, and its folder is deleted, on the way out
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        require_packages("torch", "numpy", "safetensors")
        trials = _run(sizes, start, flags, options.iterations, options.timeout)
    except UserError as error:
        print(f"{program_name('tune')}: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print(f"{program_name('tune')}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    measured = {size: trial for size, trial in trials.items() if not trial.note}
    if not measured:
        print(f"{program_name('tune')}: no size gave a result", file=sys.stderr)
        return ExitCode.USER_ERROR
    print("\n".join(_conclusion(measured)))
    return ExitCode.OK


def _own_words(words: Sequence[str]) -> int:
    """Return the number of words before the line: those of this command's options."""
    index = 0
    while index < len(words) and words[index].partition("=")[0] in _OWN:
        index += 1 if "=" in words[index] else 2
    return index


def _run(
    sizes: Sequence[int], start: Sequence[str], flags: Sequence[str], iterations: int, timeout_s: float
) -> dict[int, Trial]:
    """Run a trial of each size and print its row."""
    trials = {}
    print(_row("micro-batch size", "tokens/s", "s/iteration", "peak memory", "note"), flush=True)
    for size in sizes:
        with (
            as_user_error("a trial's folder, below TMPDIR"),
            tempfile.TemporaryDirectory(prefix="moe_trainer_tune_") as folder,
        ):
            trials[size] = trial = run_trial(start, flags, size, iterations, timeout_s, Path(folder))
        numbers = (f"{trial.tokens_per_s:,.0f}", f"{trial.seconds:.3f}", f"{trial.memory_mb:,.0f} MiB")
        print(_row(str(size), *(("-", "-", "-") if trial.note else numbers), trial.note), flush=True)
    return trials


def _row(size: str, tokens: str, seconds: str, memory: str, note: str) -> str:
    return f"{size:>16}  {tokens:>12}  {seconds:>11}  {memory:>12}  {note}".rstrip()


def _conclusion(measured: dict[int, Trial]) -> list[str]:
    """Return the lines below the table."""
    best, *others = sorted(measured, key=lambda size: -measured[size].tokens_per_s)
    lines = [f"fastest: --micro-batch-size {best}"]
    if others:
        ratio = measured[best].tokens_per_s / measured[others[0]].tokens_per_s
        same = f"; --micro-batch-size {others[0]} is as fast, within {_AS_FAST - 1:.0%}"
        lines[0] += same if ratio < _AS_FAST else f", {ratio:.2f} times the tokens/s of --micro-batch-size {others[0]}"
    if len({trial.global_batch_size for trial in measured.values()}) > 1:
        lines.append("the global batch grew with the size: give --global-batch-size to compare the same training")
    return lines

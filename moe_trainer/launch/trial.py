"""Trials: a few iterations of a training command line in child processes, for their time and memory.

A trial takes data, model and launcher of the line, starts at iteration 0 (of a checkpoint it loads the weights), and
writes only to its own folder and to the line's cache of sample indices.
"""

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from arguments.container import OPTIONS, flags_of
from arguments.needs import unmet
from arguments.parse import as_plan, resolve_command_line
from arguments.rules.checkpoint import DUMPS
from arguments.tokens import FIELDS, drop_flags, with_old_spellings
from moe_trainer.errors import UserError
from moe_trainer.metrics.metrics_file import read_end

WARMUP = 2
"""Number of first iterations that do not count: they allocate memory and compile kernels."""
_OUTPUT, _METRICS = "output.txt", "metrics.jsonl"
_END_S = 30.0
_OURS = (
    "--micro-batch-size {size} --exit-interval {iterations} --log-interval 1 --log-memory-interval {iterations} "
    "--eval-iters 0"
)
_ONLY_WEIGHTS = "--finetune --no-load-optim --no-load-rng"
_RECORDS = "--metrics-file"
_SET = with_old_spellings(
    frozenset(FIELDS[word].dest for word in f"{_OURS} {_ONLY_WEIGHTS} {_RECORDS}".split() if word in FIELDS)
)
"""Destinations of flags that a trial sets."""
_WITHOUT_PATH = frozenset(("wandb_project", "record_step", "profile", "record_memory_history"))
_WRITING = _WITHOUT_PATH | frozenset(
    dest for dest, option in OPTIONS.items() if option.path == "write" and dest not in _SET
)
"""Those that write somewhere else than in the trial's folder; the first ones have no path that says so."""
_OF_A_RUN = frozenset(DUMPS) | frozenset(
    "auto_resume override_ckpt_iteration ckpt_convert_format moe_use_upcycling check_files validate_only dry_run "
    "fake_process_group rampup_batch_size step_batch_size_schedule stream_weights_interval".split()
)
"""Those that belong to a whole run, or to a run that is no training. A list, since a trial
measures others with the same roles."""
_ABSENT = _WRITING | _OF_A_RUN | flags_of("evaluation", "exit")
_LEFT_OUT = (_SET | _ABSENT) | frozenset(
    dest for dest, option in OPTIONS.items() if any(_ABSENT.issuperset(need.split(" or ")) for need in option.needs)
)
"""Also those that act only with one of these."""
_MESSAGE = re.compile(r"^(?:pretrain_moe\.py|moe-trainer train|python -m moe_trainer train): (.+)(?:\n  - (.+))?", re.M)
_NO_MEMORY = re.compile(
    r"out of (host )?memory|OutOfMemoryError|can(not|'t) allocate memory|does not fit into the memory", re.IGNORECASE
)
_ALLOCATED = re.compile(r"max allocated: ([\d.]+)")  # of ranks that write no records


@dataclass(frozen=True)
class Trial:
    """What a trial found; without numbers, `note` says why.

    Attributes:
        seconds: median of the iterations after WARMUP; `tokens_per_s` likewise.
        memory_mb: peak in MiB of the ranks that are known: the last, and on GPUs the first of each data-parallel group.
    """

    note: str = ""
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    memory_mb: float = 0.0
    global_batch_size: int = 0


def run_trial(
    start: Sequence[str], flags: Sequence[str], micro_batch_size: int, iterations: int, timeout_s: float, folder: Path
) -> Trial:
    """Run a trial in an empty folder.

    Args:
        start: words that start the trainer, as `arguments.pasted_line` finds them; nothing for one process.
        flags: the trainer's.

    Raises:
        UserError: if the line cannot be started at all.
    """
    command = [*_start_of_trainer(start), *_trial_flags(flags, micro_batch_size, iterations, folder)]
    code = run_command(command, folder / _OUTPUT, timeout_s)
    output = (folder / _OUTPUT).read_text(errors="replace")
    if code is None:
        return Trial(f"no result within {timeout_s:g} s (--timeout)")
    if code != 0:
        return Trial(_reason(folder / _METRICS, output, code))
    return _read_trial(folder / _METRICS, output)


def run_command(command: Sequence[str], output: Path, timeout_s: float) -> int | None:
    """Run a command with its output in a file. Returns the exit code; None if it ran too long and was ended.

    Raises:
        UserError: if there is no such program.
    """
    with open(output, "wb") as file:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started ({error.strerror})") from None
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a process, if it still runs, and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _start_of_trainer(start: Sequence[str]) -> list[str]:
    """Return the words that start our trainer where those of a line start it or Megatron-LM's."""
    spec = importlib.util.find_spec("pretrain_moe")
    program = spec.origin if spec is not None and spec.origin is not None else "pretrain_moe.py"
    if not start:
        return [sys.executable, program]
    words = list(start[1:] if start[0] == "exec" else start)
    if words[-1].endswith(".py") and Path(words[-1]).name != "pretrain_moe.py":
        words[-1] = program
    elif words[-2:-1] in (["-m"], ["--module"]) and words[-1] != "train":
        words[-1] = "pretrain_moe"
    if len(words) == 1 and words[0].endswith(".py"):
        return [sys.executable, *words]
    return ["env", *words] if "=" in words[0] else words


def _trial_flags(flags: Sequence[str], micro_batch_size: int, iterations: int, folder: Path) -> list[str]:
    """Return the flags of a trial. Length of training and data stay, for the same index of samples as in the run.

    Raises:
        UserError: for a flag of a recipe file that writes: only words of the line can be left out.
    """
    ours = _OURS.format(size=micro_batch_size, iterations=iterations)
    kept = drop_flags(flags, _LEFT_OUT)
    settings, _ = resolve_command_line(as_plan(kept), None)
    writing = [dest for dest in settings.given_dests() if dest in _WRITING and not unmet(settings, dest, {})]
    if writing:
        flag = settings.flag(writing[0])
        raise UserError(f"{flag} in the recipe file would write into the run's own folder; put it on the line")
    only_weights = _ONLY_WEIGHTS.split() if settings.load is not None else []
    return [*kept, *ours.split(), *only_weights, _RECORDS, str(folder / _METRICS)]


def _read_trial(path: Path, output: str) -> Trial:
    lines = path.read_text().splitlines() if path.exists() else []
    records = [record for line in lines if "elapsed_ms" in (record := json.loads(line))]
    counted = records[WARMUP:]
    if not counted:
        shared = "" if records else "; on several nodes TMPDIR must name a folder that all share"
        return Trial(f"{len(records)} iterations are recorded, and the first {WARMUP} do not count{shared}")
    return Trial(
        "",
        statistics.median(record["tokens_per_s"] for record in counted),
        statistics.median(record["elapsed_ms"] for record in counted) / 1e3,
        max([*map(float, _ALLOCATED.findall(output)), *(record["max_memory_mb"] for record in counted)]),
        counted[-1]["global_batch_size"],
    )


def _reason(metrics: Path, output: str, code: int) -> str:
    """Return in one line why a trial has no result: from its records, or from the log of one that did not begin."""
    end = read_end(metrics, 0.0)
    if _NO_MEMORY.search(output) or end is not None and _NO_MEMORY.search(end.reason):
        return "out of memory"
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "SIGKILL" in output:
        return "killed by SIGKILL, as when memory runs out"
    if end is not None:
        return end.reason
    message = _MESSAGE.search(output)
    if message is not None:
        return message[2] or message[1]
    last = [line.strip() for line in output.splitlines() if line.strip()][-1:]
    return ": ".join([f"exit code {code}", *last])

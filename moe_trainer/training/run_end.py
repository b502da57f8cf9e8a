"""How the run ends: in metrics.jsonl, on the dashboard and in the summary, whatever ends it and wherever.

The last rank writes the metrics, so it also writes the end. Another rank that fails first appends the end itself, since
the last one may be terminated, or knows only that a rank is gone. No other rank reads or writes the file: an error of
all ranks would be thousands of writers. The first record of a start stays. Before the metrics are open, rank 0 appends
the end of a start that continues a run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import Signals

from arguments import Arguments
from moe_trainer.checkpoint.directory import holds_lock, release_lock
from moe_trainer.errors import UserError
from moe_trainer.exit_codes import ExitCode
from moe_trainer.metrics.metrics_file import append_end, last_iteration, read_end
from moe_trainer.metrics.run_state import MAX_REASON, RunEnd
from moe_trainer.parallel.trace import CommunicationError
from moe_trainer.resilience.rejection import ResultRejectedError
from moe_trainer.training.metrics import metrics_path
from moe_trainer.training.run import BaseRun, TrainState

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 5.0
_RECORD_WAIT_S = 2.0  # for the record of the first rank that failed


class EndRecorder:
    """Records once how this start of the run ended. A run that only evaluates records nothing."""

    def __init__(self, run: BaseRun, state: TrainState):
        self._run, self._state = run, state
        self._started = time.time()
        self._is_done = run.args.training.skip_train

    def end(self, end: RunEnd) -> None:
        """Record the end of a run that ends as its flags say, on the last rank."""
        if not self._is_done and self._run.metrics is not None:
            self._run.metrics.end(end, self._run.save_history.saved)
        self._is_done = True

    def fail(self, error: BaseException, is_first: bool) -> None:
        """Record that an error or a signal ends the run. Never raises, and returns after a few seconds at most.

        Args:
            is_first: whether this is the first rank that ends.
        """
        if self._is_done:
            return
        self._is_done = True
        _run_briefly(partial(self._write_failure, error, is_first))

    def _write_failure(self, error: BaseException, is_first: bool) -> None:
        try:
            end = end_by(error, self._state.iteration)
            # the last rank has the others' errors, too
            is_own = not isinstance(error, KeyboardInterrupt | CommunicationError | ResultRejectedError)
            path = metrics_path(self._run.args)
            if self._run.metrics is not None:
                if path is not None and is_own and not is_first:
                    self._await_record(Path(path))
                self._run.metrics.end(end, self._run.save_history.saved)
                self._run.metrics.flush()
            elif path is not None and is_own and is_first and Path(path).is_file():
                append_end(Path(path), end, self._started)
        except Exception as problem:  # the error that ends the run matters more
            logger.warning("cannot record how the run ended: %s", problem)

    def _await_record(self, path: Path) -> None:
        """Wait until the rank that failed first has recorded it, if it can."""
        deadline = time.monotonic() + _RECORD_WAIT_S
        while time.monotonic() < deadline and read_end(path, self._started) is None:
            time.sleep(0.05)


def record_failed_start(args: Arguments, rank: int, started: float, error: BaseException, is_first: bool) -> None:
    """Record in metrics.jsonl of the run that this start was to continue that it has ended before it trained.

    Only rank 0 does, if the save folder is this start's. Never raises, and returns after a few seconds at most.
    """
    save, path = args.output.save, metrics_path(args)
    if rank != 0 or path is None or save is None or args.output.load != save:
        return

    def write() -> None:
        try:
            if holds_lock(Path(save)) and Path(path).is_file():
                append_end(Path(path), end_by(error, last_iteration(Path(path))), started)
        except Exception as problem:
            logger.warning("cannot record how the start ended: %s", problem)

    _run_briefly(write)


def release_save_folder(args: Arguments, rank: int) -> None:
    """Remove the file of this run's lock, which only rank 0 has. Returns after a few seconds at most."""
    if rank == 0 and args.output.save is not None:
        _run_briefly(partial(release_lock, Path(args.output.save)))


def _run_briefly(work: Callable[[], None]) -> None:
    """Run `work` in a thread and wait for it, but not long: a stuck disk must not keep a process alive."""
    worker = threading.Thread(target=work, name="end of the run", daemon=True)
    worker.start()
    deadline = time.monotonic() + _WRITE_TIMEOUT_S
    while worker.is_alive() and time.monotonic() < deadline:
        with suppress(KeyboardInterrupt):  # torchrun repeats the terminal's
            worker.join(max(0.0, deadline - time.monotonic()))


def end_by(error: BaseException, iteration: int) -> RunEnd:
    """Return the end of a run by an error or a signal after this iteration."""
    if isinstance(error, KeyboardInterrupt):
        return RunEnd("interrupted", iteration, ExitCode.INTERRUPTED, f"interrupted after iteration {iteration}")
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code - 128 in set(Signals):
            name = Signals(code - 128).name
            return RunEnd("interrupted", iteration, code, f"terminated by {name} after iteration {iteration}")
        return RunEnd("failed", iteration, code, f"SystemExit: {error.code}"[:MAX_REASON])
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    if isinstance(error, CommunicationError):
        reason = "; ".join(lines[:2])  # the call that failed, and the most likely culprit
        return RunEnd("failed", iteration, ExitCode.COMMUNICATION_FAILED, reason[:MAX_REASON])
    if isinstance(error, ResultRejectedError):
        return RunEnd("failed", iteration, error.exit_code, lines[0][:MAX_REASON])
    if isinstance(error, UserError):
        return RunEnd("failed", iteration, ExitCode.USER_ERROR, "; ".join(lines)[:MAX_REASON])
    if isinstance(error, MemoryError):
        return RunEnd("failed", iteration, ExitCode.USER_ERROR, f"out of host memory {lines[0]}".strip()[:MAX_REASON])
    return RunEnd("failed", iteration, ExitCode.FAILED, f"{type(error).__name__}: {lines[0]}"[:MAX_REASON])

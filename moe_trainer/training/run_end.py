"""How the run ends: in metrics.jsonl, on the dashboard and in the summary, whatever ends it and wherever.

The last rank writes the metrics, so it also writes the end. Another rank that fails first appends the end itself, since
the last one may be terminated, or knows only that a rank is gone. No other rank reads or writes the file: an error of
all ranks would be thousands of writers. The first record of a start stays.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path
from signal import Signals

from moe_trainer.errors import UserError
from moe_trainer.exit_codes import ExitCode
from moe_trainer.metrics.metrics_file import append_end, read_end
from moe_trainer.metrics.run_state import MAX_REASON, RunEnd
from moe_trainer.parallel.trace import CommunicationError
from moe_trainer.resilience.rejection import ResultRejectedError
from moe_trainer.training.context import TrainContext, TrainState
from moe_trainer.training.metrics import metrics_path

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 5.0  # a stuck disk must not keep a failed process alive
_RECORD_WAIT_S = 2.0  # for the record of the first rank that failed


class EndRecorder:
    """Records once how this start of the run ended. A run that only evaluates records nothing."""

    def __init__(self, ctx: TrainContext, state: TrainState):
        self._ctx, self._state = ctx, state
        self._started = time.time()
        self._is_done = ctx.args.training.skip_train

    def end(self, end: RunEnd) -> None:
        """Record the end of a run that ends as its flags say, on the last rank."""
        if not self._is_done and self._ctx.metrics is not None:
            self._ctx.metrics.end(end, self._ctx.save_history.saved)
        self._is_done = True

    def fail(self, error: BaseException, is_first: bool) -> None:
        """Record that an error or a signal ends the run. Never raises, and returns after a few seconds at most.

        Args:
            is_first: whether this is the first rank that ends.
        """
        if self._is_done:
            return
        self._is_done = True
        writer = threading.Thread(
            target=self._write_failure, args=(error, is_first), name="end of the run", daemon=True
        )
        writer.start()
        deadline = time.monotonic() + _WRITE_TIMEOUT_S
        while writer.is_alive() and time.monotonic() < deadline:
            with suppress(KeyboardInterrupt):  # torchrun repeats the terminal's
                writer.join(max(0.0, deadline - time.monotonic()))

    def _write_failure(self, error: BaseException, is_first: bool) -> None:
        try:
            end = end_by(error, self._state.iteration)
            # the last rank has the others' errors, too
            is_own = not isinstance(error, KeyboardInterrupt | CommunicationError | ResultRejectedError)
            path = metrics_path(self._ctx.args)
            if self._ctx.metrics is not None:
                if path is not None and is_own and not is_first:
                    self._await_record(Path(path))
                self._ctx.metrics.end(end, self._ctx.save_history.saved)
                self._ctx.metrics.flush()
            elif path is not None and is_own and is_first and Path(path).is_file():
                append_end(Path(path), end, self._started)
        except Exception as problem:  # the error that ends the run matters more
            logger.warning("cannot record how the run ended: %s", problem)

    def _await_record(self, path: Path) -> None:
        """Wait until the rank that failed first has recorded it, if it can."""
        deadline = time.monotonic() + _RECORD_WAIT_S
        while time.monotonic() < deadline and read_end(path, self._started) is None:
            time.sleep(0.05)


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

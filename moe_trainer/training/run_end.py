"""How the run ends: in metrics.jsonl, on the dashboard and in the summary, whatever ends it and wherever.

The last rank writes the metrics, so it also writes the end. Another rank that fails alone appends the end itself, since
the last one may be terminated, or knows only that a rank is gone. The first record of a start stays.
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
from moe_trainer.metrics.dashboard import open_dashboard
from moe_trainer.metrics.metrics_file import append_end
from moe_trainer.metrics.run_state import MAX_REASON, RunEnd
from moe_trainer.parallel.trace import CommunicationError
from moe_trainer.resilience.rejection import ResultRejectedError
from moe_trainer.training.context import TrainContext, TrainState
from moe_trainer.training.metrics import metrics_path

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 5.0  # a stuck disk must not keep a failed process alive


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

    def fail(self, error: BaseException) -> None:
        """Record that an error or a signal ends the run. Never raises, and returns after a few seconds at most."""
        if self._is_done:
            return
        self._is_done = True
        writer = threading.Thread(target=self._write_failure, args=(error,), name="end of the run", daemon=True)
        writer.start()
        deadline = time.monotonic() + _WRITE_TIMEOUT_S
        while writer.is_alive() and time.monotonic() < deadline:
            with suppress(KeyboardInterrupt):  # torchrun repeats the terminal's
                writer.join(max(0.0, deadline - time.monotonic()))

    def _write_failure(self, error: BaseException) -> None:
        end = end_by(error, self._state.iteration)
        try:
            if self._ctx.metrics is not None:
                self._ctx.metrics.end(end, self._ctx.save_history.saved)
                self._ctx.metrics.flush()
            elif not isinstance(error, KeyboardInterrupt | CommunicationError | ResultRejectedError):
                self._append(end)  # the last rank has the others' errors, too
        except Exception as problem:  # the error that ends the run matters more
            logger.warning("cannot record how the run ended: %s", problem)

    def _append(self, end: RunEnd) -> None:
        path = metrics_path(self._ctx.args)
        if path is None or not Path(path).is_file():
            return
        append_end(Path(path), end, self._started)
        dashboard = open_dashboard(path)
        if dashboard is not None:
            dashboard.write()


def end_by(error: BaseException, iteration: int) -> RunEnd:
    """Return the end of a run by an error or a signal after this iteration."""
    if isinstance(error, KeyboardInterrupt):
        return RunEnd("interrupted", iteration, ExitCode.INTERRUPTED, f"interrupted after iteration {iteration}")
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        name = Signals(error.code - 128).name
        return RunEnd("interrupted", iteration, error.code, f"terminated by {name} after iteration {iteration}")
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

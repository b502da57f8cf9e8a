"""Whether a run is alive, and how it ended: the one answer of the dashboard, its list of runs and compare.py.

A run that ends writes a record to metrics.jsonl: {"ended": STATE, "iteration": ..., "exit_code": ..., "reason": ...,
"time": ...}. A run that was killed, or whose node was lost, cannot write one. The lock of its save folder tells it from
one that is stalled: the kernel gives the lock up with the process. Without a lock a run gives no sign of life.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATES = ("finished", "stopped", "interrupted", "failed")
WITHOUT_END = ("killed", "stalled", "silent")
MAX_REASON = 500  # characters
_MIN_SILENCE_S = 120.0
_SILENT_INTERVALS = 5  # between records: an evaluation or a save may come between two


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        state: one of STATES: all iterations are done; saved early, as planned or because of a signal; ended by Ctrl-C
            or another signal without a save; anything else.
        iteration: the last one that is complete.
        reason: a sentence.
    """

    state: str
    iteration: int
    exit_code: int
    reason: str

    def as_record(self) -> dict[str, Any]:
        """Return the record of metrics.jsonl."""
        return {
            "ended": self.state,
            "iteration": self.iteration,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "time": time.time(),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> RunEnd:
        """Return the end that a record of metrics.jsonl holds."""
        return cls(record["ended"], record["iteration"], record.get("exit_code") or 0, record["reason"])

    def __str__(self) -> str:
        if self.state != "failed":
            return self.reason
        return f"failed after iteration {self.iteration}, exit code {self.exit_code}: {self.reason}"


@dataclass(frozen=True)
class RunState:
    """State of a run, as it is shown.

    Attributes:
        name: "running", one of WITHOUT_END, or the state of its end.
        words: the name for people.
        silent_at: of a running one, when it will have been silent for too long, in seconds since the epoch.
        cause: of silence, as far as it is known.
    """

    name: str
    words: str
    silent_at: float | None = None
    cause: str = ""


_UNKNOWN_CAUSE = "and no recorded end: killed, its machine was lost, or it is of an earlier version of this program"
_KILLED_CAUSE = "it recorded no end, and its process is gone (kill -9, out of host memory, or the machine restarted)"


def state_of_run(
    end: RunEnd | None, heard: float | None, interval_s: float, now: float, is_alive: bool | None = None
) -> RunState:
    """Return the state of a run.

    Args:
        end: how it ended; None if it did not record that.
        heard: when its newest record was written, in seconds since the epoch; None if unknown.
        interval_s: seconds between its records.
        now: seconds since the epoch.
        is_alive: whether its process runs; None if unknown.
    """
    if end is not None:
        return RunState(end.state, end.state)
    since = "" if heard is None else f" since {clock(heard)}"
    if is_alive is False:
        return RunState("killed", f"killed, no record{since}", cause=_KILLED_CAUSE)
    silent_at = None if heard is None else heard + max(_MIN_SILENCE_S, _SILENT_INTERVALS * interval_s)
    if silent_at is not None and now <= silent_at:
        return RunState("running", "running", silent_at)
    if is_alive:
        usual = f"it wrote one every {interval_s:.3g} s before" if interval_s else "it has written none"
        return RunState("stalled", f"stalled, no record{since}", cause=f"its process runs; {usual}")
    return RunState("silent", f"no sign of life{since}", cause=_UNKNOWN_CAUSE)


def clock(seconds: float) -> str:
    """Return a time since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

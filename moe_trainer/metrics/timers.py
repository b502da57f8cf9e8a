"""Named timers of the training step, with Megatron-LM's names, levels and report.

A timer costs two clock reads (and, on CUDA, a device synchronization, which is why levels exist: a timer above the
selected level takes no time). Each is a range for nsys, too, at any level. Reports go through `logging` as in
Megatron-LM: minimum and maximum over ranks, or all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from moe_trainer.metrics.nvtx import Ranges
from moe_trainer.parallel.trace import Trace

LEVELS = tuple(
    tuple(names.split())
    for names in (
        """
        interval-time save-checkpoint load-checkpoint model-and-optimizer-setup
        train/valid/test-data-iterators-setup evaluate
        """,
        """
        forward-backward layernorm-grads-all-reduce embedding-grads-all-reduce all-grads-sync params-all-gather
        optimizer-copy-to-main-grad optimizer-unscale-and-check-inf optimizer-clip-main-grad optimizer-count-zeros
        optimizer-inner-step optimizer-copy-main-to-model-params optimizer
        """,
        "batch-generator forward-compute backward-compute forward-backward-compute forward-recv backward-recv",
    )
)
"""Names of the timers by level, in the order of the report."""


class Timers:
    """A set of named timers. Those above `level` never run; all are marked with `ranges`.

    Raises:
        KeyError: for a name that is not in LEVELS, so that a typo does not become a silent timer.
    """

    def __init__(
        self,
        level: int,
        synchronize: bool = False,
        trace: Trace | None = None,
        ranges: Ranges | None = None,
    ):
        self.ranges = Ranges() if ranges is None else ranges
        self._active = {name: timer_level <= level for timer_level, names in enumerate(LEVELS) for name in names}
        self._seconds: dict[str, float] = {}
        self._synchronize = synchronize
        self._trace = trace or Trace()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the enclosed block under `name`, and set the phase of the trace at any level."""
        active, outer, self._trace.phase = self._active[name], self._trace.phase, name
        begin = self._now() if active else 0.0
        try:
            with self.ranges(name):
                yield
        finally:
            self._trace.phase = outer
            if active:
                self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begin

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """Return seconds per timer since the last call, and reset."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def format_report(per_rank: list[dict[str, float]], option: str, iterations: int) -> str:
    """Return Megatron-LM's timer report in milliseconds per iteration.

    `per_rank` has the seconds by timer name of each rank; `option` is "max", "minmax" or "all".
    """
    text = {"max": "max time", "minmax": "(min, max) time", "all": "times"}[option] + " across ranks (ms):"
    for name in (name for names in LEVELS for name in names if any(name in rank for rank in per_rank)):
        values = [rank.get(name, 0.0) * 1e3 / max(1, iterations) for rank in per_rank]
        label = f"\n    {(name + ' ').ljust(48, '.')}: "
        if option == "max":
            text += f"{label}{max(values):.2f}"
        elif option == "minmax":
            text += f"{label}({min(values):.2f}, {max(values):.2f})"
        else:
            text += f"\n  {name}:"
            text += "".join(f"\n     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(values))
    return text

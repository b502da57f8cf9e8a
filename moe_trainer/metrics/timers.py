"""Named timers of the training step, with Megatron-LM's names, levels and report.

A timer costs two clock reads (and, on CUDA, a device synchronization, which is why levels exist: a timer above the
selected level does nothing). Reports go through `logging` as in Megatron-LM: minimum and maximum over ranks, or all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from moe_trainer.parallel.trace import Trace

LEVELS = (
    (
        0,
        (
            "interval-time",
            "save-checkpoint",
            "load-checkpoint",
            "model-and-optimizer-setup",
            "train/valid/test-data-iterators-setup",
            "evaluate",
        ),
    ),
    (
        1,
        (
            "forward-backward",
            "layernorm-grads-all-reduce",
            "embedding-grads-all-reduce",
            "all-grads-sync",
            "params-all-gather",
            "optimizer-copy-to-main-grad",
            "optimizer-unscale-and-check-inf",
            "optimizer-clip-main-grad",
            "optimizer-count-zeros",
            "optimizer-inner-step",
            "optimizer-copy-main-to-model-params",
            "optimizer",
        ),
    ),
    (
        2,
        (
            "batch-generator",
            "forward-compute",
            "backward-compute",
            "forward-backward-compute",
            "forward-recv",
            "backward-recv",
        ),
    ),
)


class Timers:
    """A set of named timers. Those above `level` never run.

    Raises:
        KeyError: for a name that is not in LEVELS, so that a typo does not become a silent timer.
    """

    def __init__(self, level: int, synchronize: bool = False, trace: Trace | None = None):
        self._active = {name: rank <= level for rank, names in LEVELS for name in names}
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._synchronize = synchronize
        self._trace = trace or Trace()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the enclosed block under `name`, and set the phase of the trace at any level."""
        active, outer, self._trace.phase = self._active[name], self._trace.phase, name
        begin = self._now() if active else 0.0
        try:
            yield
        finally:
            self._trace.phase = outer
            if active:
                self._add(name, begin)

    def _add(self, name: str, begin: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begin
        self._counts[name] = self._counts.get(name, 0) + 1

    def _now(self) -> float:
        if self._synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """Return seconds per timer since the last call, and reset."""
        seconds, self._seconds, self._counts = self._seconds, {}, {}
        return seconds


def format_report(per_rank: list[dict[str, float]], option: str, iterations: int) -> str:
    """Return Megatron-LM's timer report in milliseconds per iteration.

    Args:
        per_rank: seconds by timer name, one dict per rank.
        option: "max", "minmax" or "all".
        iterations: number of iterations.
    """
    names = [name for _, group in LEVELS for name in group if any(name in rank for rank in per_rank)]
    header = {
        "max": "max time across ranks (ms):",
        "minmax": "(min, max) time across ranks (ms):",
        "all": "times across ranks (ms):",
    }[option]
    text = header
    for name in names:
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

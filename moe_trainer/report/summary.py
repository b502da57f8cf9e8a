"""What a run prints when it has ended: how far it came, how well, how fast, what is saved, and why it ended."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_trainer.report.console import duration

MOST_TIMES = 100_000
"""Iterations whose throughput is kept for the median: the latest."""


class _Loss(NamedTuple):
    iteration: int
    loss: float


@dataclass
class RunSummary:
    """Collects figures of the iterations and validations of this start, on the last rank.

    start_iteration: where this start went on; 0 for a new run.
    """

    train_iters: int
    world_size: int
    start_iteration: int
    begin: float = field(default_factory=time.monotonic)
    iteration: int = 0
    tokens: int = 0
    num_skipped: int = 0
    _speeds: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    _last_loss: _Loss | None = None
    _mean_loss: tuple[int, float] | None = None
    _validations: dict[str, list[_Loss]] = field(default_factory=dict)

    def add_iteration(self, iteration: int, tokens: int, flops: float, seconds: float, loss: float | None, skipped: bool) -> None:
        """Take in an iteration. loss: of its batch, if there is one."""
        self.iteration, self.tokens, self.num_skipped = iteration, self.tokens + tokens, self.num_skipped + skipped
        self._speeds.append((tokens / seconds, flops / (seconds * 1e12 * self.world_size)))
        if loss is not None:
            self._last_loss = _Loss(iteration, loss)

    def add_line(self, iterations: int, losses: Mapping[str, float]) -> None:
        """Take in the means of an iteration line over so many iterations."""
        if "lm loss" in losses:
            self._mean_loss = (iterations, losses["lm loss"])

    def add_validation(self, kind: str, iteration: int, loss: float) -> None:
        """Take in the loss of an evaluated set."""
        self._validations.setdefault(kind, []).append(_Loss(iteration, loss))

    def lines(self, why: str, saved: Sequence[int], folder: str | None, dashboard: str | None) -> list[str]:
        """The summary. why: the run ended. saved: iterations saved by this start, in `folder` (None: nothing is to be saved)."""
        done = max(self.iteration - self.start_iteration, 0)
        begun = f", resumed after {self.start_iteration}" if self.start_iteration else ""
        lines = [
            "run summary",
            f"  ended:       {why}",
            f"  iterations:  {max(self.iteration, self.start_iteration)} of {self.train_iters}{begun} ({done} in this start, {duration(time.monotonic() - self.begin)}"
            + (f", {self.num_skipped} without an update)" if self.num_skipped else ")"),
            f"  tokens:      {self.tokens:,} in this start",
        ]
        if self._speeds:
            speed, tflops = (statistics.median(values) for values in zip(*self._speeds))
            lines.append(f"  throughput:  {speed:,.0f} tokens/s, {tflops:.3g} TFLOP/s per rank (medians over iterations)")
        if self._last_loss is not None:
            mean = f"; mean of the last {self._mean_loss[0]} iterations {self._mean_loss[1]:.4f}" if self._mean_loss and self._mean_loss[0] > 1 else ""
            lines.append(f"  lm loss:     {self._last_loss.loss:.4f} (the batch of iteration {self._last_loss.iteration}{mean})")
        for kind, found in self._validations.items():
            best, last = min(found, key=lambda each: each.loss), found[-1]
            lines.append(f"  {kind + ':':12s} {last.loss:.4f} at iteration {last.iteration}"
                         + (f", best {best.loss:.4f} at iteration {best.iteration}" if len(found) > 1 else ""))
        if folder is not None:
            count = f"{len(saved)} checkpoint{'s' if len(saved) != 1 else ''} saved"
            lines.append(f"  saved:       {count} to {folder}" + (f", the last at iteration {saved[-1]}" if saved else ""))
        else:
            lines.append("  saved:       nothing (no --save)")
        if dashboard is not None:
            lines.append(f"  dashboard:   {dashboard}")
        return lines

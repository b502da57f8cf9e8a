"""Summary that a run prints at its end: progress, losses, speed, checkpoints, and why it ended."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_trainer.metrics.console import duration, flops_rate
from moe_trainer.metrics.iteration import IterationRecord

MAX_SPEEDS = 100_000  # the latest iterations, of whose throughput the median is taken


class _Loss(NamedTuple):
    iteration: int
    loss: float


@dataclass
class RunSummary:
    """Collects values of the iterations and validations since this start, on the last rank.

    Attributes:
        start_iteration: the iteration that this start resumed after; 0 for a new run.
    """

    train_iters: int
    world_size: int
    start_iteration: int
    begin: float = field(default_factory=time.monotonic)
    iteration: int = 0
    tokens: int = 0
    num_skipped: int = 0
    _speeds: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_SPEEDS))
    _last_loss: _Loss | None = None
    _mean_loss: tuple[int, float] | None = None
    _validations: dict[str, dict[int, float]] = field(default_factory=dict)

    def add_iteration(self, record: IterationRecord) -> None:
        self.iteration, self.tokens = record.iteration, self.tokens + record.tokens
        self.num_skipped += record.skipped
        seconds = record.elapsed_s
        self._speeds.append((record.tokens / seconds, record.flops / (seconds * 1e12 * self.world_size)))
        if "lm loss" in record.step.losses:
            self._last_loss = _Loss(record.iteration, record.step.losses["lm loss"])

    def add_line(self, iterations: int, losses: Mapping[str, float]) -> None:
        """Add the means of an iteration line over `iterations` iterations."""
        if "lm loss" in losses:
            self._mean_loss = (iterations, losses["lm loss"])

    def add_validation(self, kind: str, iteration: int, loss: float) -> None:
        """Add a validation; that after the last iteration replaces one that was due at it."""
        self._validations.setdefault(kind, {})[iteration] = loss

    def lines(self, reason: str, saved: Sequence[int], save_dir: str | None, dashboard: str | None) -> list[str]:
        """Return the summary. `saved` are the iterations that this start has saved; `reason` is why the run ended."""
        done = max(self.iteration - self.start_iteration, 0)
        resumed = f", resumed after {self.start_iteration}" if self.start_iteration else ""
        skipped = f", {self.num_skipped} without an update" if self.num_skipped else ""
        lines = [
            "run summary",
            f"  ended:       {reason}",
            f"  iterations:  {max(self.iteration, self.start_iteration)} of {self.train_iters}{resumed} "
            f"({done} in this start, {duration(time.monotonic() - self.begin)}{skipped})",
            f"  tokens:      {self.tokens:,} in this start",
        ]
        if self._speeds:
            speed, tflops = (statistics.median(values) for values in zip(*self._speeds))
            medians = f"{speed:,.0f} tokens/s, {flops_rate(tflops)} per rank (medians over iterations)"
            lines.append(f"  throughput:  {medians}")
        if self._last_loss is not None:
            iteration, loss = self._last_loss
            count, mean = self._mean_loss or (0, 0.0)
            suffix = f"; mean of the last {count} iterations {mean:.4f}" if count > 1 else ""
            lines.append(f"  lm loss:     {loss:.4f} (the batch of iteration {iteration}{suffix})")
        for kind, found in self._validations.items():
            losses = [_Loss(iteration, loss) for iteration, loss in found.items()]
            best, last = min(losses, key=lambda each: each.loss), losses[-1]
            lines.append(
                f"  {kind + ':':12s} {last.loss:.4f} at iteration {last.iteration}"
                + (f", best {best.loss:.4f} at iteration {best.iteration}" if len(losses) > 1 else "")
            )
        outcome = "nothing (no --save)"
        if save_dir is not None:
            outcome = f"{len(saved)} checkpoint{'s' if len(saved) != 1 else ''} saved to {save_dir}"
            outcome += f", the last at iteration {saved[-1]}" if saved else ""
        lines.append(f"  saved:       {outcome}")
        if dashboard is not None:
            lines.append(f"  dashboard:   {dashboard}")
        return lines

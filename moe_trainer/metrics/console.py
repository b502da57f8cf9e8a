"""Log lines in Megatron-LM's format, and a progress bar on terminals.

Users parse these lines with grep and awk, so field order, widths and number formats are those of Megatron-LM (field
list: Megatron-LM training log). Everything here is pure formatting except `ProgressBar`, which writes to a terminal.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO


@dataclass(frozen=True)
class IterationLine:
    """Values of one iteration line. Fields that are None are left out of the line.

    Attributes:
        elapsed_ms: milliseconds per iteration.
        throughput: TFLOP/s per GPU.
        energy: joules per iteration and watts, of a GPU.
        learning_rate: of the next step.
        overload_factors: tokens of the fullest expert-parallel rank over the mean; mean and maximum over layers.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    learning_rate: float | None
    global_batch_size: int
    loss_scale: float
    skipped_iterations: int
    nan_iterations: int
    losses: Mapping[str, float] = field(default_factory=dict)
    skipped_samples: int = 0
    throughput: float | None = None
    energy: tuple[float, float] | None = None
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    overload_factors: tuple[float, float] | None = None

    def format(self, now: datetime.datetime) -> str:
        """Return the line, including the leading blank."""
        parts = [
            f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}]",
            f" iteration {self.iteration:8d}/{self.train_iters:8d} |",
            f" consumed samples: {self.consumed_samples:12d} |",
        ]
        if self.skipped_samples > 0:
            parts.append(f" skipped samples: {self.skipped_samples:12d} |")
        parts.append(f" elapsed time per iteration (ms): {self.elapsed_ms:.1f} |")
        if self.throughput is not None:
            parts.append(f" throughput per GPU (TFLOP/s/GPU): {self.throughput:.1f} |")
        if self.energy is not None:
            parts.append(
                f" energy per GPU (J/iter/GPU): {self.energy[0]:.1f} | power per GPU (W/GPU): {self.energy[1]:.1f} |"
            )
        if self.learning_rate is not None:
            parts.append(f" learning rate: {self.learning_rate:.6E} |")
        parts.append(f" global batch size: {self.global_batch_size:5d} |")
        # A negative mean is not printed, as in Megatron-LM; NaN is, because hiding it would be silent.
        parts.extend(f" {name}: {value:.6E} |" for name, value in self.losses.items() if not value < 0.0)
        parts.append(f" loss scale: {self.loss_scale:.1f} |")
        for name, value, spec in (
            ("grad norm", self.grad_norm, ".3f"),
            ("num zeros", self.num_zeros, ""),
            ("params norm", self.params_norm, ".3f"),
            ("max attention logit", self.max_attention_logit, ".3f"),
        ):
            if value is not None:
                parts.append(f" {name}: {value:{spec}} |")
        if self.overload_factors is not None:
            parts.append(" avg overload factor: {:.3f} | max overload factor: {:.3f} |".format(*self.overload_factors))
        parts.append(f" number of skipped iterations: {self.skipped_iterations:3d} |")
        parts.append(f" number of nan iterations: {self.nan_iterations:3d} |")
        return "".join(parts)


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss capped at 20 as in Megatron-LM."""
    return math.exp(min(20.0, loss))


def validation_line(where: str, losses: Mapping[str, float]) -> str:
    """Return the framed validation line; `where` is "iteration N" or "iteration N on validation set"."""
    text = f" validation loss at {where} | "
    for name, value in losses.items():
        text += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    frame = "-" * (len(text) + 1)
    return f"{frame}\n{text}\n{frame}"


def memory_line(
    rank: int,
    iteration: int,
    allocated: int,
    max_allocated: int,
    reserved: int,
    max_reserved: int,
    used: int | None = None,
) -> str:
    """Return Megatron-LM's device memory line. Amounts are in bytes, printed in MiB; `used` is of all processes."""
    names = ("allocated", "max allocated", "reserved", "max reserved", "total device memory used")
    amounts = (allocated, max_allocated, reserved, max_reserved, used)
    text = "".join(f" | {name}: {each / 2**20}" for name, each in zip(names, amounts) if each is not None)
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB){text}"


def arguments_block(settings: Mapping[str, object]) -> str:
    """Return the sorted settings, one per line, names padded with dots to 48 columns, between Megatron-LM's markers."""
    lines = ["------------------------ arguments ------------------------"]
    for name in sorted(settings, key=str.lower):
        dots = "." * (48 - len(name))
        lines.append(f"  {name} {dots} {settings[name]}")
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Return a time span as H:MM:SS, preceded by the days if there are any."""
    return str(datetime.timedelta(seconds=int(seconds)))


class ProgressBar:
    """One line at the bottom of a terminal: iterations done, speed, time left. Does nothing on other streams.

    Speed and time left follow an exponential moving average of the iteration times.
    """

    SMOOTHING = 0.2

    def __init__(self, total: int, stream: TextIO | None = None):
        self._total, self._stream, self._shown = total, stream or sys.stderr, False
        self._active = self._stream.isatty() and total > 0
        self._seconds: float | None = None

    def update(self, iteration: int, seconds: float, loss: float | None, tokens: int = 0) -> None:
        """Redraw the bar; `seconds` and `tokens` are of this iteration."""
        if not self._active:
            return
        self._seconds = seconds if self._seconds is None else self._seconds + self.SMOOTHING * (seconds - self._seconds)
        width = 24
        filled = int(width * iteration / self._total)
        text = f"[{'#' * filled}{'.' * (width - filled)}] {iteration}/{self._total}"
        text += f"  {self._seconds * 1e3:.0f} ms/it"
        if tokens:
            text += f"  {tokens / self._seconds:,.0f} tokens/s"
        text += f"  ETA {duration((self._total - iteration) * self._seconds)}"
        if loss is not None:
            text += f"  loss {loss:.4f}"
        self._stream.write("\r\x1b[2K" + text)
        self._stream.flush()
        self._shown = True

    def clear(self) -> None:
        """Erase the bar, so that a log line can be printed in its place."""
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._shown = False

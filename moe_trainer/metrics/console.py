"""Log lines in Megatron-LM's format.

Users parse these lines with grep and awk, so field order, widths and number formats are those of Megatron-LM (field
list: Megatron-LM training log). Everything here is pure formatting.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_trainer.metrics.iteration import IterationRecord


@dataclass(frozen=True)
class LoggedInterval:
    """The iterations since the last line.

    Attributes:
        elapsed_ms: milliseconds per iteration.
        losses: means.
        throughput: TFLOP/s per GPU.
        overload_factors: tokens of the fullest expert-parallel rank over the mean; mean and maximum over layers.
        skipped_iterations, nan_iterations: how many were.
        repeated_iterations: how many were, because a buffer of experts was too small.
    """

    elapsed_ms: float
    losses: Mapping[str, float]
    throughput: float | None = None
    overload_factors: tuple[float, float] | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    repeated_iterations: int = 0


def iteration_line(record: IterationRecord, now: datetime.datetime, train_iters: int, interval: LoggedInterval) -> str:
    """Return the line of an iteration, including the leading blank. Values that are None are left out.

    Args:
        record: of the iteration.
        now: time of the line.
        train_iters: iterations of the run.
        interval: that ends with it. The number of repeated iterations is left out if there is none.
    """
    parts = [
        f"[{now.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {record.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
    ]
    if record.skipped_samples > 0:
        parts.append(f"skipped samples: {record.skipped_samples:12d}")
    parts.append(f"elapsed time per iteration (ms): {interval.elapsed_ms:.1f}")
    if interval.throughput is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {interval.throughput:.1f}")
    if record.energy is not None:
        joules, watts = record.energy
        parts += [f"energy per GPU (J/iter/GPU): {joules:.1f}", f"power per GPU (W/GPU): {watts:.1f}"]
    parts.append(f"learning rate: {record.next_learning_rate:.6E}")
    parts.append(f"global batch size: {record.global_batch_size:5d}")
    # A negative mean is not printed, as in Megatron-LM; NaN is, because hiding it would be silent.
    parts += [f"{name}: {value:.6E}" for name, value in interval.losses.items() if not value < 0.0]
    parts.append(f"loss scale: {record.loss_scale:.1f}")
    for name, value, spec in (
        ("grad norm", record.step.grad_norm, ".3f"),
        ("num zeros", record.step.num_zeros, ""),
        ("params norm", record.params_norm, ".3f"),
        ("max attention logit", record.step.max_attention_logit, ".3f"),
    ):
        if value is not None:
            parts.append(f"{name}: {value:{spec}}")
    if interval.overload_factors is not None:
        mean, largest = interval.overload_factors
        parts += [f"avg overload factor: {mean:.3f}", f"max overload factor: {largest:.3f}"]
    parts.append(f"number of skipped iterations: {interval.skipped_iterations:3d}")
    parts.append(f"number of nan iterations: {interval.nan_iterations:3d}")
    if interval.repeated_iterations:
        parts.append(f"number of repeated iterations: {interval.repeated_iterations:3d}")
    return "".join(f" {part} |" for part in parts)


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss capped at 20 as in Megatron-LM."""
    return math.exp(min(20.0, loss))


def validation_line(where: str, losses: Mapping[str, float], set_name: str = "") -> str:
    """Return the framed validation line; `where` is "iteration N" or "iteration N on validation set".

    `set_name` tells several validation sets apart, as in Megatron-LM.
    """
    text = f" validation{f'-{set_name}' if set_name else ''} loss at {where} | "
    for name, value in losses.items():
        text += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    frame = "-" * (len(text) + 1)
    return f"{frame}\n{text}\n{frame}"


def task_line(iteration: int, figures: Sequence[tuple[str, str, float]]) -> str:
    """Return the line of benchmark tasks; a figure is task, metric and value."""
    text = " | ".join(f"{task} {metric}: {value:.4f}" for task, metric, value in figures)
    return f" tasks at iteration {iteration} | {text} | "


def memory_line(rank: int, iteration: int, *amounts: int | None) -> str:
    """Return Megatron-LM's device memory line.

    `amounts` are in bytes, in the order of the names below, printed in MiB; None is left out.
    """
    names = ("allocated", "max allocated", "reserved", "max reserved", "total device memory used")
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


def flops_rate(tflops: float) -> str:
    """Return TFLOP/s in the largest unit that leaves digits before the point, GFLOP/s on most CPUs."""
    for unit in ("TFLOP/s", "GFLOP/s"):
        if tflops >= 1:
            return f"{tflops:.3g} {unit}"
        tflops *= 1e3
    return f"{tflops:.3g} MFLOP/s"

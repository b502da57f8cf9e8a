"""Results of one iteration: of its training step, and with what the loop adds for the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_trainer.metrics.energy import Energy


@dataclass(frozen=True)
class StepResult:
    """Result of a training step.

    Attributes:
        losses: by the names of the log line.
        skipped: why the update was not made although it could have been.
        num_repeats: how often the iteration was repeated because an expert buffer or the paged stash was too small.
        loads: the table that metrics/routing_health.py describes, if enabled.
        between_ranks: tokens from each block of expert-parallel ranks (row) to each, if enabled.
        max_attention_logit: over all layers and ranks, if enabled.
    """

    losses: Mapping[str, float]
    updated: bool = False
    grad_norm: float | None = None
    num_zeros: int | None = None
    dropped_tokens: int = 0
    per_layer: Mapping[str, list[float]] = field(default_factory=dict)
    loads: Tensor | None = None
    between_ranks: Tensor | None = None
    skipped: str | None = None
    num_repeats: int = 0
    max_attention_logit: float | None = None

    @property
    def is_nan(self) -> bool:
        return any(not math.isfinite(value) for value in self.losses.values())


@dataclass(frozen=True)
class IterationRecord:
    """Values of one iteration.

    Attributes:
        learning_rate: of this step.
        next_learning_rate: of the next step.
        skipped: whether the weights were not updated, in a run that trains them.
        flops: model FLOPs of the global batch.
        max_memory_mb: MiB; device memory on CUDA, resident set on CPU.
        compute_times: result of straggler detection, by the names of metrics.jsonl, in milliseconds.
        packing: fill and imbalance of packed microbatches (data/packing.py: PackingSummary).
        rejected: the iterations skipped for their results so far (resilience/rejection.py).
    """

    step: StepResult
    iteration: int
    consumed_samples: int
    learning_rate: float
    next_learning_rate: float
    loss_scale: float
    global_batch_size: int
    skipped: bool
    elapsed_s: float
    tokens: int
    flops: float
    max_memory_mb: float
    skipped_samples: int = 0
    params_norm: float | None = None
    compute_times: Mapping[str, Any] | None = None
    energy: Energy | None = None
    rejected: Sequence[Mapping[str, Any]] = ()
    packing: Mapping[str, float] | None = None

"""Rules that reject the result of an iteration, their history, and the report that a stopped run leaves on disk.

A loss or gradient norm that is not finite is rejected, and:

* --check-for-spiky-loss: a loss ten times the largest of the first hundred, or with --loss-spike-factor X, X times the
  median of the last hundred. Megatron-LM (megatron/core/rerun_state_machine.py, is_unexpectedly_large) tests every
  microbatch of a rank; here it is the mean of the iteration, which no parallel layout changes.
* --check-for-large-grads: a gradient norm, before clipping, ten times the largest of the first hundred. Megatron-LM
  tests every bucket.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import atomic_write
from moe_trainer.parallel.rng import name_seed

HISTORY_LENGTH = 100  # accepted iterations that a rule needs before it rejects one
SPIKE_FACTOR = 10.0
MAX_CONSECUTIVE_SKIPS = 10  # good batches follow a bad one; if ten iterations in a row fail, the data are not the cause
# Relative difference allowed between reruns: on a GPU, attention and scatter backward sum in varying order.
TOLERANCE = 1e-3


class ResultRejectedError(FloatingPointError):
    """The result of an iteration was rejected and the run stops. Raised on all ranks with the same message."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RejectionRules:
    """Which rules apply. `spike_factor` is a limit over the running median, None for Megatron-LM's rule."""

    finite: bool
    spikes: bool
    large_grads: bool
    spike_factor: float | None = None

    @property
    def any(self) -> bool:
        return self.finite or self.spikes or self.large_grads


@dataclass(frozen=True)
class RejectionReason:
    """Why a result is rejected; `kind` is "nan" or "spike"."""

    kind: str
    text: str


_SAVED_NAMES = MappingProxyType({"consecutive_skips": "in_a_row"})  # fields whose name in a checkpoint is another one


@dataclass
class LossHistory:
    """Losses and gradient norms of accepted iterations, and the skipped iterations. Checkpoints save it.

    Attributes:
        losses: number of losses in `largest_loss`.
        norms: number of gradient norms in `largest_norm`.
        recent: the last losses, for the median.
        skipped: for every skipped iteration {"iteration", "samples": consumed before and after it, "because"}.
        consecutive_skips: number of skipped iterations since the last accepted one.
    """

    losses: int = 0
    largest_loss: float = 0.0
    norms: int = 0
    largest_norm: float = 0.0
    recent: list[float] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    consecutive_skips: int = 0

    @staticmethod
    def from_dict(saved: dict[str, Any] | None) -> LossHistory:
        """Return the history that `as_dict` saved; a new one if nothing was saved.

        Raises:
            ValueError: if `saved` is anything else.
        """
        if not saved:
            return LossHistory()
        problem = "the history of losses and skipped iterations in the checkpoint has an unknown format"
        defaults = {_SAVED_NAMES.get(name, name): value for name, value in asdict(LossHistory()).items()}
        if not isinstance(saved, dict) or any(
            name not in defaults or type(value) not in (type(defaults[name]), int) for name, value in saved.items()
        ):
            raise ValueError(problem)
        fields = {saved_name: name for name, saved_name in _SAVED_NAMES.items()}
        history = LossHistory(**{fields.get(name, name): value for name, value in saved.items()})
        if not all(isinstance(loss, (int, float)) for loss in history.recent) or not all(
            isinstance(entry, dict) for entry in history.skipped
        ):
            raise ValueError(problem)
        return history

    def as_dict(self) -> dict[str, Any]:
        """Return the values to save in a checkpoint; empty if there is nothing to save."""
        if self == LossHistory():
            return {}
        return {_SAVED_NAMES.get(name, name): value for name, value in asdict(self).items()}

    def judge_loss(self, loss: float, rules: RejectionRules) -> RejectionReason | None:
        """Return why the loss of an iteration is rejected, None if it is accepted."""
        if not math.isfinite(loss):
            return RejectionReason("nan", f"the loss is {loss}") if rules.finite else None
        if not rules.spikes:
            return None
        if rules.spike_factor is not None:
            center = statistics.median(self.recent) if len(self.recent) == HISTORY_LENGTH else math.inf
            if loss > rules.spike_factor * center:
                limit = f"more than {rules.spike_factor:g} times the median {center:.6g} of the last {HISTORY_LENGTH}"
                return RejectionReason("spike", f"the loss {loss:.6g} is {limit}")
        elif self.losses >= HISTORY_LENGTH and abs(loss) >= SPIKE_FACTOR * self.largest_loss:
            return _compare_with_first("loss", loss, self.largest_loss)
        return None

    def judge_norm(self, norm: float, rules: RejectionRules) -> RejectionReason | None:
        """Return why the gradient norm of an iteration is rejected, None if it is accepted."""
        if not math.isfinite(norm):
            return RejectionReason("nan", f"the gradient norm is {norm}") if rules.finite else None
        if rules.large_grads and self.norms >= HISTORY_LENGTH and norm >= SPIKE_FACTOR * self.largest_norm:
            return _compare_with_first("gradient norm", norm, self.largest_norm)
        return None

    def update(self, loss: float, norm: float, rules: RejectionRules) -> None:
        """Add an accepted iteration."""
        self.consecutive_skips = 0
        if rules.spikes and rules.spike_factor is not None and math.isfinite(loss):
            self.recent = [*self.recent[1 - HISTORY_LENGTH :], loss]
        elif rules.spikes and self.losses < HISTORY_LENGTH and math.isfinite(loss):
            self.losses, self.largest_loss = self.losses + 1, max(self.largest_loss, abs(loss))
        if rules.large_grads and self.norms < HISTORY_LENGTH and math.isfinite(norm):
            self.norms, self.largest_norm = self.norms + 1, max(self.largest_norm, norm)

    def skip(self, iteration: int, before: int, after: int, because: str) -> None:
        """Add a skipped iteration, with the samples consumed `before` and `after` it."""
        self.consecutive_skips += 1
        self.skipped.append({"iteration": iteration, "samples": [before, after], "because": because})


def _compare_with_first(name: str, value: float, largest: float) -> RejectionReason:
    limit = f"{SPIKE_FACTOR:g} times the largest of the first {HISTORY_LENGTH} ({largest:.6g}) or more"
    return RejectionReason("spike", f"the {name} {value:.6g} is {limit}")


@dataclass
class RerunStatistics:
    """Relative differences between reruns of an iteration (--rerun-mode report_stats)."""

    repeats: int = 0
    identical: int = 0
    loss: float = 0.0
    norm: float = 0.0

    def add(self, losses: tuple[float, float], norms: tuple[float, float]) -> None:
        """Add the two losses and the two gradient norms of an iteration."""
        self.repeats += 1
        self.identical += same_bits(*losses) and same_bits(*norms)
        self.loss, self.norm = max(self.loss, difference(*losses)), max(self.norm, difference(*norms))

    @property
    def text(self) -> str:
        return (
            f"repeated iterations: {self.repeats}, with identical loss and gradient norm: {self.identical}; "
            f"largest relative difference of the loss {self.loss:.3g}, of the gradient norm {self.norm:.3g}"
        )


def same_bits(a: float, b: float) -> bool:
    """Return whether two results are equal. All NaNs are equal."""
    return a == b or (math.isnan(a) and math.isnan(b))


def difference(a: float, b: float) -> float:
    """Return the relative difference; infinite between a finite number and one that is not."""
    if same_bits(a, b):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def pick_injected_rank(rate: int, seed: int, iteration: int, candidates: int) -> int | None:
    """Return which candidate gets a wrong result (--error-injection-rate), or None. Equal on every rank.

    A hash chooses one iteration in `rate`, so that no random generator advances.
    """
    if rate <= 0 or name_seed(seed, "injected error", iteration) % rate:
        return None
    return name_seed(seed, "rank of the injected error", iteration) % candidates


@dataclass(frozen=True)
class PendingFaultReport:
    """A result that was rejected twice on the same nodes, saved in a file until other nodes have computed it.

    `place` is where the first non-finite value occurred, `devices` the "host device" of every rank.
    """

    iteration: int
    because: str
    place: str
    devices: list[str]

    @staticmethod
    def read(folder: str) -> PendingFaultReport | None:
        """Read the report of a directory; None if there is none.

        Raises:
            ValueError: if the file is damaged.
        """
        path = _report_file(folder)
        if not path.is_file():
            return None
        try:
            report = PendingFaultReport(**json.loads(path.read_text()))
            if (
                type(report.iteration) is not int
                or not isinstance(report.devices, list)
                or not all(isinstance(text, str) for text in (report.because, report.place, *report.devices))
            ):
                raise ValueError("its values have the wrong types")
            return report
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"cannot read {path} ({error}); delete it to continue without a comparison with the earlier result"
            ) from error

    def write(self, folder: str) -> None:
        path = _report_file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def clear(folder: str) -> None:
        _report_file(folder).unlink(missing_ok=True)


def _report_file(folder: str) -> Path:
    return Path(folder) / "rejected_result.json"


def track(path: str, iteration: int, rank: int, device: str, status: str, text: str) -> None:
    """Append a line with Megatron-LM's fields to --result-rejected-tracker-filename.

    Raises:
        OSError: if it cannot be written.
    """
    host, _, number = device.partition(" ")
    line = (
        f"ts={datetime.datetime.now()} node={host} device={number or 'cpu'} "
        f"jobID={os.environ.get('SLURM_JOBID', 'N/A')} rank={rank} iteration={iteration} status={status} "
        f"result={text!r} message='{status.replace('_', ' ')}'\n"
    )
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)

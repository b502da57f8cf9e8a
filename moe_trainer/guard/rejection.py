"""What is not acceptable in an iteration's result, what has been skipped for it, and what a run that stops for it leaves behind.

Rules. A loss or gradient norm that is not finite. --check-for-spiky-loss: a loss ten times the largest of the first hundred
(Megatron-LM's rule: megatron/core/rerun_state_machine.py, is_unexpectedly_large, with the factor 10 and 100 samples of pretrain_gpt.py;
it takes every microbatch of a rank by itself, here it is the mean of the iteration, which no mapping changes), or, with
--loss-spike-factor X, X times the median of the last hundred. --check-for-large-grads: the same ten times for the norm of all gradients
before clipping (Megatron-LM: of every bucket of a rank). Only iterations that were applied are learned from.

Exit codes are Megatron-LM's: 16, resume elsewhere to tell; 17, the result is wrong, or the machine is.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_trainer.exit_codes import ExitCode
from moe_trainer.parallel.rng import name_seed

LEARNED = 100  # iterations that a rule learns from before it judges
LARGE = 10.0
MOST_IN_A_ROW = 10  # a bad batch is followed by good ones: where ten in a row fail it is not the data, and no skipping helps
TOLERANCE = 1e-3  # of a repeated value: sums in the backward of attention and of scattered rows may come in another order on a GPU


class ResultRejected(FloatingPointError):
    """The result of an iteration was rejected and the run stops: on all ranks, which all say the same. exit_code: of the process."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Rules:
    """What is looked for. spike_factor: over the running median, None for Megatron-LM's rule."""

    finite: bool
    spikes: bool
    large_grads: bool
    spike_factor: float | None = None

    @property
    def any(self) -> bool:
        return self.finite or self.spikes or self.large_grads


@dataclass(frozen=True)
class Reason:
    """Why a result is rejected. kind: "nan" or "spike"."""

    kind: str
    text: str


@dataclass
class History:
    """What the rules have learned and what was skipped; plain values, which a checkpoint carries from one run to the next.

    skipped: of every skipped iteration {"iteration", "samples": consumed before and after it, "because"}. in_a_row: how many of them
    end at this moment.
    """

    losses: int = 0
    largest_loss: float = 0.0
    norms: int = 0
    largest_norm: float = 0.0
    recent: list[float] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    in_a_row: int = 0

    @staticmethod
    def of(saved: dict[str, Any] | None) -> History:
        """From what as_dict gave; a new one from nothing.

        Raises: ValueError when it is something else.
        """
        if not saved:
            return History()
        usual = asdict(History())
        if not isinstance(saved, dict) or any(name not in usual or type(value) not in (type(usual[name]), int) for name, value in saved.items()):
            raise ValueError("the history of losses and skipped iterations in the checkpoint is not of this program's form")
        found = History(**saved)
        if not all(isinstance(one, (int, float)) for one in found.recent) or not all(isinstance(one, dict) for one in found.skipped):
            raise ValueError("the history of losses and skipped iterations in the checkpoint is not of this program's form")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For a checkpoint; empty when there is nothing to keep."""
        return asdict(self) if self != History() else {}

    def judge_loss(self, loss: float, rules: Rules) -> Reason | None:
        """Is there something wrong with an iteration's loss?"""
        if not math.isfinite(loss):
            return Reason("nan", f"the loss is {loss}") if rules.finite else None
        if not rules.spikes:
            return None
        if rules.spike_factor is not None:
            usual = statistics.median(self.recent) if len(self.recent) == LEARNED else math.inf
            if loss > rules.spike_factor * usual:
                return Reason("spike", f"the loss {loss:.6g} is more than {rules.spike_factor:g} times the median {usual:.6g} of the last {LEARNED}")
            return None
        if self.losses >= LEARNED and abs(loss) >= LARGE * self.largest_loss:
            return Reason("spike", f"the loss {loss:.6g} is {LARGE:g} times the largest of the first {LEARNED} ({self.largest_loss:.6g}) or more")
        return None

    def judge_norm(self, norm: float, rules: Rules) -> Reason | None:
        """Is there something wrong with an iteration's gradient norm?"""
        if not math.isfinite(norm):
            return Reason("nan", f"the gradient norm is {norm}") if rules.finite else None
        if rules.large_grads and self.norms >= LEARNED and norm >= LARGE * self.largest_norm:
            return Reason("spike", f"the gradient norm {norm:.6g} is {LARGE:g} times the largest of the first {LEARNED} ({self.largest_norm:.6g}) or more")
        return None

    def learn(self, loss: float, norm: float, rules: Rules) -> None:
        """An iteration was applied."""
        self.in_a_row = 0
        if rules.spikes and rules.spike_factor is not None and math.isfinite(loss):
            self.recent = [*self.recent[1 - LEARNED:], loss]
        elif rules.spikes and self.losses < LEARNED and math.isfinite(loss):
            self.losses, self.largest_loss = self.losses + 1, max(self.largest_loss, abs(loss))
        if rules.large_grads and self.norms < LEARNED and math.isfinite(norm):
            self.norms, self.largest_norm = self.norms + 1, max(self.largest_norm, norm)

    def skip(self, iteration: int, before: int, after: int, because: str) -> None:
        """An iteration was not applied. before, after: consumed samples."""
        self.in_a_row += 1
        self.skipped.append({"iteration": iteration, "samples": [before, after], "because": because})


@dataclass
class Spread:
    """--rerun-mode report_stats: how far repeated evaluations of an iteration lie apart, relative to their size."""

    repeats: int = 0
    identical: int = 0
    loss: float = 0.0
    norm: float = 0.0

    def add(self, losses: tuple[float, float], norms: tuple[float, float]) -> None:
        """The two losses and the two gradient norms of an iteration."""
        self.repeats += 1
        self.identical += same_bits(*losses) and same_bits(*norms)
        self.loss, self.norm = max(self.loss, difference(*losses)), max(self.norm, difference(*norms))

    @property
    def text(self) -> str:
        return (f"repeated iterations: {self.repeats}, with identical loss and gradient norm: {self.identical}; largest relative "
                f"difference of the loss {self.loss:.3g}, of the gradient norm {self.norm:.3g}")


def same_bits(a: float, b: float) -> bool:
    """Are two results the same? Every NaN is the same."""
    return a == b or (math.isnan(a) and math.isnan(b))


def difference(a: float, b: float) -> float:
    """Relative difference; infinite between a finite number and one that is not."""
    if same_bits(a, b):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def wrong_rank(rate: int, seed: int, iteration: int, candidates: int) -> int | None:
    """--error-injection-rate: which of the candidates has a wrong result in this iteration; None: nobody. The same on every rank.

    rate: one iteration in so many, chosen by a hash: no stream of random numbers moves.
    """
    if rate <= 0 or name_seed(seed, "injected error", iteration) % rate:
        return None
    return name_seed(seed, "rank of the injected error", iteration) % candidates


@dataclass(frozen=True)
class Suspicion:
    """A result that came out twice on the same machines: kept in a file until other machines have computed it.

    devices: of every rank "host device".
    """

    iteration: int
    because: str
    place: str
    devices: list[str]

    @staticmethod
    def read(folder: str) -> Suspicion | None:
        """Raises: ValueError when the file is damaged."""
        path = _suspicion_file(folder)
        if not path.is_file():
            return None
        try:
            found = Suspicion(**json.loads(path.read_text()))
            if type(found.iteration) is not int or not isinstance(found.devices, list) or not all(isinstance(one, str) for one in (found.because, found.place, *found.devices)):
                raise ValueError("its values are not of the types that are written")
            return found
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read ({error}); delete it, and nothing is compared with the earlier result") from error

    def write(self, folder: str) -> None:
        """Replace the file as a whole."""
        path = _suspicion_file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1) + "\n")
        new.replace(path)

    @staticmethod
    def clear(folder: str) -> None:
        """The question is settled."""
        _suspicion_file(folder).unlink(missing_ok=True)


def _suspicion_file(folder: str) -> Path:
    return Path(folder) / "rejected_result.json"


def track(path: str, iteration: int, rank: int, device: str, status: str, text: str) -> None:
    """Add a line to --result-rejected-tracker-filename, with the fields that Megatron-LM's lines have.

    Raises: OSError when it cannot be written.
    """
    host, _, number = device.partition(" ")
    line = (f"ts={datetime.datetime.now()} node={host} device={number or 'cpu'} jobID={os.environ.get('SLURM_JOBID', 'N/A')} rank={rank} "
            f"iteration={iteration} status={status} result={text!r} message='{status.replace('_', ' ')}'\n")
    with open(path, "a", encoding="utf-8") as file:
        file.write(line)

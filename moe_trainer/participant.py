"""What a feature of the model does in a training iteration besides forward and backward.

The training loop calls participants and knows none of them; the model collects its own (model/participants.py). All
ranks have the same participants in the same order, so their methods may communicate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


@dataclass(frozen=True)
class StepMetrics:
    """What participants report at the end of an iteration, equal on all ranks except `row_factors`.

    Attributes:
        losses: numbers of the log line and metrics.jsonl by name, in their order; a run can stop if one is not finite.
        details: further fields of the result of the step (metrics/iteration.py) by name.
        row_factors: on the rows of local parameters, which the optimizer applies after the update.
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    row_factors: Mapping[Parameter, Tensor] = field(default_factory=dict)


class Participant:
    """A feature that counts something in an iteration or changes at its end; the methods here do nothing.

    Every evaluation of an iteration: begin_step, forward and backward, last_stage_sums, reduced_sums. Then `end_step`
    if its result is accepted, or `discard` if it is rejected or repeated.
    """

    def begin_step(self, iteration: int) -> None:
        """Reset what is counted, before the first microbatch; `iteration` counts from 0."""

    def passes(self, num_microbatches: int) -> AbstractContextManager[None]:
        """Return the scope of the passes of these microbatches, in training and evaluation."""
        return nullcontext()

    def last_stage_sums(self) -> Tensor | None:
        """Return sums of the last pipeline stage, which are reduced in one message with the loss.

        fp64 on the device, of the same length on all stages and zero on all but the last.
        """
        return None

    def reduced_sums(self) -> Tensor | None:
        """Return sums over all ranks, fp64 on the device, which the host reads together with the loss. Collective."""
        return None

    def end_step(self, sums: Sequence[float], num_microbatches: int) -> StepMetrics:
        """Update what changes once per iteration, before the optimizer's step, and report. Collective.

        Args:
            sums: its last_stage_sums, reduced, then its reduced_sums.
            num_microbatches: of the iteration.
        """
        return StepMetrics()

    def discard(self) -> None:
        """Forget what was counted."""

    def close(self) -> None:
        """Release what libraries hold, before the process groups are destroyed."""


class MeanStatistic(nn.Module):
    """A number that a module adds up in its passes; its mean is reported under `name` with the losses.

    A module that has one as its child has registered it; the model collects all of them. Modules that share a name
    share the mean.
    """

    sums: Tensor

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def add(self, total: Tensor, count: float = 1.0) -> None:
        """Add a sum of `count` values, on the device."""
        self.sums[0] += total.detach()
        self.sums[1] += count


class Participants:
    """All participants of a model, in the order in which they communicate and report."""

    def __init__(self, participants: Iterable[Participant]):
        self._all = tuple(participants)

    def begin_step(self, iteration: int) -> None:
        """Begin an evaluation of the iteration, counted from 0."""
        for each in self._all:
            each.begin_step(iteration)

    @contextmanager
    def passes(self, num_microbatches: int) -> Iterator[None]:
        """Enter the scopes of all participants."""
        with ExitStack() as stack:
            for each in self._all:
                stack.enter_context(each.passes(num_microbatches))
            yield

    def last_stage_sums(self) -> dict[int, Tensor]:
        """Return the last stage's sums by the position of the participant."""
        found = ((index, each.last_stage_sums()) for index, each in enumerate(self._all))
        return {index: sums for index, sums in found if sums is not None}

    def reduced_sums(self) -> dict[int, Tensor]:
        """Return the reduced sums by the position of the participant. Collective."""
        found = ((index, each.reduced_sums()) for index, each in enumerate(self._all))
        return {index: sums for index, sums in found if sums is not None}

    def end_step(self, sums: Mapping[int, Sequence[float]], num_microbatches: int) -> StepMetrics:
        """End the iteration; `sums` are by the position of the participant. Collective."""
        losses: dict[str, float] = {}
        details: dict[str, Any] = {}
        row_factors: dict[Parameter, Tensor] = {}
        for index, each in enumerate(self._all):
            metrics = each.end_step(sums.get(index, ()), num_microbatches)
            losses.update(metrics.losses)
            details.update(metrics.details)
            row_factors.update(metrics.row_factors)
        return StepMetrics(losses, details, row_factors)

    def discard(self) -> None:
        """Forget what was counted in an iteration that is repeated or skipped."""
        for each in self._all:
            each.discard()

    def close(self) -> None:
        """Release what libraries hold."""
        for each in self._all:
            each.close()

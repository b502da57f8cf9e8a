"""Validate the loss and gradient norm of an iteration, and rerun rejected iterations.

Runs after the gradient reduction and before the optimizer step: the weights are unchanged, and router statistics and
delayed scales are not updated yet, so an evaluation can be discarded or repeated. A rank that rejects its loss adds NaN
to the sum of the gradient norm, which has the same bits on all ranks: either all ranks rerun or none, without another
collective.

docs/design/rerun.md describes the decisions of --rerun-mode and the exit codes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from arguments import Arguments
from moe_trainer.checkpoint.random_state import capture, get_streams, restore
from moe_trainer.data.loader import Batch
from moe_trainer.errors import as_user_error
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.exit_codes import ExitCode
from moe_trainer.metrics.run_findings import unusual_learning_rate
from moe_trainer.parallel import collectives
from moe_trainer.parallel.coordination import gather_errors, run_on_rank0
from moe_trainer.resilience.rejection import (
    MAX_CONSECUTIVE_SKIPS,
    TOLERANCE,
    PendingFaultReport,
    RejectionReason,
    RejectionRules,
    ResultRejectedError,
    difference,
    pick_injected_rank,
    track,
)
from moe_trainer.resilience.rewindable import RewindableIterator
from moe_trainer.training.fault_localization import device_name, global_name, locate_nonfinite
from moe_trainer.training.run import BaseRun, TrainRun, TrainState, with_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepEvaluation:
    """Result of forward, backward and gradient reduction of one iteration.

    Attributes:
        sums: per microbatch of this rank, as run_microbatches returns them.
        loss: mean over all ranks.
        norm: of all gradients, before clipping.
        sums_of_participants: what Participants.end_step takes.
        overflowed: tokens were lost because a buffer was too small. The evaluation must be discarded; its norm is NaN.
        has_grown_budgets: a receive buffer has grown, on any rank if ranks must agree on their sizes.
    """

    sums: list[Tensor]
    loss: float
    tokens: float
    norm: float
    sums_of_participants: Mapping[int, Sequence[float]] = field(default_factory=dict)
    overflowed: bool = False
    has_grown_budgets: bool = False


Outcome = tuple[StepEvaluation, str | None]
"""Accepted evaluation, and why its update is not made; None if it is made."""


def rejection_rules(args: Arguments) -> RejectionRules:
    """Return the rejection rules that the flags enable."""
    training = args.training
    return RejectionRules(
        training.check_for_nan_in_loss_and_grad,
        training.check_for_spiky_loss,
        training.check_for_large_grads,
        training.loss_spike_factor,
    )


def with_rewindable_batches(run: TrainRun) -> TrainRun:
    """Make the training batches rewindable if an iteration may have to be rerun.

    Collective with --moe-expert-rank-capacity-factor: ranks agree whether any of them may lose tokens.
    """
    mode = run.args.training.rerun_mode
    repeats = mode != "disabled" and (mode != "validate_results" or rejection_rules(run.args).any)
    if run.buffers.allow_lost_tokens() or repeats:
        return with_batches(run, make_rewindable_iterator(run))
    return run


def make_rewindable_iterator(run: BaseRun) -> RewindableIterator[Batch]:
    """Wrap the training batches and the random generators so that they can return to the start of an iteration."""
    streams = get_streams(run.chunks)
    return RewindableIterator(run.train_batches, partial(capture, streams), partial(restore, streams=streams))


def snapshot_iteration_start(run: BaseRun) -> None:
    """Snapshot the batch position and the random state at the start of an iteration."""
    if isinstance(run.train_batches, RewindableIterator):
        run.train_batches.begin()


def inject_error(run: TrainRun, state: TrainState, sums: list[Tensor], repeated: bool) -> list[Tensor]:
    """Return the sums, one of them NaN if --error-injection-rate selects this rank now.

    `repeated`: this is not the first evaluation of the iteration.
    """
    training, ps = run.args.training, run.ps
    if not training.error_injection_rate or not sums:
        return sums
    chosen = pick_injected_rank(
        training.error_injection_rate, training.seed, state.iteration + 1, ps.dp_cp.size * ps.tp.size
    )
    kind, noted = training.error_injection_type, state.pending_fault_report
    over = (kind == "transient_error" and repeated) or (
        kind == "persistent_error"
        and noted is not None
        and noted.iteration == state.iteration + 1
        and device_name(run) not in noted.devices
    )
    if chosen != ps.dp_cp.rank * ps.tp.size + ps.tp.rank or over:
        return sums
    logger.warning(
        "iteration %d: injecting a %s on rank %d (--error-injection-rate)",
        state.iteration + 1,
        kind.replace("_", " "),
        ps.world.rank,
    )
    return [sums[0] * math.nan, *sums[1:]]


def validate_result(
    run: TrainRun, state: TrainState, first: StepEvaluation, rerun: Callable[[bool], StepEvaluation]
) -> Outcome:
    """Decide whether the result of an iteration is accepted.

    `rerun` evaluates the iteration again from its start; its argument disables CUDA graphs.

    Raises:
        ResultRejectedError: on all ranks, with the same message.

    Communication: none for a result that all ranks accept. Collective otherwise.
    """
    rules, mode = rejection_rules(run.args), run.args.training.rerun_mode
    logs = (state.iteration + 1) % run.args.output.log_interval == 0
    if not rules.any:
        return (_add_rerun(state, first, rerun(False)) if mode == "report_stats" and logs else first), None
    if math.isfinite(first.norm) and state.history.judge_norm(first.norm, rules) is None:
        _resolve_fault_report(run, state)
        if mode == "report_stats" and logs:
            first = _add_rerun(state, first, rerun(False))
        return _accepted(state, first, rules)
    return _RejectionHandler(run, state, rules, rerun).decide(first)


def _accepted(state: TrainState, evaluation: StepEvaluation, rules: RejectionRules) -> Outcome:
    state.history.update(evaluation.loss, evaluation.norm, rules)
    return evaluation, None


def _add_rerun(state: TrainState, first: StepEvaluation, second: StepEvaluation) -> StepEvaluation:
    """Add two evaluations to the statistics and return the second."""
    state.rerun_statistics.add((first.loss, second.loss), (first.norm, second.norm))
    logger.info("--rerun-mode report_stats: %s", state.rerun_statistics.text)
    return second


def rewind(run: TrainRun) -> None:
    """Undo the effects of forward and backward, except the gradients, which the next evaluation overwrites."""
    assert isinstance(run.train_batches, RewindableIterator)  # as whatever calls this for has requested
    run.participants.discard()
    run.train_batches.rewind()


def load_pending_fault_report(run: BaseRun, state: TrainState) -> None:
    """Load the fault report that an earlier run left in the save folder. Collective if there can be one."""
    folder = run.args.output.save
    if folder is None or run.args.training.rerun_mode != "validate_results":
        return
    with as_user_error("--save"):
        state.pending_fault_report = run_on_rank0(lambda: PendingFaultReport.read(folder), run.ps.world)


def _resolve_fault_report(run: TrainRun, state: TrainState) -> None:
    """Resolve the fault report of an earlier run if it was about this iteration, which was accepted here."""
    noted, number = state.pending_fault_report, state.iteration + 1
    if noted is None or number < noted.iteration:
        return
    state.pending_fault_report = None
    if number == noted.iteration:
        text = (
            f"iteration {number} is accepted here and was rejected twice on {_join_devices(noted.devices)} "
            f"({noted.because}; {noted.place}): that machine produces incorrect results"
        )
        if run.ps.world.rank == 0:
            logger.warning("%s", text)
        _track(run, number, "second_rerun_not_reproducible", text)
    if run.ps.world.rank == 0 and run.args.output.save is not None:
        PendingFaultReport.clear(run.args.output.save)


class _RejectionHandler:
    """State machine for one rejected result."""

    def __init__(
        self, run: TrainRun, state: TrainState, rules: RejectionRules, rerun: Callable[[bool], StepEvaluation]
    ):
        self.run, self.state, self.rules, self.rerun = run, state, rules, rerun
        self.number = state.iteration + 1

    def decide(self, first: StepEvaluation) -> Outcome:
        """Decide about a result that a rank rejects, or whose gradients overflow under a dynamic loss scale."""
        first, reason = self._find_reason(first)
        if reason is None:
            return first, None
        if self.run.args.training.rerun_mode != "validate_results":
            return self._apply_policy(first, reason, "")
        _track(self.run, self.number, "initial_run", reason.text)
        self._log_rank0(f"iteration {self.number}: {reason.text}; rerunning the iteration")
        before = self._copy_results(first)
        second, repeated = self._find_reason(self.rerun(False))
        if repeated is None:
            self._log_transient_fault(reason, self._describe_differences(before, second))
            _resolve_fault_report(self.run, self.state)
            return _accepted(self.state, second, self.rules)
        if not self._is_reproduced(reason, repeated, first, second):
            text = (
                f"iteration {self.number}: {reason.text}; on rerun, {repeated.text}: not reproducible, "
                f"so the cause is neither the model nor the data. {self._describe_differences(before, second)}"
            )
            _track(self.run, self.number, "first_rerun_not_reproducible", text)
            raise ResultRejectedError(text, ExitCode.RESULT_NOT_VALID)
        _track(self.run, self.number, "first_rerun_reproducible", reason.text)
        where = locate_nonfinite(self.run, self.state, lambda: self.rerun(True).sums) if reason.kind == "nan" else ""
        return self._apply_policy(second, reason, where)

    def _find_reason(self, evaluation: StepEvaluation) -> tuple[StepEvaluation, RejectionReason | None]:
        """Return the evaluation with its true norm, and the reason of the first rank that rejects it. Collective."""
        evaluation = replace(evaluation, norm=self.run.optimizer.grad_norm())
        history = self.state.history
        mine = history.judge_loss(evaluation.loss, self.rules) or history.judge_norm(evaluation.norm, self.rules)
        return evaluation, next(iter(gather_errors(mine, self.run.ps.world)), None)

    def _is_reproduced(
        self, reason: RejectionReason, repeated: RejectionReason, first: StepEvaluation, second: StepEvaluation
    ) -> bool:
        """Return whether all ranks got the same result twice. Collective."""
        largest = max(difference(first.loss, second.loss), difference(first.norm, second.norm))
        alike = reason.kind == repeated.kind and largest <= TOLERANCE
        return all(collectives.all_gather_object(alike, self.run.ps.world))

    def _copy_results(self, evaluation: StepEvaluation) -> list[tuple[str, Tensor]]:
        """Return copies of this rank's own results, in the order in which they were computed."""
        named_copies = [
            (f"buffers of {global_name(chunk, path)}", buffer.clone())
            for chunk in self.run.chunks
            for path, buffer in chunk.named_buffers()
        ]
        named_copies += [
            (f"the loss of microbatch {index}", pair[0].clone()) for index, pair in enumerate(evaluation.sums, start=1)
        ]
        squares = [view.float().square().sum() for _, view in self.run.grads.owned_views() if view.numel()]
        return [
            *named_copies,
            ("gradients after their reduction", torch.stack(squares).sum() if squares else torch.zeros(())),
        ]

    def _describe_differences(self, before: list[tuple[str, Tensor]], second: StepEvaluation) -> str:
        """Describe which ranks got another result, and where it differs first. Collective."""
        now = self._copy_results(second)
        mine = next(
            (
                name
                for (name, old), (_, new) in zip(before, now, strict=True)
                if not torch.allclose(old, new, rtol=TOLERANCE, atol=0.0, equal_nan=True)
            ),
            None,
        )
        world = self.run.ps.world
        differing = gather_errors(
            None if mine is None else f"rank {world.rank} ({device_name(self.run)}) first in {mine}", world
        )
        if not differing:
            return "No rank's own losses, buffers or gradients differ: the reduction of the loss differs"
        return (
            f"Results differ on {'; '.join(differing)} (gradients are reduced over ranks; losses and buffers are local)"
        )

    def _log_transient_fault(self, reason: RejectionReason, where: str) -> None:
        text = f"iteration {self.number}: {reason.text}; not reproduced on rerun: transient hardware fault. {where}"
        self._log_rank0(f"{text}. Training continues with the rerun's result")
        _track(self.run, self.number, "first_rerun_not_reproducible", text)

    def _apply_policy(self, evaluation: StepEvaluation, reason: RejectionReason, where: str) -> Outcome:
        """Apply --on-nan or --on-loss-spike to a result that is taken to be reproducible."""
        training, state = self.run.args.training, self.state
        action = training.on_nan if reason.kind == "nan" else training.on_loss_spike
        text = f"iteration {self.number}: {reason.text}" + (f"; first place: {where}" if where else "")
        if action == "report":
            self._log_rank0(f"{text}; the update is made (--on-loss-spike report)")
            return _accepted(state, evaluation, self.rules)
        if action == "skip" and state.history.consecutive_skips + 1 < MAX_CONSECUTIVE_SKIPS:
            self._log_rank0(f"{text}; the update is skipped")
            return evaluation, reason.text
        if action == "skip":
            raise ResultRejectedError(
                f"{text}. {MAX_CONSECUTIVE_SKIPS} consecutive iterations were rejected, so this is not a single bad "
                f"batch; {describe_stop(self.run, state)}",
                ExitCode.FAILED,
            )
        self._stop(text, reason, where)

    def _stop(self, text: str, reason: RejectionReason, where: str) -> NoReturn:
        run, noted = self.run, self.state.pending_fault_report
        last = describe_stop(run, self.state)
        if run.args.training.rerun_mode != "validate_results":
            advice = " --no-check-for-nan-in-loss-and-grad disables this check" if reason.kind == "nan" else ""
            raise ResultRejectedError(f"{text}; {last}.{advice}", ExitCode.FAILED)
        text += f"; reproduced on rerun; {last}. --on-nan skip and --on-loss-spike skip exclude such a batch."
        if run.args.output.save is None:
            raise ResultRejectedError(
                f"{text} The model or the data, or a machine that is wrong every time", ExitCode.RESULT_NOT_VALID
            )
        devices = collectives.all_gather_object(device_name(run), run.ps.world)
        if noted is not None and noted.iteration == self.number and not set(devices) & set(noted.devices):
            _track(run, self.number, "second_rerun_reproducible", text)
            self._on_rank_0(PendingFaultReport.clear)
            raise ResultRejectedError(
                f"{text} Other machines ({_join_devices(noted.devices)}) got the same: it is the model or the data",
                ExitCode.RESULT_NOT_VALID,
            )
        report = PendingFaultReport(self.number, reason.text, where, devices)
        self._on_rank_0(report.write)
        raise ResultRejectedError(
            f"{text} To tell the model and the data from a machine that is wrong every time, resume on other machines "
            f"than {_join_devices(devices)} (exit code {ExitCode.RESUME_ELSEWHERE.value})",
            ExitCode.RESUME_ELSEWHERE,
        )

    def _log_rank0(self, text: str) -> None:
        if self.run.ps.world.rank == 0:
            logger.warning("%s", text)

    def _on_rank_0(self, act: Callable[[str], None]) -> None:
        folder = self.run.args.output.save
        if self.run.ps.world.rank == 0 and folder is not None:
            try:
                act(folder)
            except OSError as error:
                logger.warning("the note about iteration %d in %s: %s", self.number, folder, error)


def describe_stop(run: BaseRun, state: TrainState) -> str:
    """Describe what is saved when a rejected result ends the run, and a learning rate that may be the cause."""
    if saved := run.save_history.saved:
        text = f"the checkpoint of iteration {saved[-1]} is untouched"
    elif state.flags:
        text = "the checkpoint that the run continued is untouched"
    else:
        text = "no checkpoint was saved" + (" (no --save)" if run.save_folder is None else "")
    active = count_parameters(run.args, run.padded_vocab_size).active
    rate = unusual_learning_rate(run.args.as_dict(), active, only_high=True)
    return text if rate is None else f"{text}; {rate}: --lr may be the cause"


def _track(run: TrainRun, iteration: int, status: str, text: str) -> None:
    path = run.args.training.result_rejected_tracker_filename
    if path is not None and run.ps.world.rank == 0:
        try:
            track(path, iteration, run.ps.world.rank, device_name(run), status, text)
        except OSError as error:
            logger.warning("--result-rejected-tracker-filename %s: %s", path, error)


def _join_devices(devices: list[str]) -> str:
    distinct = sorted(set(devices))
    return ", ".join(distinct[:8]) + (f" and {len(distinct) - 8} more" if len(distinct) > 8 else "")

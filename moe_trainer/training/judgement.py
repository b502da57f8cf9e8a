"""Is the result of an iteration acceptable, and if not: the model, the data or the machine? Between the reductions and the update.

One evaluation (`Attempt`) is forward and backward over all microbatches and the reduced gradients. The weights are still those from
before, and neither the routers' books nor the scales of 8-bit layers have been brought forward, so it can be thrown away or repeated.

A rank whose own result looks wrong adds NaN to the sum of the gradient norm. All ranks get the same bits of it, so all of them come
here or none does, and a run without mishap pays no collective for it.

--rerun-mode validate_results, the default:

    rejected -> repeat in place -> accepted             a transient fault: the ranks whose results differ are named; the run goes on
                                                        with the repeated result
                                -> rejected otherwise   a machine that computes different things each time: exit 17
                                -> rejected the same    look for the place (once more, with hooks), then as --on-nan, --on-loss-spike say
      skip                                              no update; samples are consumed; after MOST_IN_A_ROW of them exit 1
      report (spikes)                                   the update is made
      stop, without --save                              exit 17
      stop, with --save                                 note devices and place beside the checkpoints, exit 16: resume elsewhere
        resumed, the iteration is rejected there        on another device: model or data, exit 17; on the same one: exit 16 again
        resumed, the iteration is accepted there        the devices noted are named as persistently wrong; the run goes on

Values count as the same within TOLERANCE: kernels of a GPU may add in another order. With --rerun-mode disabled nothing is repeated,
so no place is known, and a rejected result stops (exit 1), skips or is reported. report_stats repeats the iterations that are logged
and says how far they lie apart; a rejected result is treated as with disabled.

Unlike Megatron-LM a transient fault does not end the run, since a good result is at hand, and a checkpoint is not written at exit 16:
the last one leads to the same iteration with the same bits. Rejected: fingerprints of every rank before the reduction, which would
name the rank of a wrong gradient too. They cost a pass over the gradients of every iteration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from arguments import Arguments
from moe_trainer.checkpoint.random_state import capture, restore, streams_of
from moe_trainer.data.loader import Batch
from moe_trainer.errors import user_input
from moe_trainer.exit_codes import ExitCode
from moe_trainer.guard.beginning import Beginning
from moe_trainer.guard.rejection import (
    MOST_IN_A_ROW,
    TOLERANCE,
    Reason,
    ResultRejected,
    Rules,
    Suspicion,
    difference,
    track,
    wrong_rank,
)
from moe_trainer.layers.precision import forget_maxima
from moe_trainer.layers.sparse_attention import forget_indexer_loss
from moe_trainer.model.mtp import forget_mtp_metrics
from moe_trainer.moe.balancing import forget_iteration
from moe_trainer.moe.budget import budgets_of
from moe_trainer.parallel import collectives
from moe_trainer.run import Run, TrainState, as_rank_0_sees_it, print_rank_0
from moe_trainer.training.fault_place import device_of, find_fault, global_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One evaluation of an iteration. sums: of every microbatch, as run_microbatches gives them, this rank's; loss: mean over all ranks;
    norm: of all gradients, before clipping. mtp, indexer: what mtp_metrics and indexer_metric take. overflowed: rows were lost (moe/budget.py), so nothing of it may take effect, and norm is NaN."""

    sums: list[Tensor]
    loss: float
    tokens: float
    norm: float
    mtp: tuple[float, ...] = ()
    indexer: tuple[float, ...] = ()
    overflowed: bool = False


@dataclass(frozen=True)
class Judgement:
    """What to go on with. skipped: why its update is not to be made; None: it is."""

    attempt: Attempt
    skipped: str | None = None


def rules_of(args: Arguments) -> Rules:
    """What the flags have looked for."""
    training = args.training
    return Rules(training.check_for_nan_in_loss_and_grad, training.check_for_spiky_loss, training.check_for_large_grads,
                 training.loss_spike_factor)


def remembering(run: Run) -> Run:
    """The run with a memory of each iteration's beginning, where something may want to repeat one. Collective with budgets for received rows:
    ranks agree whether any of them may lose rows."""
    mode = run.args.training.rerun_mode
    repeats = mode != "disabled" and (mode != "validate_results" or rules_of(run.args).any)
    if run.train_batches is None or run.args.optimizer.freeze_all_layers:
        return run
    loses = run.args.moe.moe_expert_rank_capacity_factor is not None and any(
        collectives.all_gather_object(any(budget.may_stay for budget in budgets_of(run.chunks)), run.ps.world))
    return replace(run, train_batches=beginning_of(run), may_lose_rows=loses) if repeats or loses else run


def beginning_of(run: Run) -> Beginning[Batch]:
    """The run's batches, which can go back to where an iteration began, and the random generators with them."""
    streams = streams_of(run.chunks)
    return Beginning(run.train_batches, partial(capture, streams), partial(restore, streams=streams))


def remember(run: Run) -> None:
    """An iteration begins here, or is passed over."""
    if isinstance(run.train_batches, Beginning):
        run.train_batches.begin()


def history_of(state: TrainState) -> dict[str, dict]:
    """What a checkpoint keeps of it."""
    kept = state.history.as_dict()
    return {"history": kept} if kept else {}


def tell_spread(run: Run, state: TrainState) -> None:
    """The training is over: say how far repeated iterations lay apart, if any were."""
    if state.spread.repeats:
        print_rank_0(run.runtime, f"--rerun-mode report_stats: {state.spread.text}")


def injected(run: Run, state: TrainState, sums: list[Tensor], repeated: bool) -> list[Tensor]:
    """The sums, one of them NaN where --error-injection-rate wants this rank to be wrong now. repeated: it is not the first evaluation."""
    training, ps = run.args.training, run.ps
    if not training.error_injection_rate or not sums:
        return sums
    chosen = wrong_rank(training.error_injection_rate, training.seed, state.iteration + 1, ps.dp_cp.size * ps.tp.size)
    kind, noted = training.error_injection_type, state.suspicion
    over = (kind == "transient_error" and repeated) or (
        kind == "persistent_error" and noted is not None and noted.iteration == state.iteration + 1 and device_of(run) not in noted.devices)
    if chosen != ps.dp_cp.rank * ps.tp.size + ps.tp.rank or over:
        return sums
    logger.warning("iteration %d: injecting a %s on rank %d (--error-injection-rate)", state.iteration + 1, kind.replace("_", " "), ps.world.rank)
    return [sums[0] * math.nan, *sums[1:]]


def judge(run: Run, state: TrainState, first: Attempt, again: Callable[[bool], Attempt]) -> Judgement:
    """Decide about an evaluation. again: evaluates the iteration once more, from where it began; of whether graphs are left aside.

    Communication: none for a result that all ranks accept, else as much as it takes. Collective then.
    Raises: ResultRejected, on all ranks with the same words.
    """
    rules, mode = rules_of(run.args), run.args.training.rerun_mode
    logs = (state.iteration + 1) % run.args.output.log_interval == 0
    if not rules.any:
        return Judgement(_compared(state, first, again(False)) if mode == "report_stats" and logs else first)
    if math.isfinite(first.norm) and state.history.judge_norm(first.norm, rules) is None:
        _settle(run, state)
        if mode == "report_stats" and logs:
            first = _compared(state, first, again(False))
        return _accepted(state, first, rules)
    return _Case(run, state, rules, again).decide(first)


def _accepted(state: TrainState, attempt: Attempt, rules: Rules) -> Judgement:
    state.history.learn(attempt.loss, attempt.norm, rules)
    return Judgement(attempt)


def _compared(state: TrainState, first: Attempt, second: Attempt) -> Attempt:
    """The second of two evaluations, once the spread knows both."""
    state.spread.add((first.loss, second.loss), (first.norm, second.norm))
    logger.info("--rerun-mode report_stats: %s", state.spread.text)
    return second


def rewind(run: Run) -> None:
    """Put back what forward and backward have changed, up to the gradients, which the next evaluation overwrites."""
    forget_books(run)
    run.train_batches.rewind()


def forget_books(run: Run) -> None:
    """Nothing of this iteration has happened to routers, multi-token prediction, indexers and delayed scaling."""
    forget_iteration(run.chunks)
    forget_mtp_metrics(run.chunks)
    forget_indexer_loss(run.chunks)
    forget_maxima(run.chunks)


def recall_suspicion(run: Run, state: TrainState) -> None:
    """Before the first iteration: read what an earlier run left to be settled. Collective where it can have."""
    folder = run.args.output.save
    if folder is None or run.args.training.rerun_mode != "validate_results":
        return
    with user_input("--save"):
        state.suspicion = as_rank_0_sees_it(lambda: Suspicion.read(folder), run.ps)


def _settle(run: Run, state: TrainState) -> None:
    """An iteration is accepted: if an earlier run rejected it, that run's machines were wrong."""
    noted, number = state.suspicion, state.iteration + 1
    if noted is None or number < noted.iteration:
        return
    state.suspicion = None
    if number == noted.iteration:
        text = (f"iteration {number} is accepted here and was rejected twice on {_shown(noted.devices)} ({noted.because}; {noted.place}): "
                "that machine computes wrong numbers")
        if run.ps.world.rank == 0:
            logger.warning("%s", text)
        _track(run, number, "second_rerun_not_reproducible", text)
    if run.ps.world.rank == 0:
        Suspicion.clear(run.args.output.save)


class _Case:
    """One rejected result."""

    def __init__(self, run: Run, state: TrainState, rules: Rules, again: Callable[[bool], Attempt]):
        self.run, self.state, self.rules, self.again = run, state, rules, again
        self.number = state.iteration + 1

    def decide(self, first: Attempt) -> Judgement:
        """All ranks come here together; at least one of them has something to say, or gradients overflow under a dynamic loss scale."""
        first, reason = self._reason(first)
        if reason is None:
            return Judgement(first)
        if self.run.args.training.rerun_mode != "validate_results":
            return self._conclude(first, reason, "")
        _track(self.run, self.number, "initial_run", reason.text)
        self._say(f"iteration {self.number}: {reason.text}; it is repeated")
        before = self._fingerprint(first)
        second, repeated = self._reason(self.again(False))
        if repeated is None:
            self._tell_transient(reason, self._differences(before, second))
            _settle(self.run, self.state)
            return _accepted(self.state, second, self.rules)
        if not self._same(reason, repeated, first, second):
            text = (f"iteration {self.number}: {reason.text}; repeated in place, {repeated.text}: this is no property of the model or the "
                    f"data. {self._differences(before, second)}")
            _track(self.run, self.number, "first_rerun_not_reproducible", text)
            raise ResultRejected(text, ExitCode.RESULT_NOT_VALID)
        _track(self.run, self.number, "first_rerun_reproducible", reason.text)
        where = find_fault(self.run, self.state, lambda: self.again(True).sums) if reason.kind == "nan" else ""
        return self._conclude(second, reason, where)

    def _reason(self, attempt: Attempt) -> tuple[Attempt, Reason | None]:
        """What is wrong with an evaluation by the first rank that has something to say, and the evaluation with its true norm. Collective."""
        attempt = replace(attempt, norm=self.run.optimizer.grad_norm())
        history = self.state.history
        mine = history.judge_loss(attempt.loss, self.rules) or history.judge_norm(attempt.norm, self.rules)
        told = collectives.all_gather_object(mine, self.run.ps.world)
        return attempt, next((reason for reason in told if reason is not None), None)

    def _same(self, reason: Reason, repeated: Reason, first: Attempt, second: Attempt) -> bool:
        """Did all ranks get the same result twice? Collective."""
        alike = reason.kind == repeated.kind and max(difference(first.loss, second.loss), difference(first.norm, second.norm)) <= TOLERANCE
        return all(collectives.all_gather_object(alike, self.run.ps.world))

    def _fingerprint(self, attempt: Attempt) -> list[tuple[str, Tensor]]:
        """What this rank knows of an evaluation by itself, in the order in which it came about; a copy."""
        found = [(f"books of {global_name(chunk, path)}", buffer.clone()) for chunk in self.run.chunks for path, buffer in chunk.named_buffers()]
        found += [(f"the loss of microbatch {index}", pair[0].clone()) for index, pair in enumerate(attempt.sums, start=1)]
        squares = [view.float().square().sum() for _, view in self.run.grads.owned_views() if view.numel()]
        return [*found, ("gradients after their reduction", torch.stack(squares).sum() if squares else torch.zeros(()))]

    def _differences(self, before: list[tuple[str, Tensor]], second: Attempt) -> str:
        """Which ranks got another result, and where first. Collective."""
        now = self._fingerprint(second)
        mine = next((name for (name, old), (_, new) in zip(before, now, strict=True)
                     if not torch.allclose(old, new, rtol=TOLERANCE, atol=0.0, equal_nan=True)), None)
        told = collectives.all_gather_object(None if mine is None else f"rank {self.run.ps.world.rank} ({device_of(self.run)}) first in {mine}",
                                             self.run.ps.world)
        differing = [text for text in told if text is not None]
        if not differing:
            return "No rank's own losses, books or gradients differ: it happened in the reduction of the loss"
        return f"Results differ on {'; '.join(differing)} (what is reduced reaches other ranks: losses and books are a rank's own)"

    def _tell_transient(self, reason: Reason, where: str) -> None:
        text = f"iteration {self.number}: {reason.text}; repeated in place it is not so: a transient fault of a machine. {where}"
        self._say(f"{text}. The run goes on with the repeated result")
        _track(self.run, self.number, "first_rerun_not_reproducible", text)

    def _conclude(self, attempt: Attempt, reason: Reason, where: str) -> Judgement:
        """The result is what this model and these data give, as far as is known."""
        training, state = self.run.args.training, self.state
        action = training.on_nan if reason.kind == "nan" else training.on_loss_spike
        text = f"iteration {self.number}: {reason.text}" + (f"; first place: {where}" if where else "")
        if action == "report":
            self._say(f"{text}; the update is made (--on-loss-spike report)")
            return _accepted(state, attempt, self.rules)
        if action == "skip" and state.history.in_a_row + 1 < MOST_IN_A_ROW:
            self._say(f"{text}; the update is skipped")
            return Judgement(attempt, reason.text)
        if action == "skip":
            raise ResultRejected(f"{text}. These are {MOST_IN_A_ROW} iterations in a row: it is not a batch that is bad", ExitCode.FAILED)
        self._stop(text, reason, where)

    def _stop(self, text: str, reason: Reason, where: str) -> None:
        run, noted = self.run, self.state.suspicion
        last = "the last checkpoint is untouched"
        if run.args.training.rerun_mode != "validate_results":
            advice = " --no-check-for-nan-in-loss-and-grad goes on regardless" if reason.kind == "nan" else ""
            raise ResultRejected(f"{text}; {last}.{advice}", ExitCode.FAILED)
        text += f"; repeated in place it is the same; {last}. --on-nan skip and --on-loss-spike skip leave such a batch out."
        if run.args.output.save is None:
            raise ResultRejected(f"{text} The model or the data, or a machine that is wrong every time", ExitCode.RESULT_NOT_VALID)
        devices = collectives.all_gather_object(device_of(run), run.ps.world)
        if noted is not None and noted.iteration == self.number and not set(devices) & set(noted.devices):
            _track(run, self.number, "second_rerun_reproducible", text)
            self._on_rank_0(Suspicion.clear)
            raise ResultRejected(f"{text} Other machines ({_shown(noted.devices)}) got the same: it is the model or the data", ExitCode.RESULT_NOT_VALID)
        suspicion = Suspicion(self.number, reason.text, where, devices)
        self._on_rank_0(suspicion.write)
        raise ResultRejected(f"{text} To tell the model and the data from a machine that is wrong every time, resume on other machines than "
                             f"{_shown(devices)} (exit code {ExitCode.RESUME_ELSEWHERE.value})", ExitCode.RESUME_ELSEWHERE)

    def _say(self, text: str) -> None:
        if self.run.ps.world.rank == 0:
            logger.warning("%s", text)

    def _on_rank_0(self, act: Callable[[str], None]) -> None:
        if self.run.ps.world.rank == 0:
            try:
                act(self.run.args.output.save)
            except OSError as error:
                logger.warning("the note about iteration %d in %s: %s", self.number, self.run.args.output.save, error)


def _track(run: Run, iteration: int, status: str, text: str) -> None:
    path = run.args.training.result_rejected_tracker_filename
    if path is not None and run.ps.world.rank == 0:
        try:
            track(path, iteration, run.ps.world.rank, device_of(run), status, text)
        except OSError as error:
            logger.warning("--result-rejected-tracker-filename %s: %s", path, error)


def _shown(devices: list[str]) -> str:
    distinct = sorted(set(devices))
    return ", ".join(distinct[:8]) + (f" and {len(distinct) - 8} more" if len(distinct) > 8 else "")

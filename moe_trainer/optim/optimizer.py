"""The optimizer step on flat storage: unscale, check, clip, update, copy to the model.

Main parameters, gradients and moments lie in the same flat order (flat.py), in the formats and places that state_plan.py says;
kept_state.py cuts them into stretches, and update.py updates these in fp32, one after the other. fp32 models are their own main
parameters; bf16 and fp16 models have main parameters besides, and get their copy of each stretch as it is done. With the
distributed optimizer everything covers this rank's part of each bucket only; the arithmetic is the same.

Numbers follow Megatron-LM: AdamW with bias correction and eps outside the root, SGD with momentum and coupled decay,
norm before clipping, factor max/(norm + 1e-6) where below 1. The loss scale is taken out together with the clipping.

Norms and zero counts are one sum over the whole world in which every element of the model is counted on exactly one rank
(flat_state.Piece.counted). All ranks get the same bits, hence one clipping factor, one verdict on overflow and one loss scale.
Sums over model-parallel groups, dense and expert ones apart, were rejected: they are where norms went wrong (M#5916).
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.clip import clip_factor, square_sum, sum_over_ranks, zero_count
from moe_trainer.optim.distributed_optimizer import ParamGather
from moe_trainer.optim.flat import Slot
from moe_trainer.optim.flat_state import FlatState
from moe_trainer.optim.kept_state import KeptState
from moe_trainer.optim.loss_scale import DynamicLossScale, LossScale
from moe_trainer.optim.param_groups import ParamGroup, adam_eps
from moe_trainer.optim.state_plan import rule_of
from moe_trainer.optim.stored_state import stored_states
from moe_trainer.optim.update import Updater
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

MAX_OVERFLOWS_AT_MINIMUM = 10


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN or infinite, and no dynamic loss scale is there to skip the iteration or none that can fall further."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step did. grad_norm: before clipping, None if not finite; num_zeros: None if not asked for."""

    updated: bool
    grad_norm: float | None
    num_zeros: int | None
    found_inf: bool


@dataclass(frozen=True)
class ParamState:
    """State of a parameter on this rank: elements [start, stop) of the flattened parameter.

    tensor: live fp32 storage. Where the state is kept in another format it has only shape and type (device "meta"), and
    `read(first, last)` gives the fp32 values of a range counted from `start`.
    """

    param: Parameter
    state_name: str
    tensor: Tensor
    start: int
    stop: int
    read: Callable[[int, int], Tensor] | None = None

    def values(self) -> Tensor:
        """The fp32 values, to look at."""
        return self.tensor if self.read is None else self.read(0, self.stop - self.start)


class Gradients(Protocol):
    """Where gradients are kept (grad_buffer.DataParallelGrads, fully_sharded.ShardedGrads); they are reduced before a step."""

    def zero(self) -> None:
        """Begin an iteration."""

    def finish(self) -> None:
        """Complete all reductions. Collective."""

    def owned_views(self) -> Iterator[tuple[Slot, Tensor]]:
        """This rank's part of every gradient, flat, in one order on every rank."""

    def scale(self, factor: float) -> None:
        """Multiply this rank's part of all gradients."""

    def gather(self) -> None:
        """Give every parameter its whole gradient as `main_grad`, after finish(). Collective."""


class Optimizer:
    """One step over all parameters; see build.build_optimizer."""

    def __init__(self, grads: Gradients, states: Sequence[KeptState], updater: Updater, settings: OptimizerArgs, loss_scale: LossScale,
                 gather: ParamGather | None, ps: ParallelState, device: torch.device, *, check_for_nan: bool = True, count_zeros: bool = False,
                 timer: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext()):
        self._grads = grads
        self._states = tuple(states)
        self._stored = stored_states(self._states)
        self._updater = updater
        self._settings = settings
        self._scaler = loss_scale
        self._gather = gather
        self._check_for_nan = check_for_nan
        self._count_zeros = count_zeros
        self._timer = timer
        self._device = device  # of the norms: a stage without parameters takes part in their sums
        self._world = ps.world
        found = {piece.group for state in self._states for piece in state.pieces}
        # a stage without experts, or without a decoupled learning rate, still has the groups that the others have
        self._groups = sorted(set().union(*collectives.all_gather_object(found, ps.world)),
                              key=lambda g: (g.is_expert_parallel, -g.wd_mult, g.is_decoupled_lr, g.lr_mult))
        self.step_count = 0
        self._early = 0
        if self._stored:
            self._release()
            self.wait_params()

    def gather_early(self, params: Collection[Parameter]) -> int:
        """Gather these parameters while the others are still being updated. Returns: how many buckets that concerns.

        They must be the first in order of use. What the host updates, and parameters that are kept in 8 bits, come at the end as ever.
        """
        found = {id(param) for param in params}
        late = {id(stretch.state.bucket_at(stretch.start)) for state in self._states if isinstance(state, FlatState)
                for stretch in state.stretches if stretch.store.by_host}
        buckets = [] if self._stored else self._gather.leading(
            lambda bucket: id(bucket) not in late and all(id(slot.param) in found for slot in bucket.slots))
        self._updater.put_first(buckets)
        self._early = len(buckets)
        return self._early

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the current iteration."""
        return self._scaler.scale

    @torch.no_grad()
    def grad_norm(self, alarm: bool = False) -> float:
        """Norm of the reduced main gradients, unscaled, before clipping; may be anything but finite. Collective; the same bits on every rank.

        alarm: make it NaN on all ranks: a rank's way to tell the others that it has seen something.
        """
        self.wait_params()  # nothing to wait for, unless some module did not run since the last step
        with self._timer("optimizer-unscale-and-check-inf"):
            views = (state.grad_at(run.start, run.stop) for state in self._states for run in state.runs if run.counted)
            return self._norm(views, alarm) * (1.0 / self.loss_scale)

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, decoupled_lr: float | None = None, norm: float | None = None,
             rows: Mapping[Parameter, Tensor] = MappingProxyType({}), scaled_lr: float | None = None) -> StepOutcome:
        """Update the parameters from the reduced main gradients. norm: of grad_norm(), if that was asked before. scaled_lr: see ParamGroup.rates.

        rows: parameters, as far as this rank has them without the data-parallel cut, and what every row of theirs is multiplied by after the
        update; the same on all ranks that hold a parameter.

        Overflowing gradients skip the update (and let a dynamic loss scale shrink).
        Raises: NonFiniteGradientError for such gradients when no loss scale can help and the NaN check is on: at once without a dynamic one,
            after MAX_OVERFLOWS_AT_MINIMUM consecutive iterations with one at its minimum.
        """
        norm = self.grad_norm() if norm is None else norm
        inverse, found_inf = 1.0 / self.loss_scale, not math.isfinite(norm)
        self._scaler.update(found_inf)
        if found_inf:
            if self._check_for_nan and not isinstance(self._scaler, DynamicLossScale):
                raise NonFiniteGradientError(self._describe_non_finite())
            if isinstance(self._scaler, DynamicLossScale) and self._scaler.overflows_at_minimum >= MAX_OVERFLOWS_AT_MINIMUM:
                raise NonFiniteGradientError(
                    f"the last {MAX_OVERFLOWS_AT_MINIMUM} iterations made no update: gradients overflow fp16 although the loss scale is at its "
                    f"minimum (--min-loss-scale {self._scaler.minimum:g}); lower --lr or --min-loss-scale, or train with --bf16")
            if any(state.follows_scales for state in self._stored):
                self._release()
            return StepOutcome(False, None, None, True)
        with self._timer("optimizer-clip-main-grad"):
            factor = inverse * clip_factor(norm, self._settings.clip_grad)  # applied on the way into the update
        num_zeros = None
        if self._count_zeros:
            with self._timer("optimizer-count-zeros"):
                num_zeros = self._num_zeros()
        with self._timer("optimizer-inner-step"):
            self.step_count += 1
            early = self._early if not rows else 0  # rows are scaled between the update and the gather
            self._updater.step(lambda group: group.rates(lr, weight_decay, decoupled_lr, scaled_lr), factor, self.step_count,
                               first_done=lambda: self._gather.start(early) if early else None)
            for state in self._states if rows else ():
                state.scale_rows(rows)
        self._release()
        return StepOutcome(True, norm, num_zeros, False)

    def _release(self) -> None:
        """Let all ranks have the new parameters. Collective with the distributed optimizer, which may still be gathering afterwards."""
        for state in self._stored:
            with self._timer("optimizer-copy-main-to-model-params"):
                state.publish()
        if self._gather is not None:
            with self._timer("params-all-gather"):
                self._gather.start()

    def zero_grad(self) -> None:
        """Begin an iteration."""
        self._grads.zero()

    def wait_params(self) -> None:
        """Wait until every model parameter is gathered: before anything but a forward reads them."""
        if self._gather is not None:
            self._gather.wait_all()

    def tensors(self) -> Iterator[ParamState]:
        """All state of this rank, parameter by parameter in model order; after begin_load() all of it can be overwritten in place.

        Names: exp_avg, exp_avg_sq (adam), exp_avg (lion), momentum_buffer (sgd, muon), fp32_param (bf16 and fp16 models).
        """
        self._settle()
        found = ((piece.slot.position, piece, state) for state in self._states for piece in state.pieces)
        for _, piece, state in sorted(found, key=lambda entry: entry[0]):
            base = piece.start - piece.offset
            for name, start, stop, live, read in state.kept_of(piece):
                tensor = torch.empty(stop - start, dtype=torch.float32, device="meta") if live is None else live
                yield ParamState(piece.slot.param, name, tensor, base + start, base + stop, read)

    def begin_load(self) -> None:
        """Let tensors() be live fp32 storage, whatever the formats, until after_load(). Costs an fp32 copy, on the host, of what is not."""
        self._settle()
        for state in self._states:
            state.stage()

    def scalars(self) -> dict:
        """What a checkpoint must keep besides tensors(); plain values."""
        return {"step": self.step_count, "optimizer": self._settings.optimizer, "grad_scaler": self._scaler.state(),
                "param_groups": [self._describe_group(group) for group in self._groups]}

    def load_scalars(self, scalars: dict) -> None:
        """Restore scalars(). A loss scale is taken over only where both runs have a dynamic one.

        Raises: ValueError when the state is that of another optimizer.
        """
        kind = scalars.get("optimizer", self._settings.optimizer)
        if kind != self._settings.optimizer:
            raise ValueError(f"the checkpoint holds the state of --optimizer {kind}, this run has --optimizer "
                             f"{self._settings.optimizer}; use --no-load-optim to start with a fresh state")
        self.step_count = int(scalars["step"])
        if scalars.get("grad_scaler") and isinstance(self._scaler, DynamicLossScale):
            self._scaler.load_state(scalars["grad_scaler"])

    def after_load(self, params_changed: bool, state_loaded: bool) -> None:
        """Make main and model parameters agree again.

        state_loaded: fp32_param was loaded into tensors(), and is the truth. Else, where the model's parameters changed
        (weights loaded alone), the main parameters are taken from them. Collective with the distributed optimizer.
        """
        for state in self._states:
            state.commit()
        if state_loaded:
            for state in self._states:
                state.copy_main_to_model()
            self._release()
            self.wait_params()
        elif params_changed:
            self.wait_params()
            for state in self._states:
                state.copy_model_to_main()
            if self._stored:
                self._release()
                self.wait_params()
        for state in self._stored:
            state.loaded()

    def params_norm(self) -> float:
        """Norm of all (main) parameters. Collective."""
        self._settle()
        return self._norm(stretch.main_params() for state in self._states for stretch in state.stretches if stretch.counted)

    def _settle(self) -> None:
        """Wait for state that is still on its way to the host."""
        if self._device.type == "cuda" and any(store.devices.storage.type == "cpu" for state in self._states for store in state.stores):
            torch.cuda.synchronize(self._device)

    def _describe_group(self, group: ParamGroup) -> dict:
        settings = self._settings
        own = {
            "adam": {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": adam_eps(settings, group), "bias_correction": True},
            "lion": {"betas": (settings.lion_beta1, settings.lion_beta2)},
            "sgd": {"momentum": settings.sgd_momentum},
        }[rule_of(settings)]
        if settings.optimizer == "muon":
            own["momentum"] = settings.muon_momentum
        return {**asdict(group), "step": self.step_count, **own}

    def _norm(self, views: Iterable[Tensor], alarm: bool = False) -> float:
        """Norm over all ranks of what is counted here; the same number on every rank, with an alarm on any of them NaN. Collective."""
        squares = square_sum(views)
        if alarm:
            squares = torch.full((), math.nan, dtype=torch.float64, device=self._device)
        return sum_over_ranks(squares, self._world, self._device) ** 0.5

    def _num_zeros(self) -> int:
        """Zero gradients over all ranks, piece by piece: the gaps between parameters do not count. Collective."""
        views = [state.grad_of(piece) for state in self._states for piece in state.pieces if piece.counted]
        return int(sum_over_ranks(zero_count(views), self._world, self._device))

    def _describe_non_finite(self) -> str:
        names = [piece.slot.param.info.names[0] for state in self._states for piece in state.pieces
                 if not torch.isfinite(state.grad_of(piece)).all()]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        where = f"on this rank: {shown}" if names else "on another rank"
        return (f"gradients are not finite in step {self.step_count + 1} ({where}); lower --lr, look at the data, or use "
                "--no-check-for-nan-in-loss-and-grad to skip such iterations")

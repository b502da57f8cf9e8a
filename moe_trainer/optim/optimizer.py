"""The optimizer step on flat storage: unscale, check, clip, update, copy to the model.

Main parameters, gradients and moments lie in the same flat order (flat.py), so the parameters of one group form a
handful of contiguous segments and the update is one fused call per group. fp32 models are their own main parameters;
bf16 and fp16 models have fp32 main parameters, copied to the model in one pass per bucket. With the distributed optimizer
everything covers this rank's part of each bucket only; the arithmetic is the same.

Numbers follow Megatron-LM: AdamW with bias correction and eps outside the root, SGD with momentum and coupled decay,
norm before clipping, factor max/(norm + 1e-6) where below 1. The loss scale is taken out together with the clipping.

Norms and zero counts are one sum over the whole world in which every element of the model is counted on exactly one rank
(flat_state.Piece.counted). All ranks get the same bits, hence one clipping factor, one verdict on overflow and one loss scale.
Sums over model-parallel groups, dense and expert ones apart, were rejected: they are where norms went wrong (M#5916).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.clip import clip_factor, square_sum, sum_over_ranks, zero_count
from moe_trainer.optim.distributed_optimizer import ParamGather
from moe_trainer.optim.flat import Slot
from moe_trainer.optim.flat_state import Piece, Segment, portions
from moe_trainer.optim.loss_scale import DynamicLossScale, LossScale
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN or infinite and nothing (no dynamic loss scale) is there to skip the iteration."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step did. grad_norm: before clipping, None if not finite; num_zeros: None if not asked for."""

    updated: bool
    grad_norm: float | None
    num_zeros: int | None
    found_inf: bool


@dataclass(frozen=True)
class ParamState:
    """State of a parameter on this rank: elements [start, stop) of the flattened parameter; `tensor` is live storage."""

    param: Parameter
    state_name: str
    tensor: Tensor
    start: int
    stop: int


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


class StateShard(Protocol):
    """Main parameters, gradients and moments of some parameters, or of this rank's part of them (flat_state.FlatState, fully_sharded.ShardedState).

    device: where they lie. pieces: they cover, in any order, what this rank keeps of every parameter. segments: the same
    elements in as few tensors as possible, gradients as they are at the moment of asking; gradients outside fp32 are left
    unscaled by scale_grads, and scaled on their way into the update instead.
    """

    device: torch.device

    @property
    def pieces(self) -> Sequence[Piece]: ...

    @property
    def segments(self) -> Sequence[Segment]: ...

    def grad_of(self, piece: Piece) -> Tensor: ...

    def kept_of(self, piece: Piece) -> Iterator[tuple[str, Tensor]]: ...

    def scale_grads(self, factor: float) -> None: ...

    def copy_main_to_model(self) -> None: ...

    def copy_model_to_main(self) -> None: ...


class Optimizer:
    """AdamW or SGD over all parameters; see build.build_optimizer."""

    def __init__(self, grads: Gradients, states: Sequence[StateShard], settings: OptimizerArgs, loss_scale: LossScale,
                 gather: ParamGather | None, ps: ParallelState, device: torch.device, *, check_for_nan: bool = True, count_zeros: bool = False,
                 timer: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext()):
        self._grads = grads
        self._states = tuple(states)
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
                              key=lambda g: (g.is_expert_parallel, -g.wd_mult, g.is_decoupled_lr))
        self.step_count = 0

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the current iteration."""
        return self._scaler.scale

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> StepOutcome:
        """Update the parameters from the reduced main gradients.

        Overflowing gradients skip the update (and let a dynamic loss scale shrink).
        Raises: NonFiniteGradientError for such gradients when no loss scale can help and the NaN check is on.
        """
        self.wait_params()  # nothing to wait for, unless some module did not run since the last step
        with self._timer("optimizer-unscale-and-check-inf"):
            inverse = 1.0 / self.loss_scale
            norm = self._norm(lambda segment: segment.grad) * inverse
            found_inf = not math.isfinite(norm)
            self._scaler.update(found_inf)
        if found_inf:
            if self._check_for_nan and not isinstance(self._scaler, DynamicLossScale):
                raise NonFiniteGradientError(self._describe_non_finite())
            return StepOutcome(False, None, None, True)
        with self._timer("optimizer-clip-main-grad"):
            factor = inverse * clip_factor(norm, self._settings.clip_grad)
            for state in self._states:
                if factor != 1.0:
                    state.scale_grads(factor)
        num_zeros = None
        if self._count_zeros:
            with self._timer("optimizer-count-zeros"):
                num_zeros = self._num_zeros()
        with self._timer("optimizer-inner-step"):
            self.step_count += 1
            self._update(lr, weight_decay, decoupled_lr, factor)
        with self._timer("optimizer-copy-main-to-model-params"):
            for state in self._states:
                state.copy_main_to_model()
        if self._gather is not None:
            with self._timer("params-all-gather"):
                self._gather.start()
        return StepOutcome(True, norm, num_zeros, False)

    def zero_grad(self) -> None:
        """Begin an iteration."""
        self._grads.zero()

    def wait_params(self) -> None:
        """Wait until every model parameter is gathered: before anything but a forward reads them."""
        if self._gather is not None:
            self._gather.wait_all()

    def tensors(self) -> Iterator[ParamState]:
        """All state of this rank, parameter by parameter in model order, as live storage (load in place).

        Names: exp_avg, exp_avg_sq (adam), momentum_buffer (sgd), fp32_param (bf16 and fp16 models).
        """
        found = ((piece.slot.position, piece, state) for state in self._states for piece in state.pieces)
        for _, piece, state in sorted(found, key=lambda entry: entry[0]):
            for name, tensor in state.kept_of(piece):
                yield ParamState(piece.slot.param, name, tensor, piece.start, piece.stop)

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
        if state_loaded:
            for state in self._states:
                state.copy_main_to_model()
            if self._gather is not None:
                self._gather.start()
                self._gather.wait_all()
        elif params_changed:
            self.wait_params()
            for state in self._states:
                state.copy_model_to_main()

    def params_norm(self) -> float:
        """Norm of all (main) parameters. Collective."""
        return self._norm(lambda segment: segment.param)

    def _describe_group(self, group: ParamGroup) -> dict:
        settings = self._settings
        own = {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps, "bias_correction": True} \
            if settings.optimizer == "adam" else {"momentum": settings.sgd_momentum}
        return {**asdict(group), "step": self.step_count, **own}

    def _update(self, lr: float, weight_decay: float, decoupled_lr: float | None, factor: float) -> None:
        for group in self._groups:
            rates = group.rates(lr, weight_decay, decoupled_lr)
            segments = [segment for state in self._states for segment in state.segments if segment.group == group]
            for together in portions(segments):
                # fp32 gradients are scaled in place by now; bf16 ones are scaled here, in fp32, in a copy
                grads = [seg.grad if seg.grad.dtype == torch.float32 else seg.grad.float().mul_(factor) for seg in together]
                if self._settings.optimizer == "adam":
                    self._adam(together, grads, *rates)
                else:
                    self._sgd(together, grads, *rates)

    def _adam(self, segments: list[Segment], grads: list[Tensor], lr: float, weight_decay: float) -> None:
        # the fused kernel reads one step counter per tensor; it does not advance them
        steps = [torch.tensor(float(self.step_count), device=self._device)] * len(segments)
        torch._fused_adamw_([segment.param for segment in segments], grads,
                            [segment.moments["exp_avg"] for segment in segments],
                            [segment.moments["exp_avg_sq"] for segment in segments], [], steps, lr=lr,
                            beta1=self._settings.adam_beta1, beta2=self._settings.adam_beta2, weight_decay=weight_decay,
                            eps=self._settings.adam_eps, amsgrad=False, maximize=False)

    def _sgd(self, segments: list[Segment], grads: list[Tensor], lr: float, weight_decay: float) -> None:
        # a zeroed momentum buffer makes the first step no special case; without momentum the kernel refuses buffers
        buffers = [segment.moments["momentum_buffer"] for segment in segments if self._settings.sgd_momentum]
        torch._fused_sgd_([segment.param for segment in segments], grads, buffers, weight_decay=weight_decay,
                          momentum=self._settings.sgd_momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False,
                          is_first_step=False)

    def _norm(self, view: Callable[[Segment], Tensor]) -> float:
        """Norm over all ranks of one view of every counted segment; the same number on every rank. Collective."""
        views = [view(segment) for state in self._states for segment in state.segments if segment.counted]
        return sum_over_ranks(square_sum(views), self._world, self._device) ** 0.5

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

"""The optimizer step on flat storage: unscale, check, clip, update, copy to the model.

Main parameters, gradients and moments have one flat order (buckets.py) and the formats and placement of state_plan.py.
optimizer_shard.py splits them into segments, which update.py updates in fp32. fp32 models are their own main
parameters; bf16 and fp16 models have separate ones. With the distributed optimizer everything covers this rank's shard
of each bucket; the arithmetic is the same.

Numbers follow Megatron-LM: AdamW with bias correction and eps outside the root, SGD with momentum and coupled decay,
norm before clipping, factor max/(norm + 1e-6) if below 1. The loss scale is divided out together with the clipping.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from arguments import Arguments
from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.optim.buckets import Bucket
from moe_trainer.optim.clip import clip_factor, square_sum, sum_over_ranks, zero_count
from moe_trainer.optim.distributed_optimizer import GatherBuffer, ParamGather
from moe_trainer.optim.flat_shard import FlatShard
from moe_trainer.optim.fsdp_shard import FsdpGrads, FsdpShard
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.loss_scale import DynamicLossScale, build_loss_scale
from moe_trainer.optim.mx_params import MxParams
from moe_trainer.optim.optimizer_shard import OptimizerShard, ParamState
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.quantized_params import QuantizedParams
from moe_trainer.optim.state_plan import plan_state
from moe_trainer.optim.update import Updater
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState

MAX_OVERFLOWS_AT_MINIMUM = 10

NamedTimer = Callable[[str], contextlib.AbstractContextManager]


def _no_timer(name: str) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


class NonFiniteGradientError(FloatingPointError):
    """A gradient is NaN or infinite, and no dynamic loss scale can skip the iteration and shrink."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step.

    Args:
        grad_norm: before clipping; None if not finite.
        num_zeros: None unless requested.
    """

    updated: bool
    grad_norm: float | None
    num_zeros: int | None
    found_inf: bool


class Optimizer:
    """Updates all parameters of a model from its gradient buffers. Collective over ps.world: build it on every rank.

    From now on the parameters are views of flat buffers (or FSDP shards): load weights with `param.copy_`, never by
    assigning `.data`.

    Args:
        device: of the model; a rank without parameters also takes part in sums over all ranks.
        timer: returns a context manager for a Megatron timer name.
        library: whose kernels compute norms and updates on the device; None: torch's.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        grads: DataParallelGrads | FsdpGrads,
        args: Arguments,
        ps: ParallelState,
        *,
        device: torch.device = torch.device("cpu"),
        timer: NamedTimer = _no_timer,
        library: FusedLibrary | None = None,
    ):
        settings, precision, parallel = args.optimizer, args.precision, args.parallel
        self._grads, self._settings, self._device, self._world = grads, settings, device, ps.world
        self._check_for_nan = args.training.check_for_nan_in_loss_and_grad
        self._count_zeros = args.output.log_num_zeros_in_grad
        self._timer, self._library = timer, library
        main_format = None if parallel.has_fp32_main_params(precision.params_dtype_name) else "model"
        self._gather_timer: NamedTimer = _no_timer
        self._scaler, plan = build_loss_scale(precision), plan_state(settings, main_format=main_format)
        gathered: list[GatherBuffer] = []
        self._quantized: list[tuple[QuantizedParams, tuple[Bucket, ...]]] = []
        self._shards: list[OptimizerShard]
        if isinstance(grads, FsdpGrads):
            has_main_params = (precision.bf16 or precision.fp16) and plan.main != "model"
            self._shards = [FsdpShard(grads, settings, plan, ps, device, names_main_params=has_main_params)]
        else:
            flat_shards = [FlatShard(buffer, settings, ps, main_format) for buffer in grads.buffers]
            self._shards = [*flat_shards]
            self._quantized = [
                (shard.params, shard.layout.buckets)
                for shard in flat_shards
                if isinstance(shard.params, QuantizedParams)
            ]
            if grads.is_sharded:
                gathered = [
                    GatherBuffer(shard.layout, shard.gather_buffer, shard.params.finish_gather) for shard in flat_shards
                ]
                self._gather_timer = timer
            if any(isinstance(shard.params, MxParams) for shard in flat_shards):
                grads.before_accumulation = self.wait_params
        self._gather = ParamGather(gathered, chunks, parallel.overlap_param_gather)
        self._updater = Updater(self._shards, settings, plan, device, ps, library)
        local_groups = {part.group for shard in self._shards for part in shard.param_shards}
        # a stage without experts or without a decoupled learning rate also reports the groups of the others
        self._groups = sorted(
            set().union(*collectives.all_gather_object(local_groups, ps.world)),
            key=lambda g: (g.is_expert_parallel, -g.wd_mult, g.is_decoupled_lr, g.lr_mult),
        )
        self.step_count = 0
        self._early_buckets: list[Bucket] = []
        if self._quantized:
            self._start_param_gather()
            self.wait_params()
        if parallel.overlap_param_gather_with_optimizer_step:
            self.gather_early(list(chunks[0].parameters()))

    def gather_early(self, params: Collection[Parameter]) -> int:
        """Gather these parameters while the others are updated: --overlap-param-gather-with-optimizer-step.

        They must be the first in order of use, in separate buckets. Parameters that the host updates are excluded.
        Return the number of buckets.
        """
        param_ids = {id(param) for param in params}
        updated_on_host = {
            id(shard.bucket_at(segment.start))
            for shard in self._shards
            if isinstance(shard, FlatShard)
            for segment in shard.update_segments
            if segment.state.is_updated_on_host
        }

        def is_early(bucket: Bucket) -> bool:
            return id(bucket) not in updated_on_host and all(id(slot.param) in param_ids for slot in bucket.slots)

        self._early_buckets = self._gather.leading(is_early)
        self._updater.put_first(self._early_buckets)
        return len(self._early_buckets)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the current iteration."""
        return self._scaler.scale

    @torch.no_grad()
    def grad_norm(self, signal_nonfinite: bool = False) -> float:
        """Compute the norm of the reduced main gradients, unscaled, before clipping. Collective.

        The result has the same bits on every rank. One sum over the world counts every element of the model on exactly
        one rank (`ParamShard.is_counted`), so all ranks get the same clipping factor, overflow decision and loss scale.
        Separate sums over dense and expert groups are error-prone (M#5916).

        Args:
            signal_nonfinite: make the norm NaN on all ranks, to report a problem of this rank.
        """
        self.wait_params()  # no-op unless some module did not run since the last step
        with self._timer("optimizer-unscale-and-check-inf"):
            views = (
                segment.grad for shard in self._shards for segment in shard.contiguous_segments if segment.is_counted
            )
            return self._norm(views, signal_nonfinite) * (1.0 / self.loss_scale)

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float,
        decoupled_lr: float | None = None,
        norm: float | None = None,
        row_factors: Mapping[Parameter, Tensor] = MappingProxyType({}),
        scaled_lr: float | None = None,
    ) -> StepOutcome:
        """Update the parameters from the reduced main gradients.

        Overflowing gradients skip the update and shrink a dynamic loss scale.

        Args:
            norm: result of grad_norm(), if already computed.
            row_factors: by parameter (before data-parallel sharding), factors of its rows to apply after the update;
                the same on all ranks that hold the parameter.
            scaled_lr: see ParamGroup.rates.

        Raises:
            NonFiniteGradientError: the gradients overflow and no loss scale can help: immediately without a dynamic one
                if the NaN check is on, after MAX_OVERFLOWS_AT_MINIMUM consecutive iterations with one at its minimum.
        """
        norm = self.grad_norm() if norm is None else norm
        inverse, found_inf = 1.0 / self.loss_scale, not math.isfinite(norm)
        self._scaler.update(found_inf)
        if found_inf:
            if self._check_for_nan and not isinstance(self._scaler, DynamicLossScale):
                raise NonFiniteGradientError(self._describe_non_finite())
            scaler = self._scaler
            if isinstance(scaler, DynamicLossScale) and scaler.overflows_at_minimum >= MAX_OVERFLOWS_AT_MINIMUM:
                raise NonFiniteGradientError(
                    f"the last {MAX_OVERFLOWS_AT_MINIMUM} iterations were skipped: gradients overflow fp16 although "
                    f"the loss scale is at its minimum (--min-loss-scale {scaler.minimum:g}); lower --lr or "
                    "--min-loss-scale, or train with --bf16"
                )
            if any(params.has_external_scales for params, _ in self._quantized):
                self._start_param_gather()
            return StepOutcome(False, None, None, True)
        with self._timer("optimizer-clip-main-grad"):
            factor = inverse * clip_factor(norm, self._settings.clip_grad)  # applied by the update
        num_zeros = None
        if self._count_zeros:
            with self._timer("optimizer-count-zeros"):
                num_zeros = self._num_zeros()
        with self._timer("optimizer-inner-step"):
            self.step_count += 1
            self._updater.step(
                lambda group: group.rates(lr, weight_decay, decoupled_lr, scaled_lr),
                factor,
                self.step_count,
                first_done=lambda: self._start_early_gather(row_factors),
            )
            self._scale_rows(row_factors, are_first=False)
        self._start_param_gather(self._early_buckets)
        return StepOutcome(True, norm, num_zeros, False)

    def _scale_rows(self, row_factors: Mapping[Parameter, Tensor], are_first: bool) -> None:
        """Scale the rows of what is updated first, or of everything else."""
        first = set(self._updater.first)
        for shard in self._shards if row_factors else ():
            shard.scale_rows(row_factors, [seg for seg in shard.update_segments if (seg in first) == are_first])

    def _start_early_gather(self, row_factors: Mapping[Parameter, Tensor]) -> None:
        """Complete and gather the buckets that were updated first."""
        if self._early_buckets:
            self._scale_rows(row_factors, are_first=True)
            for params, own in self._quantized:
                params.quantize_to_model([bucket for bucket in own if bucket in self._early_buckets])
            self._gather.start(len(self._early_buckets))

    def _start_param_gather(self, early: Sequence[Bucket] = ()) -> None:
        """Quantize parameters and start the parameter all-gather. Collective with either.

        Args:
            early: buckets whose gathers have been started.
        """
        for params, own in self._quantized:
            with self._timer("optimizer-copy-main-to-model-params"):
                params.quantize_to_model([bucket for bucket in own if bucket not in early])
        for shard in self._shards:
            shard.gather_model()
        with self._gather_timer("params-all-gather"):
            self._gather.start()

    def defer_param_gather(self) -> None:
        """Let the next iteration launch the gathers that overlap it (`start_deferred_gather`): its graph holds them."""
        self._gather.defer()

    def start_deferred_gather(self, always: bool = False) -> None:
        """Launch the gathers that the last update has left to this iteration; `always`: this is captured."""
        self._gather.start_deferred(always)

    def mark_params_gathered(self) -> None:
        """Set the state after a replayed CUDA graph, which has gathered the parameters."""
        self._gather.mark_finished()

    def zero_grad(self) -> None:
        """Start an iteration."""
        self._grads.zero()

    def wait_params(self) -> None:
        """Wait until every model parameter is gathered. Everything but a forward must call this before reading them."""
        self._gather.wait_all()

    def tensors(self) -> Iterator[ParamState]:
        """Iterate over all state of this rank by parameter, in model order; writable in place after begin_load().

        Names: the states that the optimizer declares (arguments/mechanisms/optimizers.py), and fp32_param of models in
        bf16 or fp16.
        """
        self._wait_host_copies()
        parts = ((part, shard) for shard in self._shards for part in shard.param_shards)
        for part, shard in sorted(parts, key=lambda entry: entry[0].slot.position):
            yield from shard.param_states(part)

    def begin_load(self) -> None:
        """Make tensors() live fp32 storage until after_load(). State in other formats gets an fp32 copy on the host."""
        self._wait_host_copies()
        for shard in self._shards:
            shard.stage()

    def scalars(self) -> dict:
        """Return the checkpoint content besides tensors(), as plain values."""
        return {
            "step": self.step_count,
            "optimizer": self._settings.optimizer,
            "grad_scaler": self._scaler.state_dict(),
            "param_groups": [self._describe_group(group) for group in self._groups],
        }

    def load_scalars(self, scalars: dict) -> None:
        """Restore scalars(). The loss scale is restored only if both runs have a dynamic one.

        Raises:
            ValueError: the state belongs to another optimizer.
        """
        kind = scalars.get("optimizer", self._settings.optimizer)
        if kind != self._settings.optimizer:
            raise ValueError(
                f"the checkpoint contains the state of --optimizer {kind}, this run uses --optimizer "
                f"{self._settings.optimizer}; use --no-load-optim to start with a fresh state"
            )
        self.step_count = int(scalars["step"])
        if scalars.get("grad_scaler") and isinstance(self._scaler, DynamicLossScale):
            self._scaler.load_state_dict(scalars["grad_scaler"])

    def after_load(self, params_changed: bool, state_loaded: bool) -> None:
        """Make main and model parameters consistent. Collective with the distributed optimizer.

        Args:
            params_changed: only the model's weights were loaded; set the main parameters from them.
            state_loaded: fp32_param was loaded into tensors(); set the model from it.
        """
        for shard in self._shards:
            shard.unstage()
        if state_loaded:
            for shard in self._shards:
                shard.sync_main_params(from_model=False)
            self._start_param_gather()
            self.wait_params()
        elif params_changed:
            self.wait_params()
            for shard in self._shards:
                shard.sync_main_params(from_model=True)
            if self._quantized:
                self._start_param_gather()
                self.wait_params()
        for params, _ in self._quantized:
            params.finish_load()

    def params_norm(self) -> float:
        """Compute the norm of all (main) parameters. Collective."""
        self._wait_host_copies()
        return self._norm(
            segment.main_params() for shard in self._shards for segment in shard.update_segments if segment.is_counted
        )

    def _wait_host_copies(self) -> None:
        """Wait for state that is still being copied to the host."""
        if self._device.type == "cuda" and any(
            block.placement.storage.type == "cpu" for shard in self._shards for block in shard.blocks
        ):
            torch.cuda.synchronize(self._device)

    def _describe_group(self, group: ParamGroup) -> dict:
        return {**asdict(group), "step": self.step_count, **self._updater.describe(group)}

    def _norm(self, views: Iterable[Tensor], signal_nonfinite: bool = False) -> float:
        """Compute the norm of views over all ranks; NaN on all ranks if any signals it. Collective."""
        squares = square_sum(views, self._library)
        if signal_nonfinite:
            squares = torch.full((), math.nan, dtype=torch.float64, device=self._device)
        return sum_over_ranks(squares, self._world, self._device) ** 0.5

    def _num_zeros(self) -> int:
        """Count zero gradients over all ranks, without the gaps between parameters. Collective."""
        views = [shard.get_grad(part) for shard in self._shards for part in shard.param_shards if part.is_counted]
        return int(sum_over_ranks(zero_count(views), self._world, self._device))

    def _describe_non_finite(self) -> str:
        names = [
            get_param_info(part.slot.param).names[0]
            for shard in self._shards
            for part in shard.param_shards
            if not torch.isfinite(shard.get_grad(part)).all()
        ]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        where = f"on this rank: {shown}" if names else "on another rank"
        return (
            f"gradients are not finite in step {self.step_count + 1} ({where}); lower --lr, check the data, or use "
            "--no-check-for-nan-in-loss-and-grad to skip such iterations"
        )

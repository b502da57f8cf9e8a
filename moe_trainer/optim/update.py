"""Update rules on segments of the flat state: AdamW, SGD and Lion in fp32, whatever the formats.

Every segment is loaded as fp32, updated by torch's fused kernels or a library's (ops/fused_library.py), stored, and
copied to the model; gradients are unscaled and clipped on the way. No fp32 copy outlives its segment. Adam's kernel
scales fp32 gradients in place: after a step they are undefined. Segments that the host updates come last, so the device
works at the same time.

muon.py updates matrices. docs/design/optimizer.md says why a library's kernels are used and not its optimizer.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.optim.buckets import Bucket
from moe_trainer.optim.flat_shard import FlatShard
from moe_trainer.optim.host_offload import HostUpdatePipeline
from moe_trainer.optim.muon import Muon
from moe_trainer.optim.optimizer_shard import OptimizerShard, Segment
from moe_trainer.optim.param_groups import ParamGroup, adam_eps
from moe_trainer.optim.state_plan import StatePlan, get_update_rule
from moe_trainer.parallel.state import ParallelState

_MAX_SEGMENTS_PER_CALL = 64  # small parameters share a kernel call

Rates = Callable[[ParamGroup], tuple[float, float]]
Tensors = list[Tensor]
Moments = dict[str, list[Tensor]]


class Updater:
    """Updates all optimizer shards of a rank.

    Attributes:
        first: the segments of `put_first`.
    """

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        settings: OptimizerArgs,
        plan: StatePlan,
        device: torch.device,
        ps: ParallelState,
        library: FusedLibrary | None = None,
    ):
        """Sort the segments by where they are updated.

        Args:
            library: updates the segments that the host does not; None: torch does.
        """
        self._settings, self._library = settings, library
        self._rule, self._muon = get_update_rule(settings), Muon(settings, ps)
        self._matrices = [
            (part.slot.param, segment)
            for shard in shards
            if shard.has_whole_params
            for part, segment in zip(shard.param_shards, shard.update_segments, strict=True)
        ]
        segments = [segment for shard in shards if not shard.has_whole_params for segment in shard.update_segments]
        self._on_host = [segment for segment in segments if segment.state.is_updated_on_host]
        self._on_device = sorted(
            (segment for segment in segments if not segment.state.is_updated_on_host), key=lambda segment: segment.group
        )
        self.first: list[Segment] = []
        self.host_pipeline = HostUpdatePipeline(
            device, pinned_grads=plan.pins_grads, pinned_params=plan.pins_state, overlap=plan.overlaps_copies
        )

    def put_first(self, buckets: Sequence[Bucket]) -> None:
        """Update these buckets before all others from now on."""
        bucket_ids = {id(bucket) for bucket in buckets}

        def is_first(segment: Segment) -> bool:
            return isinstance(segment.shard, FlatShard) and id(segment.shard.bucket_at(segment.start)) in bucket_ids

        self.first = [segment for segment in self._on_device if is_first(segment)]
        self._on_device = [segment for segment in self._on_device if not is_first(segment)]

    @torch.no_grad()
    def step(self, rates: Rates, factor: float, step_count: int, first_done: Callable[[], None] = lambda: None) -> None:
        """Run one step.

        Args:
            rates: returns (learning rate, weight decay) of a group.
            factor: multiplies every gradient.
            step_count: number of this step, from 1.
            first_done: called once the segments of `put_first` are updated.
        """
        self._update_on_device(self.first, rates, factor, step_count)
        first_done()
        self._update_on_device(self._on_device, rates, factor, step_count)
        self._update_matrices(rates, factor)
        self._update_on_host(rates, factor, step_count)

    def _update_on_device(self, segments: Sequence[Segment], rates: Rates, factor: float, step_count: int) -> None:
        for batch in _batch_segments(segments):
            grads = [segment.grad for segment in batch]
            values_of = self._update(batch, grads, rates(batch[0].group), step_count, factor, self._library)
            for segment, values in zip(batch, values_of):
                segment.shard.write_to_model(segment.start, segment.stop, values)

    def _update_matrices(self, rates: Rates, factor: float) -> None:
        for param, segment in self._matrices:
            main, moments = segment.load_fp32()
            self._muon.update(
                param, main, _scaled(segment.grad, factor), moments["momentum_buffer"], *rates(segment.group)
            )
            segment.shard.write_to_model(segment.start, segment.stop, segment.store_fp32(main, moments))

    def _update_on_host(self, rates: Rates, factor: float, step_count: int) -> None:
        if self._on_host:
            for segment, grad in self.host_pipeline.gradients(self._on_host):
                (values,) = self._update([segment], [grad], rates(segment.group), step_count, factor)
                if not segment.shard.has_quantized_params:
                    self.host_pipeline.send(segment.model, values)
            self.host_pipeline.finish()

    def _update(
        self,
        segments: Sequence[Segment],
        grads: list[Tensor],
        rates: tuple[float, float],
        step_count: int,
        factor: float,
        library: FusedLibrary | None = None,
    ) -> list[Tensor]:
        """Update segments of one group; return the new values of the model parameters."""
        loaded = [segment.load_fp32() for segment in segments]
        params = [param for param, _ in loaded]
        moments = {name: [moment[name] for _, moment in loaded] for name in loaded[0][1]}
        if self._rule == "adam":
            # Adam's kernel applies the factor to gradients of every dtype, on the device and on the host: numbers must
            # not depend on placement, but for the roundings of a library's kernel
            grads = _all_scaled(grads, 1.0, library)
            (torch_adam if library is None else library.adam)(
                params,
                grads,
                moments["exp_avg"],
                moments["exp_avg_sq"],
                lr=rates[0],
                betas=(self._settings.adam_beta1, self._settings.adam_beta2),
                eps=adam_eps(self._settings, segments[0].group),
                weight_decay=rates[1],
                step_count=step_count,
                factor=factor,
            )
        else:
            update = self._sgd if self._rule == "sgd" else self._lion
            update(params, _all_scaled(grads, factor, library), moments, *rates)
        return [segment.store_fp32(param, moment) for segment, (param, moment) in zip(segments, loaded)]

    def _sgd(self, params: Tensors, grads: Tensors, moments: Moments, lr: float, weight_decay: float) -> None:
        # a zeroed momentum buffer needs no special first step; without momentum the kernel rejects buffers
        momentum = self._settings.sgd_momentum
        buffers = moments["momentum_buffer"] if momentum else []
        if params[0].device.type == "cpu":
            # the fused kernel rounds the values that do not fill a vector differently: results would depend on the
            # shard borders
            grads = list(torch._foreach_add(grads, params, alpha=weight_decay)) if weight_decay else grads
            if buffers:
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, grads)
            torch._foreach_add_(params, buffers or grads, alpha=-lr)
            return
        torch._fused_sgd_(
            params,
            grads,
            buffers,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _lion(self, params: Tensors, grads: Tensors, moments: Moments, lr: float, weight_decay: float) -> None:
        """Step along the sign of a mean of gradient and momentum (Lion, arXiv 2302.06675)."""
        averages, settings = moments["exp_avg"], self._settings
        signs = [average.sign_() for average in torch._foreach_lerp(averages, grads, 1.0 - settings.lion_beta1)]
        torch._foreach_mul_(params, 1.0 - lr * weight_decay)
        torch._foreach_add_(params, signs, alpha=-lr)
        torch._foreach_lerp_(averages, grads, 1.0 - settings.lion_beta2)


def torch_adam(
    params: Tensors,
    grads: Tensors,
    averages: Tensors,
    square_averages: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step_count: int,
    factor: float,
) -> None:
    """Update as FusedLibrary.adam does, by torch's kernel."""
    # the fused kernel reads one step counter per tensor; it does not advance them
    steps = [torch.full((), float(step_count), device=params[0].device)] * len(params)
    divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, device=params[0].device)
    torch._fused_adamw_(
        params,
        grads,
        averages,
        square_averages,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )


def _scaled(grad: Tensor, factor: float) -> Tensor:
    """Return grad * factor in fp32; the same tensor if nothing changes."""
    if grad.dtype == torch.float32:
        return grad if factor == 1.0 else grad * factor
    return grad.float().mul_(factor)


def _all_scaled(grads: Sequence[Tensor], factor: float, library: FusedLibrary | None) -> list[Tensor]:
    """Return grads * factor in fp32; the same tensors where nothing changes."""
    if library is None or factor == 1.0 and all(grad.dtype == torch.float32 for grad in grads):
        return [_scaled(grad, factor) for grad in grads]
    return library.scale(grads, factor)


def _batch_segments(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Batch consecutive segments of one group, at most as many elements as the longest segment has."""
    limit = max((segment.numel for segment in segments), default=0)
    batch: list[Segment] = []
    numel = 0
    for segment in segments:
        is_full = numel + segment.numel > limit or len(batch) == _MAX_SEGMENTS_PER_CALL
        if batch and (segment.group != batch[0].group or is_full):
            yield batch
            batch, numel = [], 0
        batch.append(segment)
        numel += segment.numel
    if batch:
        yield batch

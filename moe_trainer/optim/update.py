"""The update of segments of the flat state in fp32, whatever the formats, by the rules of update_rules/.

Every segment is loaded as fp32, updated, stored, and copied to the model; gradients are unscaled and clipped on the
way. No fp32 copy outlives its segment. After a step gradients are undefined. Segments that the host updates come last,
so the device works at the same time.

Full matrices may have another rule. docs/design/optimizer.md says why a library's kernels are used and not its
optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.optim.buckets import Bucket
from moe_trainer.optim.flat_shard import FlatShard
from moe_trainer.optim.host_offload import HostUpdatePipeline
from moe_trainer.optim.optimizer_shard import OptimizerShard, UpdateSegment
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.state_plan import StatePlan
from moe_trainer.optim.update_rules.build import build_element_rule, build_matrix_rule
from moe_trainer.optim.update_rules.rule import GroupStep, scale_grad
from moe_trainer.parallel.state import ParallelState

_MAX_SEGMENTS_PER_CALL = 64  # small parameters share a kernel call

Rates = Callable[[ParamGroup], tuple[float, float]]


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
        self._library = library
        self._rule, self._matrix_rule = build_element_rule(settings), build_matrix_rule(settings, ps)
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
        self.first: list[UpdateSegment] = []
        self.host_pipeline = HostUpdatePipeline(
            device, pinned_grads=plan.pins_grads, pinned_params=plan.pins_state, overlap=plan.overlaps_copies
        )

    def describe(self, group: ParamGroup) -> dict[str, Any]:
        """Return the settings of a group that a checkpoint records."""
        return self._rule.describe(group) | ({} if self._matrix_rule is None else self._matrix_rule.describe())

    def put_first(self, buckets: Sequence[Bucket]) -> None:
        """Update these buckets before all others from now on."""
        bucket_ids = {id(bucket) for bucket in buckets}

        def is_first(segment: UpdateSegment) -> bool:
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

    def _update_on_device(
        self, segments: Sequence[UpdateSegment], rates: Rates, factor: float, step_count: int
    ) -> None:
        for batch in _batch_segments(segments):
            grads = [segment.grad for segment in batch]
            values_of = self._update(batch, grads, rates(batch[0].group), step_count, factor, self._library)
            for segment, values in zip(batch, values_of):
                segment.shard.write_to_model(segment.start, segment.stop, values)

    def _update_matrices(self, rates: Rates, factor: float) -> None:
        if self._matrix_rule is None:
            return
        for param, segment in self._matrices:
            main, moments = segment.load_fp32()
            self._matrix_rule.update(param, main, scale_grad(segment.grad, factor), moments, *rates(segment.group))
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
        segments: Sequence[UpdateSegment],
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
        step = GroupStep(segments[0].group, *rates, step_count, factor, library)
        self._rule.update(params, grads, moments, step)
        return [segment.store_fp32(param, moment) for segment, (param, moment) in zip(segments, loaded)]


def _batch_segments(segments: Sequence[UpdateSegment]) -> Iterator[list[UpdateSegment]]:
    """Batch consecutive segments of one group, at most as many elements as the longest segment has."""
    limit = max((segment.numel for segment in segments), default=0)
    batch: list[UpdateSegment] = []
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

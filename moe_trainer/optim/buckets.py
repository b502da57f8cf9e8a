"""Layout of parameters in flat buffers: buckets of parameters in reverse order of use.

Gradients become ready from the last layer to the first, so parameters are laid out in reverse: the first bucket is
complete first and can be reduced while the rest of the backward runs. The same layout serves gradients, model
parameters, main parameters and moments.

Matrices that an optimizer updates whole have separate layouts. With sharded state each rank's part of their buckets
consists of full parameters, assigned by size, so the owner of a matrix reduces, stores and updates it with the same
code as everything else. The price is a gap after the parameters of smaller parts; such a bucket closes only once its
parts are balanced. docs/design/optimizer.md has more.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.mechanisms.shardings import get_sharding
from arguments.parallel import ParallelArgs
from moe_trainer.parallel.params import get_param_info, is_quantized_param, unique_params
from moe_trainer.parallel.state import Group, ParallelState

PARAM_ALIGN = 64  # elements; aligns every parameter to a cache line and every row of a grouped GEMM
BUCKET_ALIGN = 128
MAX_IMBALANCE = 1.25  # size of a bucket of full parameters, relative to the parameters in it
HIGH_BANDWIDTH_ALIGN = 1 << 16
MIN_BUCKET_SIZE = 40_000_000
MIN_BUCKET_SIZE_PER_RANK = 1_000_000


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter at elements [start, stop) of its buffer; `position` is its index in the model."""

    param: Parameter
    position: int
    start: int
    stop: int

    @property
    def main_grad(self) -> Tensor:
        """The parameter's part of the gradient buffer, which sets it."""
        return self.param.main_grad  # type: ignore[attr-defined]

    @property
    def stored_weight(self) -> Any:
        """Values of a parameter that is stored in 8 or 4 bits: a kind of quantization.stored_weight.StoredWeight."""
        return self.param.stored_weight  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Elements [start, stop) of a buffer, divisible by the group's size; gaps between slots are zero.

    A tied parameter has a separate bucket: the stages that hold it have different layouts, but must shard it alike.
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]

    def owned_range(self, group: Group, sharded: bool) -> tuple[int, int]:
        """Return the elements whose optimizer state this rank owns: all, or its equal part if sharded."""
        if not sharded:
            return self.start, self.stop
        length = (self.stop - self.start) // group.size
        return self.start + group.rank * length, self.start + (group.rank + 1) * length


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """All parameters of one kind ("dense" or "expert") and dtype, with the groups that reduce them.

    Args:
        group: ranks that reduce the gradients and shard the state.
        outer: ranks that hold the same elements in the other instances of the distributed optimizer; gradients are
            reduced over it second.
        is_quantized: the model stores the parameters in 8 or 4 bits only (quantized_params.py).
        has_whole_params: no parameter spans two ranks' parts.
    """

    kind: str
    dtype: torch.dtype
    device: torch.device
    group: Group
    outer: Group
    buckets: tuple[Bucket, ...]
    is_quantized: bool = False
    has_whole_params: bool = False

    @property
    def size(self) -> int:
        """Number of elements of a buffer, gaps included."""
        return self.buckets[-1].stop

    @property
    def slots(self) -> Iterable[Slot]:
        return (slot for bucket in self.buckets for slot in bucket.slots)

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat buffer."""
        return torch.zeros(self.size, dtype=dtype, device=self.device)

    def flatten_params(self) -> Tensor:
        """Move the parameters into one flat buffer and make them views of it.

        NOTE: views of `param.data` taken before this no longer alias the parameter.
        """
        flat = self.allocate(self.dtype)
        for slot in self.slots:
            view = flat[slot.start : slot.stop].view(slot.param.shape)
            view.copy_(slot.param.data)
            slot.param.data = view
        return flat


def plan_layouts(
    params: Iterable[Parameter],
    ps: ParallelState,
    parallel: ParallelArgs,
    is_matrix: Callable[[Parameter], bool] = lambda param: False,
    separate: Collection[Parameter] = (),
) -> tuple[FlatLayout, ...]:
    """Lay out the parameters that need gradients, with one layout per kind, dtype, device, storage and update rule.

    Args:
        params: in order of use.
        is_matrix: whether a parameter is updated as a full matrix.
        separate: parameters that share no bucket with others.

    Raises:
        ValueError: a parameter has no ParamInfo.
    """
    is_sharded = get_sharding(parallel).shards_flat_state
    groups = _reducing_groups(ps, is_sharded)
    ordered = [param for param in unique_params(params) if param.requires_grad]
    kinds: dict[tuple[str, torch.dtype, torch.device, bool, bool], list[tuple[int, Parameter]]] = {}
    for position, param in enumerate(ordered):
        kinds.setdefault(
            (get_param_info(param).kind, param.dtype, param.device, is_quantized_param(param), is_matrix(param)), []
        ).append((position, param))
    bucket_size = _bucket_size(sum(param.numel() for param in ordered), ps.dp_cp.size, parallel)
    separate_ids = {id(param) for param in separate}
    layouts = []
    for (kind, dtype, device, is_quantized, has_whole_params), members in kinds.items():
        group, outer = groups[kind]
        # a rank's part of a bucket ends with a full byte, also with two elements in each
        align = math.lcm(group.size * (2 if is_quantized else 1), BUCKET_ALIGN)
        if parallel.ddp_pad_buckets_for_high_nccl_busbw:
            align = math.lcm(align, HIGH_BANDWIDTH_ALIGN)
        buckets = (
            _whole_param_buckets(members, bucket_size, align, group.size)
            if has_whole_params and is_sharded
            else _buckets(members, bucket_size, align, separate_ids)
        )
        layouts.append(FlatLayout(kind, dtype, device, group, outer, buckets, is_quantized, has_whole_params))
    return tuple(layouts)


def _reducing_groups(ps: ParallelState, sharded: bool) -> dict[str, tuple[Group, Group]]:
    """Return (group, outer) by kind; only sharded state has several instances."""
    if sharded:
        return {"dense": (ps.dp_cp_inner, ps.dp_cp_outer), "expert": (ps.edp_inner, ps.edp_outer)}
    return {"dense": (ps.dp_cp, Group.single("none")), "expert": (ps.edp, Group.single("none"))}


def _bucket_size(numel: int, dp_size: int, parallel: ParallelArgs) -> int | None:
    """Return the number of elements that close a bucket; None for a single bucket, without overlap."""
    if not parallel.overlap_grad_reduce:
        return None
    if parallel.ddp_num_buckets is not None:
        return max(1, numel // parallel.ddp_num_buckets)
    if parallel.ddp_bucket_size is not None:
        return parallel.ddp_bucket_size
    return max(MIN_BUCKET_SIZE, MIN_BUCKET_SIZE_PER_RANK * dp_size)


def _buckets(
    members: Sequence[tuple[int, Parameter]], bucket_size: int | None, align: int, separate_ids: Collection[int] = ()
) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    begin = end = 0

    def close() -> None:
        nonlocal slots, begin, end
        if slots:
            end = begin + _round_up(end - begin, align)
            buckets.append(Bucket(begin, end, tuple(slots)))
            slots, begin = [], end

    for position, param in reversed(members):
        is_tied = get_param_info(param).tied
        if is_tied or slots and (id(param) in separate_ids) != (id(slots[-1].param) in separate_ids):
            close()
        start = _round_up(end, PARAM_ALIGN)
        end = start + param.numel()
        slots.append(Slot(param, position, start, end))
        if is_tied or bucket_size is not None and end - begin >= bucket_size:
            close()
    close()
    return tuple(buckets)


def _whole_param_buckets(
    members: Sequence[tuple[int, Parameter]], bucket_size: int | None, align: int, owners: int
) -> tuple[Bucket, ...]:
    """Return buckets whose equal parts consist of full parameters."""
    buckets, begin = [], 0
    for portion in _balanced_portions(list(reversed(members)), bucket_size, owners):
        parts = _assign_balanced(portion, owners)
        length = _round_up(max(sum(_aligned_numel(param) for _, param in part) for part in parts), align)
        slots = []
        for owner, part in enumerate(parts):
            start = begin + owner * length
            for position, param in part:
                slots.append(Slot(param, position, start, start + param.numel()))
                start += _aligned_numel(param)
        buckets.append(Bucket(begin, begin + owners * length, tuple(slots)))
        begin += owners * length
    return tuple(buckets)


def _balanced_portions(
    members: list[tuple[int, Parameter]], bucket_size: int | None, owners: int
) -> list[list[tuple[int, Parameter]]]:
    """Split into buckets that are large enough and balanced; the last bucket takes the remainder."""
    portions, current = [], []
    for member in members:
        current.append(member)
        total = sum(_aligned_numel(param) for _, param in current)
        if bucket_size is not None and total >= bucket_size:
            longest = max(sum(_aligned_numel(param) for _, param in part) for part in _assign_balanced(current, owners))
            if longest * owners <= MAX_IMBALANCE * total:
                portions.append(current)
                current = []
    if current and portions:
        portions[-1] += current
    elif current:
        portions.append(current)
    return portions


def _assign_balanced(members: Sequence[tuple[int, Parameter]], owners: int) -> list[list[tuple[int, Parameter]]]:
    """Assign parameters, largest first, to the owner with the least load; reverse order of use per owner."""
    parts: list[list[tuple[int, Parameter]]] = [[] for _ in range(owners)]
    loads = [0] * owners
    for position, param in sorted(members, key=lambda member: (-_aligned_numel(member[1]), member[0])):
        owner = loads.index(min(loads))
        parts[owner].append((position, param))
        loads[owner] += _aligned_numel(param)
    return [sorted(part, key=lambda member: -member[0]) for part in parts]


def _aligned_numel(param: Parameter) -> int:
    return _round_up(param.numel(), PARAM_ALIGN)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

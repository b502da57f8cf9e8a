"""Where each parameter lies in flat storage: buckets of parameters in reverse order of use.

Gradients become ready from the last layer to the first, so parameters are laid out in reverse: the first bucket is
complete first and can be reduced while the rest of the backward runs. The same layout serves gradients, model
parameters, main parameters and optimizer moments, which makes every copy between them one pass over memory.

Parameters that are updated as whole matrices (optim/muon.py) have layouts of their own. Where the state is sharded, each of the equal
parts of their buckets is made of whole parameters, dealt out by size: so the owner of a matrix reduces, keeps and updates it by the
same code that shards everything else by range, and nobody else has to know. The price is the gap behind the parameters of the lesser
parts, the smaller the more matrices share a bucket; so such a bucket closes only when its parts are about even. Whole buffers that are
all-reduced, with matrices sent to everybody by their owners, were rejected: twice the traffic, and a second way to gather.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.parallel import ParallelArgs
from moe_trainer.parallel.params import info_of, is_stored, unique_params
from moe_trainer.parallel.state import Group, ParallelState

PARAM_ALIGN = 64  # elements; keeps every parameter on a cache line and every row of a grouped product aligned
BUCKET_ALIGN = 128
EVEN = 1.25  # a bucket of whole parameters is long enough when its gaps are at most a fourth of these
HIGH_BANDWIDTH_ALIGN = 1 << 16
MIN_BUCKET_SIZE = 40_000_000
MIN_BUCKET_SIZE_PER_RANK = 1_000_000


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter at elements [start, stop) of its buffer. `position` is its place in the model, first = 0."""

    param: Parameter
    position: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Bucket:
    """Elements [start, stop) of a buffer, divisible by the group's size; gaps between slots hold zeros.

    A tied parameter has a bucket of its own: the stages that hold it lay out different models, but cut this bucket alike.
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]

    def owned(self, group: Group, sharded: bool) -> tuple[int, int]:
        """The elements whose optimizer state this rank keeps: all of them, or its equal part."""
        if not sharded:
            return self.start, self.stop
        length = (self.stop - self.start) // group.size
        return self.start + group.rank * length, self.start + (group.rank + 1) * length


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """All parameters of one kind ("dense" or "expert") and dtype, with the groups that reduce them.

    Gradients are reduced over `group`, which is also what a sharded state is divided among, and then over `outer`: the ranks
    that hold the same elements in the other instances of the distributed optimizer (alone, where there is one instance). stored: the
    model keeps these weights in 8 bits (stored_state.py). whole: no parameter reaches over the end of a rank's part.
    """

    kind: str
    dtype: torch.dtype
    device: torch.device
    group: Group
    outer: Group
    buckets: tuple[Bucket, ...]
    stored: bool = False
    whole: bool = False

    @property
    def size(self) -> int:
        """Elements of a buffer with this layout, gaps included."""
        return self.buckets[-1].stop

    @property
    def slots(self) -> Iterable[Slot]:
        return (slot for bucket in self.buckets for slot in bucket.slots)

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer."""
        return torch.zeros(self.size, dtype=dtype, device=self.device)

    def flatten_params(self) -> Tensor:
        """Move the parameters into one flat buffer, of which they become views.

        NOTE: views of `param.data` taken before this no longer alias the parameter.
        """
        flat = self.allocate(self.dtype)
        for slot in self.slots:
            view = flat[slot.start:slot.stop].view(slot.param.shape)
            view.copy_(slot.param.data)
            slot.param.data = view
        return flat


def plan_layouts(params: Iterable[Parameter], ps: ParallelState, parallel: ParallelArgs,
                 whole: Callable[[Parameter], bool] = lambda param: False, apart: Collection[Parameter] = ()) -> tuple[FlatLayout, ...]:
    """Lay out the parameters that need gradients, one layout per kind, dtype, device, and way of keeping and updating them.

    `params` come in order of use. whole: which are updated as whole matrices. apart: parameters that share no bucket with others.
    Raises: ValueError when one carries no ParamInfo.
    """
    groups = _reducing_groups(ps, parallel.use_distributed_optimizer)
    ordered = [param for param in unique_params(params) if param.requires_grad]
    kinds: dict[tuple[str, torch.dtype, torch.device, bool, bool], list[tuple[int, Parameter]]] = {}
    for position, param in enumerate(ordered):
        kinds.setdefault((info_of(param).kind, param.dtype, param.device, is_stored(param), whole(param)), []).append((position, param))
    bucket_size = _bucket_size(sum(param.numel() for param in ordered), ps.dp_cp.size, parallel)
    apart_ids = {id(param) for param in apart}
    layouts = []
    for (kind, dtype, device, stored, as_matrices), members in kinds.items():
        group, outer = groups[kind]
        align = math.lcm(group.size, BUCKET_ALIGN)
        if parallel.ddp_pad_buckets_for_high_nccl_busbw:
            align = math.lcm(align, HIGH_BANDWIDTH_ALIGN)
        sharded = parallel.use_distributed_optimizer
        buckets = _dealt_buckets(members, bucket_size, align, group.size) if as_matrices and sharded else _buckets(members, bucket_size, align, apart_ids)
        layouts.append(FlatLayout(kind, dtype, device, group, outer, buckets, stored, as_matrices))
    return tuple(layouts)


def _reducing_groups(ps: ParallelState, sharded: bool) -> dict[str, tuple[Group, Group]]:
    """(group, outer) of each kind; only a sharded state has instances."""
    if sharded:
        return {"dense": (ps.dp_cp_inner, ps.dp_cp_outer), "expert": (ps.edp_inner, ps.edp_outer)}
    return {"dense": (ps.dp_cp, Group.single("none")), "expert": (ps.edp, Group.single("none"))}


def _bucket_size(numel: int, dp_size: int, parallel: ParallelArgs) -> int | None:
    """Elements after which a bucket closes; None: a single bucket, since nothing overlaps."""
    if not parallel.overlap_grad_reduce:
        return None
    if parallel.ddp_num_buckets is not None:
        return max(1, numel // parallel.ddp_num_buckets)
    if parallel.ddp_bucket_size is not None:
        return parallel.ddp_bucket_size
    return max(MIN_BUCKET_SIZE, MIN_BUCKET_SIZE_PER_RANK * dp_size)


def _buckets(members: Sequence[tuple[int, Parameter]], bucket_size: int | None, align: int, apart_ids: Collection[int] = ()) -> tuple[Bucket, ...]:
    buckets, slots, begin, end = [], [], 0, 0

    def close() -> None:
        nonlocal slots, begin, end
        if slots:
            end = begin + _round_up(end - begin, align)
            buckets.append(Bucket(begin, end, tuple(slots)))
            slots, begin = [], end

    for position, param in reversed(members):
        alone = info_of(param).tied
        if alone or slots and (id(param) in apart_ids) != (id(slots[-1].param) in apart_ids):
            close()
        start = _round_up(end, PARAM_ALIGN)
        end = start + param.numel()
        slots.append(Slot(param, position, start, end))
        if alone or bucket_size is not None and end - begin >= bucket_size:
            close()
    close()
    return tuple(buckets)


def _dealt_buckets(members: Sequence[tuple[int, Parameter]], bucket_size: int | None, align: int, owners: int) -> tuple[Bucket, ...]:
    """Buckets whose equal parts consist of whole parameters."""
    buckets, begin = [], 0
    for portion in _even_portions(list(reversed(members)), bucket_size, owners):
        parts = _deal(portion, owners)
        length = _round_up(max(sum(_room(param) for _, param in part) for part in parts), align)
        slots = []
        for owner, part in enumerate(parts):
            start = begin + owner * length
            for position, param in part:
                slots.append(Slot(param, position, start, start + param.numel()))
                start += _room(param)
        buckets.append(Bucket(begin, begin + owners * length, tuple(slots)))
        begin += owners * length
    return tuple(buckets)


def _even_portions(members: list[tuple[int, Parameter]], bucket_size: int | None, owners: int) -> list[list[tuple[int, Parameter]]]:
    """Cut into buckets that are large enough and can be dealt out about evenly; the last one takes what would not be."""
    portions, open_one = [], []
    for member in members:
        open_one.append(member)
        total = sum(_room(param) for _, param in open_one)
        if bucket_size is not None and total >= bucket_size:
            longest = max(sum(_room(param) for _, param in part) for part in _deal(open_one, owners))
            if longest * owners <= EVEN * total:
                portions.append(open_one)
                open_one = []
    if open_one and portions:
        portions[-1] += open_one
    elif open_one:
        portions.append(open_one)
    return portions


def _deal(members: Sequence[tuple[int, Parameter]], owners: int) -> list[list[tuple[int, Parameter]]]:
    """The largest first, each to whoever has least; in order of use backwards for each owner."""
    parts: list[list[tuple[int, Parameter]]] = [[] for _ in range(owners)]
    loads = [0] * owners
    for position, param in sorted(members, key=lambda member: (-_room(member[1]), member[0])):
        owner = loads.index(min(loads))
        parts[owner].append((position, param))
        loads[owner] += _room(param)
    return [sorted(part, key=lambda member: -member[0]) for part in parts]


def _room(param: Parameter) -> int:
    return _round_up(param.numel(), PARAM_ALIGN)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

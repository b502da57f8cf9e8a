"""Rank grids, without torch.

There are two grids over the same ranks: the dense one (tp, cp, dp, pp) and the expert one (etp, ep, edp, pp), which
folds expert parallelism over the ranks of tp, cp and dp. The order string lists the axes, fastest varying first, as in
Megatron. A group along some axes is the set of ranks with equal coordinates on all other axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
LAYOUT_SIZES = ("tp", "cp", "pp", "ep", "etp", "order")
"""What make_layout takes, besides the number of ranks."""


@dataclass(frozen=True)
class Grid:
    """Ranks 0 .. size-1 over named axes, the first axis varying fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        position = {}
        for axis, size in zip(self.axes, self.sizes):
            position[axis] = rank % size
            rank //= size
        return position

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Partition the ranks into groups along `axes`, ordered by their first rank, members ascending."""
        unknown = set(axes) - set(self.axes)
        assert not unknown, f"axes {sorted(unknown)} are not in the grid {self.axes}"
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            rest, key = rank, []
            for axis, size in zip(self.axes, self.sizes):
                if axis not in axes:
                    key.append(rest % size)
                rest //= size
            members.setdefault(tuple(key), []).append(rank)
        return tuple(sorted(tuple(group) for group in members.values()))


def make_grid(order: str, sizes: Mapping[str, int]) -> Grid:
    """Return the grid of an order string; axes that `sizes` does not name have size one.

    Raises:
        ValueError: for an order that lacks an axis of `sizes`, repeats one, or has an unknown one.
    """
    names = order.split("-")
    if len(set(names)) != len(names) or not set(names) <= set(AXES):
        raise ValueError(f"rank order {order!r}: each of {'-'.join(AXES)} at most once")
    missing = [axis for axis, size in sizes.items() if axis not in names and size != 1]
    if missing:
        raise ValueError(f"rank order {order!r} lacks {', '.join(missing)}, whose size is not 1")
    return Grid(tuple(names), tuple(sizes.get(axis, 1) for axis in names))


@dataclass(frozen=True)
class Layout:
    """The dense and the expert grid over the same ranks."""

    dense: Grid
    expert: Grid

    def size(self, axis: str) -> int:
        """Return the size of an axis: tp cp dp pp of the dense grid, etp ep edp of the expert grid."""
        grid, name = _locate(self, axis)
        return grid.sizes[grid.axes.index(name)]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups along axes, all of the same grid ("pp" is in both)."""
        expert = any(axis in ("etp", "ep", "edp") for axis in axes)
        grid = self.expert if expert else self.dense
        return grid.groups(*(_locate(self, axis)[1] for axis in axes))

    def instances(self, which: str, count: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Split every data-parallel group ("dp_cp" or "edp") into `count` instances of the distributed optimizer.

        Returns: (the instances, the groups of ranks with the same position in all instances).
        """
        groups = self.groups(*(("dp", "cp") if which == "dp_cp" else ("edp",)))
        ranks = len(groups[0])
        if ranks % count:
            raise ValueError(
                f"{count} instances of the distributed optimizer do not divide the {ranks} ranks of {which}"
            )
        return split_groups(groups, ranks // count)


def split_groups(
    groups: Sequence[tuple[int, ...]], length: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Split every group into subgroups of `length` consecutive members.

    Returns: (the subgroups, the groups of ranks with the same position in all subgroups of a group).
    """
    inner, outer = [], []
    for ranks in groups:
        inner += [ranks[start : start + length] for start in range(0, len(ranks), length)]
        outer += [ranks[position::length] for position in range(length)]
    return tuple(sorted(inner)), tuple(sorted(outer))


def _locate(layout: Layout, axis: str) -> tuple[Grid, str]:
    if axis in ("etp", "ep", "edp"):
        return layout.expert, {"etp": "tp", "ep": "ep", "edp": "dp"}[axis]
    return layout.dense, axis


def make_layout(
    world_size: int, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, order: str = DEFAULT_ORDER
) -> Layout:
    """Return the dense grid tp x cp x dp x pp and the expert grid etp x ep x edp x pp over `world_size` ranks.

    Raises:
        ValueError: if a size does not divide the world size, or if the pipelines of the two grids differ.
    """
    for name, size in (("world_size", world_size), ("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep), ("etp", etp)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if world_size % (tp * cp * pp):
        raise ValueError(f"world size {world_size} is not divisible by tp*cp*pp = {tp}*{cp}*{pp} = {tp * cp * pp}")
    if world_size % (etp * ep * pp):
        raise ValueError(f"world size {world_size} is not divisible by etp*ep*pp = {etp}*{ep}*{pp} = {etp * ep * pp}")
    dp, edp = world_size // (tp * cp * pp), world_size // (etp * ep * pp)
    layout = Layout(
        make_grid(order, {"tp": tp, "cp": cp, "dp": dp, "pp": pp}),
        make_grid(order, {"tp": etp, "ep": ep, "dp": edp, "pp": pp}),
    )
    if layout.dense.groups("pp") != layout.expert.groups("pp"):
        raise ValueError(
            f"rank order {order!r}: dense (dp {dp}) and expert (edp {edp}) pipelines would differ; "
            "with this order the two data-parallel sizes must be equal"
        )
    return layout

"""Rank arithmetic: which ranks form which group. Pure integers, no torch.

All ranks stand in a grid with one axis per kind of parallelism; the order string lists the axes from the fastest
varying one, as Megatron does. There are two grids over the same ranks: the dense one (tp, cp, dp, pp) and the expert
one (etp, ep, edp, pp), which folds expert parallelism over whatever the dense side uses as tp, cp and dp. A group
along some axes is the set of ranks that agree on all other axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Grid:
    """Ranks 0 .. size-1 laid out over named axes, the first axis varying fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on every axis."""
        position = {}
        for axis, size in zip(self.axes, self.sizes):
            position[axis] = rank % size
            rank //= size
        return position

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Partition the ranks into groups that vary along `axes` only.

        Returns: groups in order of their first rank, members ascending (that is: in grid order).
        """
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
    """Lay out ranks in `order`; axes that `sizes` does not name have size one and are left out of the arithmetic.

    Raises: ValueError when the order misses an axis of `sizes`, names one twice, or names an unknown one.
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
    """Both factorizations of one world."""

    dense: Grid
    expert: Grid

    def size(self, axis: str) -> int:
        """Extent of an axis by its global name: tp cp dp pp of the dense grid, etp ep edp of the expert grid."""
        grid, name = _locate(self, axis)
        return grid.sizes[grid.axes.index(name)]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Groups along axes given by their global names, all of one side ("pp" belongs to both)."""
        expert = any(axis in ("etp", "ep", "edp") for axis in axes)
        grid = self.expert if expert else self.dense
        return grid.groups(*(_locate(self, axis)[1] for axis in axes))

    def instances(self, which: str, count: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Cut every data-parallel group ("dp_cp" or "edp") into `count` runs of consecutive members.

        Returns: (the runs, the ranks that stand at the same place of all runs of one group).
        Raises: ValueError when the groups cannot be cut so.
        """
        groups = self.groups(*(("dp", "cp") if which == "dp_cp" else ("edp",)))
        ranks = len(groups[0])
        if ranks % count:
            raise ValueError(
                f"{count} instances of the distributed optimizer do not divide the {ranks} ranks of {which}"
            )
        return cut_groups(groups, ranks // count)


def cut_groups(
    groups: Sequence[tuple[int, ...]], length: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Cut every group, whose size `length` divides, into runs of consecutive members.

    Returns: (the runs, the ranks that stand at the same place of all runs of one group).
    """
    inner, outer = [], []
    for ranks in groups:
        inner += [ranks[start : start + length] for start in range(0, len(ranks), length)]
        outer += [ranks[place::length] for place in range(length)]
    return tuple(sorted(inner)), tuple(sorted(outer))


def _locate(layout: Layout, axis: str) -> tuple[Grid, str]:
    if axis in ("etp", "ep", "edp"):
        return layout.expert, {"etp": "tp", "ep": "ep", "edp": "dp"}[axis]
    return layout.dense, axis


def make_layout(
    world_size: int, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, order: str = DEFAULT_ORDER
) -> Layout:
    """Fold the dense grid tp x cp x dp x pp and the expert grid etp x ep x edp x pp over `world_size` ranks.

    Raises: ValueError when a size does not divide the world, or when the two grids disagree about the pipeline.
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

"""The process groups of a layout, without torch."""

from collections.abc import Collection, Mapping, Sequence

from moe_trainer.parallel.grid import Layout, split_groups

# field of ParallelState, its axes, its lane (groups of a lane with the same ranks share a communicator)
_GROUPS = (
    ("dp", ("dp",), "gradients"),
    ("dp_cp", ("dp", "cp"), "gradients"),
    ("edp", ("edp",), "gradients"),
    ("tp", ("tp",), "tensor"),
    ("cp", ("cp",), "context"),
    ("pp", ("pp",), "pipeline"),
    ("tp_cp", ("tp", "cp"), "statistics"),
    ("tp_dp_cp", ("tp", "dp", "cp"), "statistics"),
    ("etp", ("etp",), "expert tensor"),
    ("ep", ("ep",), "expert"),
    ("tp_ep", ("etp", "ep"), "expert"),
)

DYNAMIC_CP, DYNAMIC_TP_CP = "dynamic_cp_", "dynamic_tp_cp_"
"""Names of the groups of dynamic context parallelism, without their sizes."""


def plan_groups(
    layout: Layout,
    *,
    optimizer_instances: int = 1,
    embedding_stages: Collection[int] | None = None,
    cp_levels: Sequence[int] | None = None,
    second_pipeline: bool = False,
    ranks_per_node: int | None = None,
    dynamic_cp_sizes: Sequence[int] = (),
) -> dict[str, tuple[tuple[tuple[int, ...], ...], str]]:
    """Return name -> (partition of the ranks into groups, lane).

    Args:
        optimizer_instances: dp_cp and edp are split into so many instances of the distributed optimizer.
        embedding_stages: pipeline ranks with the word embeddings; default: the first and the last.
        cp_levels: sizes of cp_a2a and cp_p2p; default: 1 and cp.
        second_pipeline: create a separate communicator for pp_second.
        ranks_per_node: consecutive ranks with fast links between them, for ep_intra and ep_inter; default: all ranks.
        dynamic_cp_sizes: numbers of consecutive ranks of dp_cp that may share sequences; each has a group
            dynamic_cp_SIZE, and dynamic_tp_cp_SIZE with the tensor ranks.

    Raises:
        ValueError: optimizer_instances or cp_levels do not fit the layout.
    """
    cp = layout.size("cp")
    plans = {name: (layout.groups(*axes), lane) for name, axes, lane in _GROUPS}
    for name in ("dp_cp", "edp"):
        inner, outer = layout.instances(name, optimizer_instances)
        plans[f"{name}_inner"], plans[f"{name}_outer"] = (inner, "gradients"), (outer, "gradients")
    a2a_size, p2p_size = cp_levels or (1, cp)
    if a2a_size * p2p_size != cp:
        raise ValueError(f"hierarchical context-parallel sizes {a2a_size} * {p2p_size} are not cp = {cp}")
    inner, outer = split_groups(layout.groups("cp"), a2a_size)
    plans["cp_a2a"], plans["cp_p2p"] = (inner, "context"), (outer, "context")
    ep_groups = layout.groups("ep")
    inner, outer = split_groups(ep_groups, _members_per_node(ep_groups, ranks_per_node or layout.dense.size))
    plans["ep_intra"], plans["ep_inter"] = (inner, "expert"), (outer, "expert")
    plans["pp_second"] = layout.groups("pp"), "second pipeline" if second_pipeline else "pipeline"
    dp_cp, tp_groups = layout.groups("dp", "cp"), {ranks[0]: ranks for ranks in layout.groups("tp")}
    for size in dynamic_cp_sizes:
        shares, _ = split_groups(dp_cp, size)
        plans[f"{DYNAMIC_CP}{size}"] = shares, "context"
        together = (
            tuple(sorted(rank for first in share for rank in tp_groups[first]))
            for share in shares
            if share[0] in tp_groups
        )
        plans[f"{DYNAMIC_TP_CP}{size}"] = tuple(sorted(together)), "statistics"
    plans["embedding"] = (_embedding_groups(layout, embedding_stages), "embedding")
    return plans


def _members_per_node(groups: Sequence[Sequence[int]], ranks_per_node: int) -> int:
    """Return the largest length by which all groups can be split into equal parts, each inside one node."""
    size = len(groups[0])
    return next(
        length
        for length in range(size, 0, -1)
        if size % length == 0
        and all(
            ranks[start] // ranks_per_node == ranks[start + length - 1] // ranks_per_node
            for ranks in groups
            for start in range(0, size, length)
        )
    )


def group_table(plans: Mapping[str, tuple[Sequence[Sequence[int]], str]]) -> str:
    """Return one line per group name: number of groups, their size, and their ranks ("0-12/4": every fourth)."""
    lines, width = [], max(12, *map(len, plans))
    for name, (groups, _) in plans.items():
        sizes = sorted({len(ranks) for ranks in groups})
        shown = "each rank alone" if sizes == [1] else " ".join(f"[{_format_ranks(ranks)}]" for ranks in groups)
        lines.append(f"  {name:{width}s} {len(groups):4d} x {'/'.join(map(str, sizes)):<4s} {shown}")
    return "\n".join(lines)


def _format_ranks(ranks: Sequence[int]) -> str:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) < 3 or list(ranks) != list(range(ranks[0], ranks[-1] + 1, step)):
        return " ".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")


def _embedding_groups(layout: Layout, stages: Collection[int] | None) -> tuple[tuple[int, ...], ...]:
    groups = []
    for pipeline in layout.groups("pp"):
        members = {0, len(pipeline) - 1} if stages is None else set(stages)
        assert members <= set(range(len(pipeline))), f"embedding stages {sorted(members)} of {len(pipeline)}"
        groups.append(tuple(rank for stage, rank in enumerate(pipeline) if stage in members))
        groups.extend((rank,) for stage, rank in enumerate(pipeline) if stage not in members)
    return tuple(sorted(group for group in groups if group))

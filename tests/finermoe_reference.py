"""FineRMoE's choice of experts by its definition, for the reference of a MoE transformer (reference.py)."""

from dataclasses import dataclass


@dataclass
class Grid:
    """Experts (i, j, m): number m of group j for slice i."""

    slices: int
    groups: int
    size: int
    topk: int
    projection = "concat_proj"

    def choose(self, logits: list[float]) -> list[int]:
        """Return per slice the group with the largest sum of logits, and in it the largest logits."""
        chosen = []
        for i in range(self.slices):
            starts = [(i * self.groups + j) * self.size for j in range(self.groups)]
            start = max(starts, key=lambda start: sum(logits[start : start + self.size]))
            best = sorted(range(start, start + self.size), key=lambda expert: -logits[expert])
            chosen += best[: self.topk // self.slices]
        return chosen


def find_grid(moe) -> Grid | None:
    """Return the grid of the flags; None without FineRMoE."""
    slices, pieces = moe.finermoe_output_granularity, moe.finermoe_intermediate_granularity
    if slices is None:
        return None
    groups, copies = moe.finermoe_output_expansion or slices, moe.finermoe_intermediate_expansion or pieces
    return Grid(slices, groups, pieces * copies, moe.moe_router_topk)

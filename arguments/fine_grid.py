"""How FineRMoE lays out its experts."""

from typing import NamedTuple


class FineGrid(NamedTuple):
    """Experts as [slices, candidates, group_size], the last fastest.

    Each slice of the output comes from one of its candidate groups of experts. Source: arXiv 2603.13364.
    """

    slices: int
    candidates: int
    group_size: int

    @property
    def num_experts(self) -> int:
        """All of them."""
        return self.slices * self.candidates * self.group_size

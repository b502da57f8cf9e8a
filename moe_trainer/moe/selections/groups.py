"""Groups of experts: a token chooses experts of its best groups only.

Shape letters: T tokens, E experts, G groups, M experts per group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited choice.

    Attributes:
        number: of groups.
        topk: groups per token.
        scored: experts whose scores sum to that of their group.
    """

    number: int
    topk: int
    scored: int

    def mask_to_best(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return group scores TG, and expert scores TE with -inf outside the best groups.

        Source: DeepSeek-V2, section 2.1.3 (a group's score is its best one); DeepSeek-V3, section 2.1.2 (the sum of
        top-k / groups of them).
        """
        scores_TGM = scores_TE.view(scores_TE.shape[0], self.number, -1)
        group_scores_TG = scores_TGM.topk(self.scored, dim=-1)[0].sum(-1)
        best_TG = group_scores_TG.topk(self.topk, dim=-1, sorted=False)[1]
        outside_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, best_TG, False)
        return group_scores_TG, scores_TGM.masked_fill(outside_TG.unsqueeze(-1), float("-inf")).flatten(1)


def make_groups(topk: int, number: int | None, group_topk: int | None, scored: int | None) -> ExpertGroups | None:
    """Return the groups of a choice of `topk` experts, None without --moe-router-group-topk; `scored`: as the flag."""
    return ExpertGroups(number, group_topk, scored or topk // group_topk) if number and group_topk else None

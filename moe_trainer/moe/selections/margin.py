"""The margin of a router's decisions: whether rounding could change them (verification/compare_records.py).

Shapes: T tokens, E experts, G groups, M experts per group, K sorted scores.
"""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.moe.selections.groups import ExpertGroups

_MAX_SLOPE = MappingProxyType({"sigmoid": 0.25, "sqrtsoftplus": 0.32})  # of a score over its logit


@torch.no_grad()
def compute_routing_margin(
    logits_TE: Tensor,
    topk: int,
    score_function: str,
    groups: ExpertGroups | None = None,
    expert_bias_E: Tensor | None = None,
) -> Tensor:
    """Return the lead of the last selected expert (and group) over the next one, [T] fp32; 0 is a tie.

    It is a lower bound of the change of logits that changes the selection, divided by the token's RMS logit.
    """

    def lead(sorted_TK: Tensor, rank: int) -> Tensor:
        return (
            sorted_TK[:, rank - 1] - sorted_TK[:, rank]
            if rank < sorted_TK.shape[1]
            else torch.full_like(sorted_TK[:, 0], float("inf"))
        )

    logits_TE = logits_TE.float()
    if score_function == "softmax" and expert_bias_E is not None:
        return _biased_share_margin(logits_TE, topk, expert_bias_E) / _size(logits_TE)
    if score_function == "softmax":
        scores_TE, slope = (logits_TE if groups is None else torch.softmax(logits_TE, dim=-1)), 1.0
    else:
        scores_TE = torch.sigmoid(logits_TE) if score_function == "sigmoid" else F.softplus(logits_TE).sqrt()
        scores_TE, slope = (
            (scores_TE if expert_bias_E is None else scores_TE + expert_bias_E),
            _MAX_SLOPE[score_function],
        )
    if groups is None:
        margin_T = lead(scores_TE.sort(dim=-1, descending=True)[0], topk) / slope
    else:
        groups_TG, masked_TE = groups.mask_to_best(scores_TE)
        sums_TG, best_TE = groups_TG.sort(dim=-1, descending=True)[0], masked_TE.sort(dim=-1, descending=True)[0]
        if score_function == "softmax":  # a share changes by itself times the change of its logit
            margin_T = torch.minimum(lead(best_TE.clamp(min=0.0).log(), topk), lead(sums_TG.log(), groups.topk))
        else:
            margin_T = torch.minimum(lead(best_TE, topk), lead(sums_TG, groups.topk) / groups.scored) / slope
    return margin_T / _size(logits_TE)


def _size(logits_TE: Tensor) -> Tensor:
    return logits_TE.square().mean(-1).sqrt().clamp(min=1e-30)


def _biased_share_margin(logits_TE: Tensor, topk: int, expert_bias_E: Tensor) -> Tensor:
    """Return the change of logits until a share plus its bias reaches the middle between the chosen and the others.

    If no logit changes by more than half of x, a share changes by a factor between exp(-x) and exp(x).
    """
    shares_TE = torch.softmax(logits_TE, dim=-1)
    keys_TE = shares_TE + expert_bias_E
    if topk == keys_TE.shape[1]:
        return torch.full_like(keys_TE[:, 0], float("inf"))
    best_TK = keys_TE.topk(topk + 1, dim=-1)[0]
    middle_T1 = best_TK[:, -2:].mean(-1, keepdim=True)
    distance_TE = (keys_TE - middle_T1) / shares_TE.clamp(min=1e-30)
    fall_TE = -torch.log1p(-distance_TE.clamp(max=1.0))  # infinite if the bias alone is above
    return torch.where(keys_TE > middle_T1, fall_TE, torch.log1p(-distance_TE.clamp(max=0.0))).amin(-1)

"""The routing margin: no smaller change of the logits changes the selected experts, and one of that size can."""

import pytest
import torch

from moe_trainer.moe.selections.groups import make_groups
from moe_trainer.moe.selections.margin import compute_routing_margin
from moe_trainer.moe.selections.topk import score_topk

CASES = {
    "softmax": {},
    "softmax before": {"pre_softmax": True},
    "softmax, groups": {"pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "softmax, groups by their best": {"pre_softmax": True, "num_groups": 4, "group_topk": 2, "group_score_topk": 1},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, groups, bias": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "bias": True},
    "softmax, bias": {"score_function": "softmax", "bias": True},
    "sqrtsoftplus, bias": {"score_function": "sqrtsoftplus", "bias": True},
}


@pytest.mark.parametrize("case", CASES)
def test_margin_is_the_smallest_change_that_alters_routing(case):
    options = {"score_function": "softmax", "num_groups": None, "group_topk": None, **CASES[case]}
    generator = torch.Generator().manual_seed(3)
    logits_TE = torch.randn(500, 16, generator=generator, dtype=torch.float64)
    bias_E = 0.1 * torch.randn(16, generator=generator) if options.pop("bias", False) else None
    pre_softmax = options.pop("pre_softmax", False)

    def choice(x_TE):
        return score_topk(x_TE, 4, pre_softmax=pre_softmax, expert_bias_E=bias_E, **options)[1]

    groups = make_groups(4, options["num_groups"], options["group_topk"], options.get("group_score_topk"))
    margin_T = compute_routing_margin(logits_TE, 4, options["score_function"], groups, bias_E)
    assert margin_T.shape == (500,) and margin_T.dtype == torch.float32 and (margin_T >= 0).all()
    largest_T = (
        margin_T.double() * logits_TE.square().mean(-1).sqrt() / 2
    )  # of one logit: two may go against each other
    for _ in range(20):
        change_TE = (torch.rand(logits_TE.shape, generator=generator, dtype=torch.float64) * 2 - 1) * 0.999
        assert torch.equal(choice(logits_TE + change_TE * largest_T[:, None]), choice(logits_TE))
    turned = [
        (choice(logits_TE + change_TE.sign() * largest_T[:, None] * 3) != choice(logits_TE)).any(-1)
        for change_TE in torch.randn(20, *logits_TE.shape, generator=generator, dtype=torch.float64)
    ]
    assert torch.stack(turned).any(0).float().mean() > 0.5


def test_margin_is_zero_for_ties_and_infinite_for_all_experts():
    logits_TE = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert compute_routing_margin(logits_TE, 1, "softmax").item() == 0.0 and compute_routing_margin(
        logits_TE, 4, "sigmoid"
    ).item() == float("inf")

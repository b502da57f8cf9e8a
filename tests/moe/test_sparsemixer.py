"""SparseMixer's weights: those of transformers."""

import pytest
import torch

from moe_trainer.moe.selections.selection import RoutingInputs
from moe_trainer.moe.selections.sparsemixer import SparseMixer
from moe_trainer.moe.selections.topk import TopKSelection


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.15, 5.0])
def test_sparsemixer_weights_and_gradients_are_those_of_transformers(jitter):
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe")
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:20] -= 5.0  # all negative: the distance is relative to the other logit
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    probs, routing = TopKSelection(2, SparseMixer(jitter)).route(ours, None, RoutingInputs())
    weights, chosen = phimoe.sparsemixer(theirs, jitter, training=False)
    expected = torch.zeros_like(logits).scatter(1, chosen, weights)
    assert torch.equal(routing, expected.detach() > 0)
    torch.testing.assert_close(probs, expected, rtol=1e-12, atol=0)
    factors = torch.randn(200, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (probs * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    assert (theirs.grad.abs().max() > 0.01) == (jitter > 0)  # alone, an expert has weight 1


def test_sparsemixer_with_a_scaling_factor_and_logits_of_zero():
    selection = TopKSelection(2, SparseMixer(0.1, factor=1.5))
    probs, routing = selection.route(torch.zeros(3, 4), None, RoutingInputs())
    torch.testing.assert_close(probs[routing].view(3, 2), torch.tensor([[1.5 / 4, 1.5 / 3]]).expand(3, 2))

"""Cross entropy in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.ops import cross_entropy as plain
from moe_trainer.ops import triton_cross_entropy

SIZES = [(1, 1), (3, 17), (5, 4096), (4, 9001), (0, 32)]


def case(tokens: int, columns: int, dtype: torch.dtype):
    logits = torch.randn(tokens, columns, dtype=dtype) * 4
    return logits, torch.randint(columns, (tokens,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens,columns", SIZES)
def test_softmax_and_gradient_in_place(tokens, columns, dtype):
    logits, labels = case(tokens, columns, dtype)
    factor, at_label, mine = (
        torch.randn(tokens, dtype=dtype),
        torch.randn(tokens, dtype=dtype),
        torch.rand(tokens) < 0.5,
    )
    results = []
    for module in (triton_cross_entropy, plain):
        probs = logits.clone()
        log_sum_exp, target = module.softmax_in_place(probs, labels)
        full, part = probs.clone(), probs.clone()
        module.gradient_in_place(full, labels, factor, at_label)
        module.gradient_in_place(part, labels, factor, at_label, mine)
        results.append((log_sum_exp, target, probs, full, part))
    near = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize("tokens,columns", SIZES)
def test_loss_and_gradient_from_logits(tokens, columns):
    logits, labels = case(tokens, columns, torch.float64)
    results = []
    for function in (
        triton_cross_entropy.cross_entropy,
        lambda x, y: torch.nn.functional.cross_entropy(x, y, reduction="none"),
    ):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels)
        loss.backward(torch.linspace(0.5, 2.0, tokens, dtype=torch.float64))
        results.append((loss, leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_vocabulary_shards_merge_into_the_full_tensor():
    logits, labels = case(6, 50, torch.float64)
    kept = logits.clone()
    pieces = [
        triton_cross_entropy.vocabulary_pieces(part, torch.zeros(6, dtype=torch.int64))
        for part in logits.split(20, dim=1)
    ]
    largest = torch.stack([top for top, _, _ in pieces]).amax(0)
    total = sum(amount * (top - largest).exp() for top, amount, _ in pieces)
    torch.testing.assert_close(largest + total.log(), logits.logsumexp(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pieces[1][2], logits[:, 20])
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("label", [-1, 7, 100])
def test_label_out_of_range_gives_nan_without_reading(label):
    logits = torch.randn(2, 7)
    _, target = triton_cross_entropy.softmax_in_place(logits, torch.tensor([label, 3]))
    assert target.isnan().tolist() == [True, False]


def test_columns_of_negative_infinity_give_no_nan():
    """Padded vocabulary may be masked that way; a whole block of it must not give NaN."""
    logits, labels = torch.randn(3, 9000), torch.tensor([8999, 4500, 8000])
    logits[:, :4200] = float("-inf")
    log_sum_exp, _ = triton_cross_entropy.softmax_in_place(probs := logits.clone(), labels)
    torch.testing.assert_close(log_sum_exp, logits.logsumexp(1))
    torch.testing.assert_close(probs, logits.softmax(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("columns", [17, 9001])
def test_logits_that_are_not_finite_make_their_tokens_loss_nan(columns, value):
    """As in torch: loss, probabilities and gradient of this token, and no other's."""
    logits, labels = case(3, columns, torch.float32)
    logits[1, columns // 2] = value
    results = []
    for module in (triton_cross_entropy, plain):
        probs = logits.clone()
        log_sum_exp, target = module.softmax_in_place(probs, labels)
        loss, grad = log_sum_exp - target, probs.clone()
        module.gradient_in_place(grad, labels, torch.ones(3), torch.expm1(-loss))
        results.append((loss, probs, grad))
    assert results[0][0].isfinite().tolist() == [True, False, True] and results[0][2][1].isnan().all()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours[[0, 2]], theirs[[0, 2]], rtol=2e-5, atol=2e-6)
        assert theirs[1].isnan().any()


def test_fp16_probabilities_are_stored_scaled():
    logits, labels = case(4, 300, torch.float16)
    results = []
    for module in (triton_cross_entropy, plain):
        probs = logits.clone()
        module.softmax_in_place(probs, labels)
        kept = probs.clone()
        module.gradient_in_place(probs, labels, torch.ones(4), torch.zeros(4))
        results.append((kept.float(), probs.float()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-6)

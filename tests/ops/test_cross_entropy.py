"""The fused projection and loss against torch's cross entropy."""

import math

import pytest
import torch
import torch.nn.functional as F

from moe_trainer.ops import cross_entropy, logit_chunks
from moe_trainer.ops.cross_entropy import linear_cross_entropy


@pytest.fixture(params=[1 << 18, 40])
def block_numel(request, monkeypatch):
    """One block, and blocks of a few rows with a short last one."""
    monkeypatch.setattr(cross_entropy, "BLOCK_NUMEL", request.param)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_fused_cross_entropy_equals_torch(block_numel, dtype, tolerance):
    x, weight, labels = torch.randn(7, 2, 16).to(dtype), torch.randn(24, 16).to(dtype), torch.randint(24, (7, 2))
    mask = torch.rand(7, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    ours, theirs = ([t.detach().clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    loss = linear_cross_entropy(*ours, labels)
    logits = F.linear(*theirs)
    logits = logits.float() if dtype == torch.bfloat16 else logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(7, 2)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    (loss * mask).sum().backward()
    (expected * mask).sum().backward()
    for a, b in zip(ours, theirs):
        assert a.grad.dtype == dtype
        assert (a.grad - b.grad).float().norm() <= tolerance * b.grad.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_a_nearly_certain_label_is_accurate(dtype):
    """p = 0.9995: computed from rounded probabilities, p - 1 would be wrong in its first digit."""
    x = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[8.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=dtype)
    linear_cross_entropy(x, weight, torch.tensor([0])).sum().backward()
    wide = x.detach().double().requires_grad_()
    F.cross_entropy(wide @ weight.double().t(), torch.tensor([0])).backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=2e-2, atol=1e-6)


def test_fp16_keeps_small_probabilities():
    x = torch.tensor([[1.0]], dtype=torch.float16)
    weight = torch.tensor([[20.0], [0.0]], dtype=torch.float16, requires_grad=True)
    (linear_cross_entropy(x, weight, torch.tensor([0])).sum() * 65536).backward()
    assert weight.grad[1].item() == pytest.approx(65536 * math.exp(-20), rel=1e-2)


def test_large_logits_do_not_overflow():
    x, weight = torch.full((2, 4), 100.0, requires_grad=True), torch.randn(6, 4) * 100
    loss = linear_cross_entropy(x, weight, torch.tensor([0, 5]))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()


def test_second_backward_is_an_error():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    loss = linear_cross_entropy(x, weight, torch.tensor([0, 5, 1])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.fixture
def short_chunks(monkeypatch):
    """Use chunks of four tokens, with a short last one, wherever they save memory."""
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(logit_chunks, "MIN_CHUNK_TOKENS", 4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_chunked_cross_entropy_equals_full_computation(short_chunks, monkeypatch, dtype, tolerance):
    x, weight, labels = torch.randn(39, 2, 8).to(dtype), torch.randn(24, 8).to(dtype), torch.randint(24, (39, 2))
    mask = (torch.rand(39, 2) < 0.7).to(torch.promote_types(dtype, torch.float32))
    chunked, unchunked = ([t.detach().clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    most = []
    original = cross_entropy.softmax_in_place
    kernels = cross_entropy.LogitKernels(lambda logits, labels: (most.append(len(logits)), original(logits, labels))[1])
    loss = linear_cross_entropy(*chunked, labels, mask, kernels)
    assert most == [4] * 19 + [2], "logits of four tokens at a time"
    expected = linear_cross_entropy(*unchunked, labels)
    assert torch.equal(loss, expected) or dtype != torch.float64 and torch.allclose(loss, expected, rtol=1e-6)
    ((loss * mask).sum() / 7).backward()
    ((expected * mask).sum() / 7).backward()
    for a, b in zip(chunked, unchunked):
        assert a.grad.dtype == dtype and (a.grad - b.grad).float().norm() <= tolerance * b.grad.float().norm()


def test_weight_gradient_over_chunks_is_summed_in_fp32(short_chunks):
    """512 chunks of four tokens with equal gradients: a bf16 sum would stop growing after 256 of them."""
    x, weight = torch.ones(2048, 8, dtype=torch.bfloat16), torch.zeros(24, 8, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(x, weight, torch.zeros(2048, dtype=torch.int64), torch.ones(2048)).sum().backward()
    torch.testing.assert_close(weight.grad[0].float(), torch.full((8,), -2048 * 23 / 24), rtol=1e-2, atol=0)


def test_backward_with_other_token_weights_is_an_error(short_chunks):
    x, weight = torch.randn(78, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.randint(24, (78,)), torch.ones(78))
    with pytest.raises(RuntimeError, match="announced weights"):
        (loss * torch.rand(78)).sum().backward()


def test_chunks_with_fully_masked_tokens(short_chunks):
    x, weight = torch.randn(78, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.randint(24, (78,)), torch.zeros(78))
    (loss * torch.zeros(78)).sum().backward()
    assert not x.grad.any() and not weight.grad.any()


def test_chunks_free_saved_tensors_and_save_none_without_grad(short_chunks):
    x, weight, labels = torch.randn(78, 8, requires_grad=True), torch.randn(24, 8), torch.randint(24, (78,))
    loss = linear_cross_entropy(x, weight, labels, torch.ones(78)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(cross_entropy.BackwardTwiceError):
        loss.backward()
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(x, weight, labels, torch.ones(78)).sum(), loss)


@pytest.mark.parametrize(
    "rows, columns, width, dtype, cut",
    [
        (4096, 32000, 512, torch.float32, True),  # half a GB of logits
        (4096, 32000, 512, torch.bfloat16, False),
        (8192, 32000, 512, torch.bfloat16, True),  # the sum in fp32 has to pay
        (4096, 129280, 7168, torch.bfloat16, False),  # the weight's gradient in fp32 is larger than the logits
        (256, 1000, 512, torch.float32, False),
        (65536, 32000, 512, torch.float16, False),
    ],
)
def test_chunk_size_is_chosen_by_memory(rows, columns, width, dtype, cut):
    step = cross_entropy.tokens_per_chunk(rows, columns, width, dtype, torch.device("cpu"))
    assert (step < rows) == cut and step >= min(rows, 256)

"""The output head with its loss in chunks of tokens, the vocabulary sharded over ranks or not.

The logits full, in fp64; and full models.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from training.layouts import assert_equal, make_argv, make_run, train_one_process, train_ranks

from arguments.model import ModelArgs
from moe_trainer.layers.vocab import OutputHead
from moe_trainer.ops import cross_entropy, logit_chunks
from moe_trainer.parallel.rng import named_generator
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue

S, B, H, V = 20, 2, 8, 24
MODEL = ModelArgs(num_layers=1, hidden_size=H, num_attention_heads=1, untie_embeddings_and_output_weights=True)


@pytest.fixture
def short_chunks(monkeypatch):
    """Use several chunks even with the smallest vocabulary; forked ranks inherit the setting."""
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(logit_chunks, "MIN_CHUNK_TOKENS", 6)


def _random(name, *shape):
    return torch.randn(*shape, generator=named_generator(5, name), dtype=torch.float64)


def _data():
    mask = (torch.rand(B, S, generator=named_generator(5, "mask")) < 0.7).double()
    return (
        _random("x", S, B, H),
        _random("weight", V, H),
        torch.randint(V, (B, S), generator=named_generator(5, "labels")),
        mask,
    )


def _head(rank, n, sequence_parallel):
    ps = ParallelState.create(n, rank, tp=n) if n > 1 else ParallelState.single()
    x, weight, labels, mask = _data()
    head = OutputHead(MODEL, V, ps.tp, sequence_parallel=sequence_parallel).double()
    rows = V // n
    with torch.no_grad():
        head.weight.copy_(weight[rank * rows : (rank + 1) * rows])
    mine = (x.chunk(n)[rank] if sequence_parallel else x).clone().requires_grad_()
    sizes = []
    head.kernels = cross_entropy.LogitKernels(
        lambda logits, rows: (sizes.append(len(logits)), cross_entropy.softmax_in_place(logits, rows))[1]
    )
    loss = head.loss(mine, labels, weights_BS=mask)
    with torch.no_grad():
        again = head.loss(mine, labels, weights_BS=mask)
    ((loss * mask).sum() * 0.3).backward()
    return loss.detach(), mine.grad, head.weight.grad, sizes, again


@pytest.mark.parametrize("n, sequence_parallel", [(1, False), (2, False), (2, True), (4, True)])
def test_chunked_loss_equals_full_logits(short_chunks, n, sequence_parallel):
    x, weight, labels, mask = _data()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    expected = F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.t().flatten(), reduction="none").view(S, B).t()
    ((expected * mask).sum() * 0.3).backward()
    found = [_head(0, 1, False)] if n == 1 else run_ranks(_head, n, sequence_parallel)
    for loss, _, _, sizes, again in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(loss, again) and max(sizes) < S * B and len(sizes) > 4
    grads_x = [grad for _, grad, *_ in found]
    for grad in [torch.cat(grads_x)] if sequence_parallel else grads_x:
        torch.testing.assert_close(grad, x.grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat([grad for _, _, grad, *_ in found]), weight.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_deferred_weight_gradient_uses_full_logits(short_chunks, tied):
    """It needs the gradient of full logits, so there are no chunks; the gradient of a tied weight is not deferred."""
    x, weight, labels, mask = _data()
    queue, group = WeightGradQueue(), ParallelState.single().tp
    model = replace(MODEL, untie_embeddings_and_output_weights=not tied)
    head = OutputHead(model, V, group, queue=queue)
    table = torch.nn.Parameter(weight)
    if not tied:
        head.weight = table
    queue.active = True
    loss = head.loss(x.requires_grad_(), labels, table if tied else None, mask)
    (loss * mask).sum().backward()
    assert (table.grad is None) != tied
    queue.run()
    exact = weight.clone().requires_grad_()
    expected = F.cross_entropy((x @ exact.t()).flatten(0, 1), labels.t().flatten(), reduction="none").view(S, B).t()
    torch.testing.assert_close(
        table.grad, torch.autograd.grad((expected * mask).sum(), exact)[0], rtol=1e-11, atol=1e-12
    )


CASES = (
    ("deepseek", "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("per-token loss, MTP, distributed optimizer", "--expert-model-parallel-size 2"),
    ("biases, tied head", "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    ("plain", "--pipeline-model-parallel-size 2"),
)


def test_model_with_chunked_loss_equals_full_logits(monkeypatch):
    """One process with full logits; ranks with chunks."""
    expected = [train_one_process(*make_argv(kind)) for kind, _ in CASES]
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(logit_chunks, "MIN_CHUNK_TOKENS", 6)
    found = run_ranks(train_ranks, 2, [[*make_argv(kind), *flags.split()] for kind, flags in CASES])
    for (kind, flags), reference, outcome in zip(CASES, expected, found[0], strict=True):
        assert_equal(outcome, reference, f"{kind} {flags}")


def _fp32_logits(rank, n, sequence_parallel):
    """Loss and gradients of a head in bf16 with logits in fp32."""
    ps = ParallelState.create(n, rank, tp=n)
    x, weight, labels, mask = (tensor if tensor.dtype == torch.int64 else tensor.bfloat16() for tensor in _data())
    head = OutputHead(MODEL, V, ps.tp, sequence_parallel=sequence_parallel, logit_dtype=torch.float32).bfloat16()
    with torch.no_grad():
        head.weight.copy_(weight.chunk(n)[rank])
    mine = (x.chunk(n)[rank] if sequence_parallel else x).clone().requires_grad_()
    full, chunked = head.loss(mine, labels), head.loss(mine, labels, weights_BS=mask.float())
    (full * mask).sum().backward()
    return full.detach(), chunked.detach(), mine.grad, head.weight.grad, head.logits(mine).detach()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fp32_logits_of_bf16_weights(short_chunks, sequence_parallel):
    x, weight, labels, mask = (
        tensor if tensor.dtype == torch.int64 else tensor.bfloat16().float() for tensor in _data()
    )
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = x @ weight.t()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none").view(S, B).t()
    (expected * mask).sum().backward()
    found = run_ranks(_fp32_logits, 2, sequence_parallel)
    for full, chunked, *_, own in found:
        torch.testing.assert_close(full, expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(chunked, expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(own, logits.detach().transpose(0, 1), rtol=1e-6, atol=1e-6)
    grad_x = torch.cat([grad for _, _, grad, *_ in found]) if sequence_parallel else found[0][2]
    grad_weight = torch.cat([grad for *_, grad, _ in found])
    for grad, exact in ((grad_x, x.grad), (grad_weight, weight.grad)):
        assert grad.dtype == torch.bfloat16 and (grad.float() - exact).norm() < 1e-2 * exact.norm()


def test_output_logit_dtype_applies_to_the_mtp_loss():
    """Decoder and multi-token prediction share the output layer."""
    argv = [*make_argv("deepseek"), "--bf16", "--output-logit-dtype", "fp32"]
    head = make_run(argv, 0, ParallelState.single(), 1).chunks[0].output_layer
    assert head.gemms.dtype == torch.float32 and head.weight.dtype == torch.bfloat16

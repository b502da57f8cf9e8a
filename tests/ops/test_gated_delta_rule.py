"""The gated delta rule in chunks and segments against the recurrence, position by position; documents.

One decay for a head (gated DeltaNet) or for each of its channels (Kimi-Linear). What is saved.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops import gated_delta_rule
from moe_trainer.ops.gated_delta_rule import Heads, gated_delta

HEADS = Heads(keys=2, values=4, key_dim=6, value_dim=5)
BY_CHANNEL = replace(HEADS, decays=6)
KINDS = {"head": HEADS, "channel": BY_CHANNEL, "bounded": replace(BY_CHANNEL, lower_bound=-5.0)}
every_kind = pytest.mark.parametrize("heads", KINDS.values(), ids=KINDS)
WIDTH, BATCH = 4, 2


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Several segments in a few positions."""
    monkeypatch.setattr(gated_delta_rule, "CHUNK", 8)
    monkeypatch.setattr(gated_delta_rule, "SEGMENT", 2)
    monkeypatch.setattr(gated_delta_rule, "BLOCK", 3)


def inputs(length: int, dtype: torch.dtype = torch.float64, heads: Heads = HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    channels, decays = sum(HEADS.channels), 4 * heads.decays
    shapes = [
        (length, BATCH, channels),
        (length, BATCH, 4),
        (length, BATCH, decays),
        (channels, WIDTH),
        (4,),
        (decays,),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def run_recurrence(
    x: Tensor,
    beta: Tensor,
    alpha: Tensor,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    heads: Heads = HEADS,
    ids: Tensor | None = None,
) -> Tensor:
    """Apply the equations position by position."""
    length = x.shape[0]
    same = (
        torch.ones(length, length, BATCH, dtype=x.dtype)
        if ids is None
        else (ids.t()[:, None] == ids.t()[None]).to(x.dtype)
    )
    mixed = torch.stack(
        [
            F.silu(
                sum(
                    same[t, t - back, :, None] * x[t - back] * weight[:, WIDTH - 1 - back]
                    for back in range(min(WIDTH, t + 1))
                )
            )
            for t in range(length)
        ]
    )
    q, k, v = mixed.split(HEADS.channels, -1)
    q, k = (each.unflatten(-1, (2, 6)).repeat_interleave(2, 2) for each in (q, k))
    q, k = (each / torch.sqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    v = v.unflatten(-1, (4, 5))
    steps, speed, rate = (alpha + dt_bias).unflatten(-1, (4, -1)), a_log.exp()[:, None], beta.sigmoid()
    decay = torch.exp(-5.0 * (speed * steps).sigmoid() if heads.lower_bound else -speed * F.softplus(steps))
    state, found = torch.zeros(BATCH, 4, 6, 5, dtype=x.dtype), []
    for t in range(length):
        state = state * decay[t, ..., None] * (same[t, t - 1, :, None, None, None] if t else 1.0)
        error = v[t] - torch.einsum("bnde,bnd->bne", state, k[t])
        state = state + rate[t, :, :, None, None] * torch.einsum("bnd,bne->bnde", k[t], error)
        found.append(torch.einsum("bnde,bnd->bne", state, q[t]) / 6**0.5)
    return torch.stack(found)


DOCUMENTS = {
    "one document": None,
    "documents": [[0] * 7 + [1] * 3 + [2] * 14 + [3] * 16 + [4] * 5, [0] * 16 + [1] + [2] * 13 + [3] * 15],
    "a document each": [list(range(45))] * 2,
}


@every_kind
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_chunked_delta_rule_equals_the_recurrence(kind, heads):
    ids = None if DOCUMENTS[kind] is None else torch.tensor(DOCUMENTS[kind])
    tensors = inputs(45, heads=heads)
    found, expected = gated_delta(*tensors, heads, ids), run_recurrence(*tensors, heads, ids)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.1
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    for grad, right in zip(
        torch.autograd.grad(found, tensors, weights), torch.autograd.grad(expected, tensors, weights)
    ):
        assert torch.allclose(grad, right, rtol=0, atol=1e-11 * right.abs().max().item())


@every_kind
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17])
def test_delta_rule_of_any_length(length, heads):
    tensors = inputs(length, heads=heads)
    assert torch.allclose(gated_delta(*tensors, heads), run_recurrence(*tensors, heads), rtol=0, atol=1e-12)


def test_documents_do_not_attend_to_previous_ones():
    tensors = inputs(45)
    ids = torch.tensor([[0] * 19 + [1] * 26] * 2)
    alone = gated_delta(*(each[19:] for each in tensors[:3]), *tensors[3:], HEADS)
    assert torch.allclose(gated_delta(*tensors, HEADS, ids)[19:], alone, rtol=0, atol=1e-12)


@every_kind
def test_extreme_decay_gives_finite_results(heads):
    tensors = inputs(45, torch.float32, heads)
    with torch.no_grad():
        tensors[2] += 200.0
        tensors[4] += 5.0
    y = gated_delta(*tensors, heads)
    y.sum().backward()
    assert all(torch.isfinite(each).all() for each in (y, *(x.grad for x in tensors)))


def test_half_precision_is_computed_in_fp32():
    tensors = inputs(45, torch.bfloat16)
    wide = [each.detach().float() for each in tensors]
    y = gated_delta(*tensors, HEADS)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, gated_delta(*wide, HEADS).bfloat16())
    y.sum().backward()
    assert all(each.grad.dtype == torch.bfloat16 for each in tensors)


def test_only_inputs_and_segment_states_are_saved():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        tensors = inputs(45)
        gated_delta(*tensors, HEADS)
    assert sum(kept) == sum(each.numel() for each in tensors) + 2 * BATCH * 4 * 6 * 5

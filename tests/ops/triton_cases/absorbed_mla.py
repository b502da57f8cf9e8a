"""Latent attention to listed keys in Triton's interpreter against the torch version. Run by tests/ops/test_triton.py."""

import pytest
import torch

from moe_trainer.ops.absorbed_mla import TORCH_TILE_KERNELS, Latents, attend, attend_backward
from moe_trainer.ops.triton_absorbed_mla import STEPS


def lists(queries: int, rows: int, chosen: int) -> torch.Tensor:
    """Ascending keys of each query, fewer for later queries; the last query has none."""
    keys = torch.full((queries, chosen), -1, dtype=torch.int32)
    for query in range(queries - 1):
        count = max(1, min(chosen, rows) - query % 3)
        keys[query, :count] = torch.randperm(rows)[:count].sort().values
    return keys


# more heads than a tile, fewer than one; more keys than a tile, and not a multiple of one; widths that are no powers of two
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "queries,heads,rows,chosen,rank,rope,nope,value",
    [(5, 3, 9, 4, 6, 2, 5, 7), (3, 20, 70, 41, 24, 8, 16, 16), (1, 1, 1, 1, 1, 1, 1, 1), (0, 2, 5, 3, 4, 2, 4, 4)],
)
def test_absorbed_mla_kernel_equals_torch(queries, heads, rows, chosen, rank, rope, nope, value, dtype):
    def random(*shape):
        return torch.randn(shape).to(dtype)

    keys = lists(queries, rows, chosen)
    inputs = (
        random(queries, heads, nope + rope),
        random(rows, rank + rope),
        random(heads, nope + value, rank) * 0.3,
        random(queries, heads, value),
    )

    def results(steps, *inputs):
        q, rows, weight, grad = inputs
        latents = Latents(rows, weight, 0.5)
        out, lse = attend(q, latents, keys, steps)
        return out, lse, *attend_backward(grad, q, latents, keys, out, lse, steps)

    ours, theirs = (results(steps, *inputs) for steps in (STEPS, TORCH_TILE_KERNELS))
    if dtype != torch.bfloat16:
        torch.testing.assert_close(ours, theirs, **({"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}))
        return
    exact = results(TORCH_TILE_KERNELS, *(x.float() for x in inputs))  # the torch version rounds its scores
    for one, other, both in zip(ours, theirs, exact, strict=True):
        assert one.dtype == other.dtype and (one.isneginf() == both.isneginf()).all()
        assert (one.float() - both).nan_to_num(0.0).norm() <= 2e-2 * both.nan_to_num(neginf=0.0).norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["query", "row"])
def test_latent_attention_of_numbers_that_are_not_finite_equals_torch(place, value):
    """The queries that see them have no result, in forward and backward; the others' are unchanged."""
    keys = torch.tensor([[0, 2, -1], [1, 3, 4], [0, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    q, rows, weight, grad = torch.randn(4, 2, 5), torch.randn(5, 8), torch.randn(2, 7, 6), torch.randn(4, 2, 4)
    if place == "query":
        q[1, 0, 3] = value
    else:
        rows[3, 2] = value
    found = []
    for steps in (STEPS, TORCH_TILE_KERNELS):
        latents = Latents(rows, weight, 0.5)
        out, lse = attend(q, latents, keys, steps)
        found.append((out, lse, *attend_backward(grad, q, latents, keys, out, lse, steps)))
    assert not found[0][1][1].isneginf().any(), "the log-sum-exp says that there are no keys"
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        ours, theirs = (torch.where(x.isfinite(), x, 0.0) for x in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_row_gradients_are_accumulated_over_query_blocks(monkeypatch):
    """Processing queries in blocks gives the same sums."""
    from moe_trainer.ops import triton_absorbed_mla

    latents, keys = Latents(torch.randn(9, 8), torch.randn(2, 7, 6), 0.5), lists(7, 9, 4)
    q, grad = torch.randn(7, 2, 5), torch.randn(7, 2, 4)
    out, lse = attend(q, latents, keys, TORCH_TILE_KERNELS)
    expected = attend_backward(grad, q, latents, keys, out, lse, TORCH_TILE_KERNELS)
    monkeypatch.setattr(triton_absorbed_mla, "GATHERED", 70)
    for ours, theirs in zip(attend_backward(grad, q, latents, keys, out, lse, STEPS), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

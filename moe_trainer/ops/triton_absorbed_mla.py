"""Absorbed latent attention to selected keys in Triton kernels; the torch version is ops/absorbed_mla.py.

A program reads the rows it multiplies in place instead of gathering them. Forward: a program owns a query and some
heads and walks over the query's keys with a running maximum. Backward recomputes scores from the log-sum-exp twice: the
same programs sum the query gradient and the weighted mean of its rows; programs that own a query and some keys walk
over the heads and write each gathered row's gradient, which torch accumulates (in a fixed order with deterministic
algorithms). No atomics.

Shapes: as in ops/absorbed_mla.py. Q = N * W, elements of a query.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops import absorbed_mla
from moe_trainer.ops.absorbed_mla import Latents, TileKernels
from moe_trainer.ops.triton_blocks import block_size

HEADS = tl.constexpr(16)  # of a program's tile; a tensor core takes 16 rows at least
KEYS = 32  # the same, and 16 in fp32
GATHERED = 1 << 26  # elements of gradients of gathered rows that are written before they are added


@triton.jit
def _row(x, stride, head, num_heads, column, width):
    """One query's elements of some heads, [heads, columns]; zeros outside."""
    inside = (head < num_heads)[:, None] & (column < width)[None, :]
    return tl.load(x + head[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _put(to, row, stride, num_rows, column, width, value):
    """Write some rows of a matrix, [rows, columns]."""
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    tl.store(to + row[:, None] * stride + column[None, :], value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _gathered(rows, key, column, first, last, row_width):
    """Columns [first, last) of the listed rows, [keys, columns]; zeros where there is no key."""
    at = rows + key.to(tl.int64)[:, None] * row_width + first + column[None, :]
    return tl.load(at, mask=(key >= 0)[:, None] & (first + column < last)[None, :], other=0.0)


@triton.jit
def _scores(q_rank, q_rope, latent, rotated, key, scale, PRECISION: tl.constexpr):
    """Scaled scores [heads, keys]; -inf where there is no key."""
    scores = tl.dot(q_rank, tl.trans(latent), input_precision=PRECISION)
    scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision=PRECISION)
    return tl.where((key >= 0)[None, :], scores * scale, float("-inf"))


@triton.jit
def forward_kernel(
    q,
    rows,
    keys,
    mean,
    lse,
    num_heads,
    num_keys,
    rank,
    width,
    scale,
    PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
):
    """One query, HEADS heads: the mean of its rows' latents, and the log-sum-exp of its scores."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    of_rank, of_rope = tl.arange(0, RANK), tl.arange(0, ROPE)
    q_rank = _row(q + query * num_heads * width, width, head, num_heads, of_rank, rank)
    q_rope = _row(q + query * num_heads * width + rank, width, head, num_heads, of_rope, width - rank)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, RANK], tl.float32)
    for first in range(0, num_keys, KEYS):
        place = first + tl.arange(0, KEYS)
        key = tl.load(keys + query * num_keys + place, mask=place < num_keys, other=-1)
        latent = _gathered(rows, key, of_rank, 0, rank, width)
        rotated = _gathered(rows, key, of_rope, rank, width, width)
        scores = _scores(q_rank, q_rope, latent, rotated, key, scale, PRECISION)
        higher = tl.maximum(top, tl.max(scores, 1))
        # heads that have met no key would compute -inf - -inf
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        powers, shrunk = tl.exp(scores - shift[:, None]), tl.exp(top - shift)
        total = total * shrunk + tl.sum(powers, 1)
        weighted = tl.dot(powers.to(latent.dtype), latent, weighted * shrunk[:, None], input_precision=PRECISION)
        top = higher
    has_keys = total != 0  # NaN has
    safe = tl.where(has_keys, total, 1.0)
    _put(mean + query * num_heads * rank, head, rank, num_heads, of_rank, rank, weighted / safe[:, None])
    tl.store(
        lse + query * num_heads + head, tl.where(has_keys, top + tl.log(safe), float("-inf")), mask=head < num_heads
    )


@triton.jit
def _probabilities(scores, lse, query, head, num_heads):
    """From the log-sum-exp; zeros where there is no key at all."""
    sums = tl.load(lse + query * num_heads + head, mask=head < num_heads, other=0.0)
    return tl.exp(scores - tl.where(sums == float("-inf"), 0.0, sums)[:, None])


@triton.jit
def query_kernel(
    q,
    rows,
    keys,
    grad,
    delta,
    lse,
    grad_q,
    mean,
    num_heads,
    num_keys,
    rank,
    width,
    grad_stride_t,
    grad_stride_n,
    scale,
    PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
):
    """One query, HEADS heads: the query's gradient, and the mean of its rows' latents again."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    of_rank, of_rope = tl.arange(0, RANK), tl.arange(0, ROPE)
    q_rank = _row(q + query * num_heads * width, width, head, num_heads, of_rank, rank)
    q_rope = _row(q + query * num_heads * width + rank, width, head, num_heads, of_rope, width - rank)
    g = _row(grad + query * grad_stride_t, grad_stride_n, head.to(tl.int64), num_heads, of_rank, rank)
    less = tl.load(delta + query * num_heads + head, mask=head < num_heads, other=0.0)
    grad_rank = tl.zeros([HEADS, RANK], tl.float32)
    grad_rope = tl.zeros([HEADS, ROPE], tl.float32)
    weighted = tl.zeros([HEADS, RANK], tl.float32)
    for first in range(0, num_keys, KEYS):
        place = first + tl.arange(0, KEYS)
        key = tl.load(keys + query * num_keys + place, mask=place < num_keys, other=-1)
        latent = _gathered(rows, key, of_rank, 0, rank, width)
        rotated = _gathered(rows, key, of_rope, rank, width, width)
        scores = _scores(q_rank, q_rope, latent, rotated, key, scale, PRECISION)
        probs = _probabilities(scores, lse, query, head, num_heads)
        slope = (probs * (tl.dot(g, tl.trans(latent), input_precision=PRECISION) - less[:, None]) * scale).to(
            latent.dtype
        )
        grad_rank = tl.dot(slope, latent, grad_rank, input_precision=PRECISION)
        grad_rope = tl.dot(slope, rotated, grad_rope, input_precision=PRECISION)
        weighted = tl.dot(probs.to(latent.dtype), latent, weighted, input_precision=PRECISION)
    grad_q += query * num_heads * width
    _put(grad_q, head, width, num_heads, of_rank, rank, grad_rank)
    _put(grad_q + rank, head, width, num_heads, of_rope, width - rank, grad_rope)
    _put(mean + query * num_heads * rank, head, rank, num_heads, of_rank, rank, weighted)


@triton.jit
def key_kernel(
    q,
    rows,
    keys,
    grad,
    delta,
    lse,
    grad_rows,
    num_heads,
    num_keys,
    rank,
    width,
    grad_stride_t,
    grad_stride_n,
    scale,
    PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
):
    """One query, KEYS of its keys: the gradient of the rows that it has gathered."""
    query = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    of_rank, of_rope = tl.arange(0, RANK), tl.arange(0, ROPE)
    key = tl.load(keys + query * num_keys + place, mask=place < num_keys, other=-1)
    latent = _gathered(rows, key, of_rank, 0, rank, width)
    rotated = _gathered(rows, key, of_rope, rank, width, width)
    grad_rank = tl.zeros([KEYS, RANK], tl.float32)
    grad_rope = tl.zeros([KEYS, ROPE], tl.float32)
    for first in range(0, num_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        q_rank = _row(q + query * num_heads * width, width, head, num_heads, of_rank, rank)
        q_rope = _row(q + query * num_heads * width + rank, width, head, num_heads, of_rope, width - rank)
        g = _row(grad + query * grad_stride_t, grad_stride_n, head.to(tl.int64), num_heads, of_rank, rank)
        less = tl.load(delta + query * num_heads + head, mask=head < num_heads, other=0.0)
        scores = _scores(q_rank, q_rope, latent, rotated, key, scale, PRECISION)
        probs = _probabilities(scores, lse, query, head, num_heads)
        slope = (probs * (tl.dot(g, tl.trans(latent), input_precision=PRECISION) - less[:, None]) * scale).to(
            latent.dtype
        )
        # heads that there are not have no query and no gradient
        grad_rank = tl.dot(tl.trans(slope), q_rank, grad_rank, input_precision=PRECISION)
        grad_rank = tl.dot(tl.trans(probs.to(latent.dtype)), g, grad_rank, input_precision=PRECISION)
        grad_rope = tl.dot(tl.trans(slope), q_rope, grad_rope, input_precision=PRECISION)
    grad_rows += query * num_keys * width
    _put(grad_rows, place, width, num_keys, of_rank, rank, grad_rank)
    _put(grad_rows + rank, place, width, num_keys, of_rope, width - rank, grad_rope)


def _sizes(q_TNW: Tensor, latents: Latents) -> dict:
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "KEYS": KEYS if q_TNW.itemsize == 2 else 16,
        "RANK": block_size(latents.rank, 1 << 16),
        "ROPE": block_size(latents.rows_KW.shape[1] - latents.rank, 1 << 16),
        "num_warps": 8,
        "num_stages": 1,
    }


def _takes(q_TNW: Tensor) -> bool:
    """Sums are fp32."""
    return q_TNW.dtype != torch.float64


def forward(q_TNW: Tensor, latents: Latents, keys_TC: Tensor) -> tuple[Tensor, Tensor]:
    """As ops/absorbed_mla.py: forward_of_tile."""
    if not _takes(q_TNW):
        return absorbed_mla.forward_of_tile(q_TNW, latents, keys_TC)
    num_queries, num_heads, width = q_TNW.shape
    q_TNW, rows_KW, keys_TC = q_TNW.contiguous(), latents.rows_KW.contiguous(), keys_TC.contiguous()
    mean = q_TNW.new_empty(num_queries, num_heads, latents.rank)
    lse = torch.empty(num_queries, num_heads, dtype=torch.float32, device=q_TNW.device)
    if num_queries:
        numbers = num_heads, keys_TC.shape[1], latents.rank, width, latents.scale
        forward_kernel[(num_queries, triton.cdiv(num_heads, HEADS.value))](
            q_TNW, rows_KW, keys_TC, mean, lse, *numbers, **_sizes(q_TNW, latents)
        )
    return mean, lse


def backward(
    q_TNW: Tensor,
    latents: Latents,
    keys_TC: Tensor,
    grad_TNR: Tensor,
    delta_TN1: Tensor,
    lse_TN: Tensor,
    grad_rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ops/absorbed_mla.py: backward_of_tile."""
    if not _takes(q_TNW):
        return absorbed_mla.backward_of_tile(q_TNW, latents, keys_TC, grad_TNR, delta_TN1, lse_TN, grad_rows)
    num_queries, num_heads, width = q_TNW.shape
    q_TNW, rows_KW, keys_TC, lse_TN, delta_TN = (
        x.contiguous() for x in (q_TNW, latents.rows_KW, keys_TC, lse_TN, delta_TN1.squeeze(-1))
    )
    grad_TNR = grad_TNR if grad_TNR.stride(2) == 1 else grad_TNR.contiguous()
    num_keys, sizes = keys_TC.shape[1], _sizes(q_TNW, latents)
    mean, grad_q = q_TNW.new_empty(num_queries, num_heads, latents.rank), torch.empty_like(q_TNW)
    numbers = num_heads, num_keys, latents.rank, width, *grad_TNR.stride()[:2], latents.scale
    if num_queries:
        query_kernel[(num_queries, triton.cdiv(num_heads, HEADS.value))](
            q_TNW, rows_KW, keys_TC, grad_TNR, delta_TN, lse_TN, grad_q, mean, *numbers, **sizes
        )
    step = max(1, GATHERED // max(1, num_keys * width))
    for start in range(0, num_queries, step):
        part = slice(start, min(start + step, num_queries))
        of_rows = torch.empty(part.stop - start, num_keys, width, dtype=torch.float32, device=q_TNW.device)
        key_kernel[(part.stop - start, triton.cdiv(num_keys, sizes["KEYS"]))](
            q_TNW[part],
            rows_KW,
            keys_TC[part],
            grad_TNR[part],
            delta_TN[part],
            lse_TN[part],
            of_rows,
            *numbers,
            **sizes,
        )
        # where there is no key there is no gradient
        grad_rows.index_add_(0, keys_TC[part].clamp(min=0).flatten(), of_rows.flatten(0, 1))
    return grad_q, mean


STEPS = TileKernels(forward, backward)

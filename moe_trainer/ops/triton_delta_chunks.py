"""The gated delta rule in Triton kernels, forward and backward, after the convolution of ops/gated_delta_rule.py.

Forward: prepare_kernel (gates, lengths, U and W of all chunks in parallel), states_kernel (over the chunks, for some
columns of the state), outputs_kernel (in parallel). Backward recomputes these and mirrors them: scores_kernel,
grad_states_kernel, chunk_kernel, keys_kernel. Only the inputs are saved. No atomics. Formulas:
docs/design/gated_delta_rule.md. Operands have the dtype of the activations; sums and the inverse are fp32 (fp64 for
fp64). Factors that would cross a document's first position are zero.

Shapes: as in ops/gated_delta_rule.py; P positions padded to full chunks; Z pairs of a sequence and a value head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.gated_delta_rule import LENGTH_EPS, Heads
from moe_trainer.ops.triton_blocks import block_size

CHUNK = tl.constexpr(64)  # positions
EPS = tl.constexpr(LENGTH_EPS)
BLOCK, PART = 64, 32  # features of a tile, and of a small one
COLUMNS = 32  # of a state, which one program walks with
FACTORS = 7  # numbers of a position that _factors names


@triton.jit
def _heads(length, keys, values):
    """Padded positions, and of this program the pair of sequence and value head, these two, and the key head."""
    pair = tl.program_id(1).to(tl.int64)
    return tl.cdiv(length, CHUNK) * CHUNK, pair, pair // values, pair % values, pair % values // (values // keys)


@triton.jit
def _tile(rows, row, stride, column, num_rows, width):
    """Some rows and columns of a matrix; zeros outside."""
    at = rows + row[:, None].to(tl.int64) * stride + column[None, :]
    return tl.load(at, mask=(row < num_rows)[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def _put(rows, row, stride, column, num_rows, width, value):
    at = rows + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(at, value.to(rows.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < width)[None, :])


@triton.jit
def _square(matrices, number, SIZE: tl.constexpr):
    """Pointers to the elements of one of many square matrices."""
    place = tl.arange(0, SIZE)
    return matrices + number * (SIZE * SIZE) + place[:, None] * SIZE + place[None, :]


@triton.jit
def _factors(factors, pair, position, positions):
    """Of some positions: the cumulative gate; the first position of the chunk in the same document.

    Exp(G) and exp(G_last - G), zero where a document begins in between; beta; what divides the key's length; what
    divides the query's, over sqrt(D).
    """
    at, stride = factors + pair * positions + position, tl.num_programs(1).to(tl.int64) * positions
    total, first, before = tl.load(at), tl.load(at + stride), tl.load(at + 2 * stride)
    after, share = tl.load(at + 3 * stride), tl.load(at + 4 * stride)
    return total, first, before, after, share, tl.load(at + 5 * stride), tl.load(at + 6 * stride)


@triton.jit
def _decays(total, first):
    """exp(G_i - G_j) where i >= j and both are of one document, else 0."""
    place = tl.arange(0, total.shape[0])
    seen = (place[:, None] >= place[None, :]) & (first[:, None] == first[None, :])
    between = total[:, None] - total[None, :]
    # at most one; what is above the diagonal would be more. tl.minimum would return 0 for NaN
    return tl.where(seen, tl.exp(tl.where(between > 0.0, 0.0, between)), 0.0)


@triton.jit
def _last(x):
    """The last element."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == x.shape[0] - 1, x, 0.0), 0)


@triton.jit
def _gate(alpha, inside, a_log, dt_bias, WIDE: tl.constexpr):
    """exp(a_log), and alpha + dt_bias."""
    step = tl.load(alpha, mask=inside, other=0.0).to(WIDE)
    return tl.exp(tl.load(a_log).to(WIDE)), step + tl.load(dt_bias).to(WIDE)


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _product(a, b, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """Of fp32 matrices; SPLIT: to 16 bits by three matmuls of bf16, which take fewer registers than three of tf32."""
    if SPLIT:
        high_a, high_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        low_a, low_b = (a - high_a.to(a.dtype)).to(tl.bfloat16), (b - high_b.to(b.dtype)).to(tl.bfloat16)
        return tl.dot(low_a, high_b) + tl.dot(high_a, low_b) + tl.dot(high_a, high_b)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _inverse(system, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """Of one plus a strictly lower triangular matrix of 64: blocks on the diagonal, each from two of half the size.

    It is as stable as substitution, which a series of powers of the matrix is not.
    """
    place = tl.arange(0, system.shape[0])
    row, column = place[:, None], place[None, :]
    result = (row == column).to(system.dtype) - tl.where(row // 2 == column // 2, system, 0.0)
    for power in tl.range(1, 6, num_stages=1, loop_unroll_factor=1):
        between = tl.where(
            ((row >> (power + 1)) == (column >> (power + 1))) & ((row >> power) != (column >> power)), system, 0.0
        )
        result -= _product(result, _product(between, result, SPLIT, PRECISION), SPLIT, PRECISION)
    return result


@triton.jit
def prepare_kernel(
    x,
    beta,
    alpha,
    a_log,
    dt_bias,
    ids,
    factors,
    inverse,
    w,
    u,
    length,
    batch,
    keys,
    values,
    beta_stride_s,
    beta_stride_b,
    alpha_stride_s,
    alpha_stride_b,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one head: the factors, W and U, and the inverse T if there is a tensor for it."""
    WIDE: tl.constexpr = factors.dtype.element_ty
    place = tl.arange(0, CHUNK)
    start = tl.program_id(0) * CHUNK
    position = start + place
    positions, pair, sequence, value_head, key_head = _heads(length, keys, values)
    inside = position < length
    at = position.to(tl.int64)
    share = tl.load(beta + at * beta_stride_s + sequence * beta_stride_b + value_head, mask=inside, other=0.0).to(WIDE)
    share = tl.where(inside, 1.0 / (1.0 + tl.exp(-share)), 0.0)
    alpha += at * alpha_stride_s + sequence * alpha_stride_b + value_head
    rate, step = _gate(alpha, inside, a_log + value_head, dt_bias + value_head, WIDE)
    total = tl.cumsum(tl.where(inside, -rate * _softplus(step), 0.0), 0)
    before, after, first = tl.exp(total), tl.exp(_last(total) - total), tl.zeros_like(place)
    if ids is not None:
        ids += sequence * length
        own = tl.load(ids + tl.minimum(position, length - 1))
        before = tl.where(own == tl.load(ids + tl.maximum(start - 1, 0)), before, 0.0)
        after = tl.where(own == tl.load(ids + tl.minimum(start + CHUNK - 1, length - 1)), after, 0.0)
        first = tl.min(tl.where(own[:, None] == own[None, :], place[None, :], CHUNK), 1)
    stride = batch * (2 * keys * D + values * E)
    x += sequence * (2 * keys * D + values * E)
    gemms = tl.zeros([CHUNK, CHUNK], WIDE)
    of_key = tl.zeros([CHUNK], WIDE)
    of_query = tl.zeros([CHUNK], WIDE)
    for feature in range(0, D, BLOCK):
        column = feature + tl.arange(0, BLOCK)
        q = _tile(x + key_head * D, position, stride, column, length, D)
        k = _tile(x + (keys + key_head) * D, position, stride, column, length, D)
        gemms += _dot(k, tl.trans(k), PRECISION)
        of_query += tl.sum(q.to(WIDE) * q.to(WIDE), 1)
        of_key += tl.sum(k.to(WIDE) * k.to(WIDE), 1)
    of_key, of_query = 1.0 / tl.sqrt(of_key + EPS), D**-0.5 / tl.sqrt(of_query + EPS)
    to, apart = factors + pair * positions + position, tl.num_programs(1).to(tl.int64) * positions
    tl.store(to, total)
    tl.store(to + apart, first.to(WIDE))
    tl.store(to + 2 * apart, before)
    tl.store(to + 3 * apart, after)
    tl.store(to + 4 * apart, share)
    tl.store(to + 5 * apart, of_key)
    tl.store(to + 6 * apart, of_query)
    factor = _decays(total, first.to(WIDE)) * (share * of_key)[:, None] * of_key[None, :]
    system = tl.where(place[:, None] > place[None, :], gemms * factor, 0.0)
    solved = _inverse(system, x.dtype.element_ty.primitive_bitwidth == 16, PRECISION)
    if inverse is not None:
        to = _square(inverse, pair * tl.num_programs(0) + tl.program_id(0), CHUNK)
        tl.store(to, solved.to(inverse.dtype.element_ty))
    of_values = (solved * share[None, :]).to(u.dtype.element_ty)
    for feature in range(0, E, BLOCK):
        column = feature + tl.arange(0, BLOCK)
        v = _tile(x + 2 * keys * D + value_head * E, position, stride, column, length, E)
        _put(u + pair * positions * E, position, E, column, positions, E, _dot(of_values, v, PRECISION))
    of_keys = (solved * (share * before * of_key)[None, :]).to(w.dtype.element_ty)
    for feature in range(0, D, BLOCK):
        column = feature + tl.arange(0, BLOCK)
        k = _tile(x + (keys + key_head) * D, position, stride, column, length, D)
        _put(w + pair * positions * D, position, D, column, positions, D, _dot(of_keys, k, PRECISION))


@triton.jit
def states_kernel(
    x,
    factors,
    w,
    u,
    states,
    corrected,
    length,
    batch,
    keys,
    values,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one head's state, from chunk to chunk: the state before each, and its corrected values V."""
    WIDE: tl.constexpr = factors.dtype.element_ty
    place, feature = tl.arange(0, CHUNK), tl.arange(0, FEATURES)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    positions, pair, sequence, value_head, key_head = _heads(length, keys, values)
    stride = batch * (2 * keys * D + values * E)
    x += sequence * (2 * keys * D + values * E) + (keys + key_head) * D
    state = tl.zeros([FEATURES, COLUMNS], WIDE)
    chunks = positions // CHUNK
    for chunk in range(chunks):
        position = chunk * CHUNK + place
        total, first, before, after, share, of_key, of_query = _factors(factors, pair, position, positions)
        narrow = state.to(states.dtype.element_ty)
        _put(states + (pair * chunks + chunk) * D * E, feature, E, column, D, E, narrow)
        read = _tile(w + pair * positions * D, position, D, feature, positions, D)
        value = _tile(u + pair * positions * E, position, E, column, positions, E).to(WIDE) - _dot(
            read, narrow, PRECISION
        )
        _put(corrected + pair * positions * E, position, E, column, positions, E, value)
        k = _tile(x, position, stride, feature, length, D)
        written = (value * (of_key * after)[:, None]).to(k.dtype)
        state = state * _last(before) + _dot(tl.trans(k), written, PRECISION)


@triton.jit
def outputs_kernel(
    x,
    factors,
    states,
    corrected,
    y,
    length,
    batch,
    keys,
    values,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of what one head gives for one chunk."""
    WIDE: tl.constexpr = factors.dtype.element_ty
    position = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    positions, pair, sequence, value_head, key_head = _heads(length, keys, values)
    total, first, before, after, share, of_key, of_query = _factors(factors, pair, position, positions)
    stride = batch * (2 * keys * D + values * E)
    x += sequence * (2 * keys * D + values * E)
    states += (pair * tl.num_programs(0) + tl.program_id(0)) * D * E
    scores = tl.zeros([CHUNK, CHUNK], WIDE)
    read = tl.zeros([CHUNK, BLOCK], WIDE)
    for start in range(0, D, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        q = _tile(x + key_head * D, position, stride, feature, length, D)
        k = _tile(x + (keys + key_head) * D, position, stride, feature, length, D)
        scores += _dot(q, tl.trans(k), PRECISION)
        read += _dot(q, _tile(states, feature, E, column, D, E), PRECISION)
    scores *= _decays(total, first) * of_query[:, None] * of_key[None, :]
    value = _tile(corrected + pair * positions * E, position, E, column, positions, E)
    read = read * (before * of_query)[:, None] + _dot(scores.to(value.dtype), value, PRECISION)
    _put(y + (sequence * values + value_head) * E, position, batch * values * E, column, length, E, read)


@triton.jit
def scores_kernel(
    x,
    factors,
    corrected,
    grad,
    grad_corrected,
    grad_scores,
    grad_total,
    length,
    batch,
    keys,
    values,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one head: gradients from its outputs through P, of corrected values, of q . k, and of G."""
    WIDE: tl.constexpr = factors.dtype.element_ty
    position = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    positions, pair, sequence, value_head, key_head = _heads(length, keys, values)
    total, first, before, after, share, of_key, of_query = _factors(factors, pair, position, positions)
    stride = batch * (2 * keys * D + values * E)
    x += sequence * (2 * keys * D + values * E)
    scores = tl.zeros([CHUNK, CHUNK], WIDE)
    for start in range(0, D, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        q = _tile(x + key_head * D, position, stride, feature, length, D)
        k = _tile(x + (keys + key_head) * D, position, stride, feature, length, D)
        scores += _dot(q, tl.trans(k), PRECISION)
    decays = _decays(total, first)
    scores *= decays * of_query[:, None] * of_key[None, :]
    mirrored = tl.trans(scores).to(grad.dtype.element_ty)
    of_scores = tl.zeros([CHUNK, CHUNK], WIDE)
    for start in range(0, E, BLOCK):
        column = start + tl.arange(0, BLOCK)
        g = _tile(grad + (sequence * values + value_head) * E, position, batch * values * E, column, length, E)
        _put(grad_corrected + pair * positions * E, position, E, column, positions, E, _dot(mirrored, g, PRECISION))
        value = _tile(corrected + pair * positions * E, position, E, column, positions, E)
        of_scores += _dot(g, tl.trans(value), PRECISION)
    to = _square(grad_scores, pair * tl.num_programs(0) + tl.program_id(0), CHUNK)
    tl.store(to, (of_scores * decays).to(grad_scores.dtype.element_ty))
    of_scores *= scores
    tl.store(grad_total + pair * positions + position, tl.sum(of_scores, 1) - tl.sum(of_scores, 0))


@triton.jit
def grad_states_kernel(
    x,
    factors,
    w,
    grad,
    grad_corrected,
    grad_states,
    length,
    batch,
    keys,
    values,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one head's state, from the last chunk to the first.

    The gradient of the state after each, and the full one of V.
    """
    WIDE: tl.constexpr = factors.dtype.element_ty
    place, feature = tl.arange(0, CHUNK), tl.arange(0, FEATURES)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    positions, pair, sequence, value_head, key_head = _heads(length, keys, values)
    stride = batch * (2 * keys * D + values * E)
    x += sequence * (2 * keys * D + values * E)
    state = tl.zeros([FEATURES, COLUMNS], WIDE)
    chunks = positions // CHUNK
    for later in range(chunks):
        chunk = chunks - 1 - later
        position = chunk * CHUNK + place
        total, first, before, after, share, of_key, of_query = _factors(factors, pair, position, positions)
        narrow = state.to(grad_states.dtype.element_ty)
        _put(grad_states + (pair * chunks + chunk) * D * E, feature, E, column, D, E, narrow)
        k = _tile(x + (keys + key_head) * D, position, stride, feature, length, D)
        value = _tile(grad_corrected + pair * positions * E, position, E, column, positions, E).to(WIDE)
        value = (value + _dot(k, narrow, PRECISION) * (of_key * after)[:, None]).to(k.dtype)
        _put(grad_corrected + pair * positions * E, position, E, column, positions, E, value)
        q = _tile(x + key_head * D, position, stride, feature, length, D)
        g = _tile(grad + (sequence * values + value_head) * E, position, batch * values * E, column, length, E)
        g = (g.to(WIDE) * (of_query * before)[:, None]).to(k.dtype)
        state = state * _last(before) + _dot(tl.trans(q), g, PRECISION)
        read = _tile(w + pair * positions * D, position, D, feature, positions, D)
        state -= _dot(tl.trans(read), value, PRECISION)


@triton.jit
def chunk_kernel(
    x,
    beta,
    alpha,
    a_log,
    dt_bias,
    factors,
    inverse,
    w,
    u,
    states,
    corrected,
    grad,
    grad_corrected,
    grad_states,
    grad_x,
    grad_beta,
    grad_alpha,
    partial,
    grad_q,
    grad_k,
    grad_total,
    grad_products,
    length,
    batch,
    keys,
    values,
    beta_stride_s,
    beta_stride_b,
    alpha_stride_s,
    alpha_stride_b,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """One chunk of one head, all but P: the gradients of v, of the gates, of k . k, and of q and k otherwise.

    partial: [programs of a head, 2, N], sums for a_log and dt_bias. grad_q, grad_k: of rows of length one, [Z, P, D].
    grad_total: what P gives the cumulative gates.
    """
    WIDE: tl.constexpr = factors.dtype.element_ty
    place = tl.arange(0, CHUNK)
    position = tl.program_id(0) * CHUNK + place
    positions, pair, sequence, value_head, key_head = _heads(length, keys, values)
    total, first, before, after, share, of_key, of_query = _factors(factors, pair, position, positions)
    channels = 2 * keys * D + values * E
    stride = batch * channels
    x += sequence * channels
    grad_x += sequence * channels
    values_at = 2 * keys * D + value_head * E
    grad += (sequence * values + value_head) * E
    grad_stride = batch * values * E
    number = pair * tl.num_programs(0) + tl.program_id(0)
    solve = tl.trans(tl.load(_square(inverse, number, CHUNK)))
    grad_share = tl.zeros([CHUNK], WIDE)
    of_system = tl.zeros([CHUNK, CHUNK], WIDE)
    for start in range(0, E, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _tile(grad_corrected + pair * positions * E, position, E, column, positions, E)
        of_values = _dot(solve, value, PRECISION)
        v = _tile(x + values_at, position, stride, column, length, E)
        grad_share += tl.sum(of_values * v.to(WIDE), 1)
        _put(grad_x + values_at, position, stride, column, length, E, of_values * share[:, None])
        value = _tile(u + pair * positions * E, position, E, column, positions, E)
        of_system -= _dot(of_values.to(value.dtype), tl.trans(value), PRECISION)
    carried = tl.zeros([PART], WIDE)
    of_total = tl.load(grad_total + pair * positions + position)
    grad_after = tl.zeros([CHUNK], WIDE)
    for first_feature in range(0, D, PART):
        feature = first_feature + tl.arange(0, PART)
        k = _tile(x + (keys + key_head) * D, position, stride, feature, length, D)
        result = tl.zeros([CHUNK, PART], WIDE)
        for start in range(0, E, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = _tile(grad_corrected + pair * positions * E, position, E, column, positions, E)
            result -= _dot(value, tl.trans(_tile(states + number * D * E, feature, E, column, D, E)), PRECISION)
        result = _dot(solve, result.to(k.dtype), PRECISION)
        read = _tile(w + pair * positions * D, position, D, feature, positions, D)
        of_system -= _dot(result.to(k.dtype), tl.trans(read), PRECISION)
        through = tl.sum(result * k.to(WIDE), 1) * of_key * before
        grad_share += through
        of_total += through * share
        result *= (share * before)[:, None]
        written = tl.zeros([CHUNK, PART], WIDE)
        for start in range(0, E, BLOCK):
            column = start + tl.arange(0, BLOCK)
            of_state = _tile(grad_states + number * D * E, feature, E, column, D, E)
            carried += tl.sum(_tile(states + number * D * E, feature, E, column, D, E).to(WIDE) * of_state.to(WIDE), 1)
            value = _tile(corrected + pair * positions * E, position, E, column, positions, E)
            written += _dot(value, tl.trans(of_state), PRECISION)
        grad_after += tl.sum(written * k.to(WIDE), 1) * of_key * after
        _put(grad_k + pair * positions * D, position, D, feature, positions, D, result + written * after[:, None])
        result = tl.zeros([CHUNK, PART], WIDE)
        for start in range(0, E, BLOCK):
            column = start + tl.arange(0, BLOCK)
            g = _tile(grad, position, grad_stride, column, length, E)
            result += _dot(g, tl.trans(_tile(states + number * D * E, feature, E, column, D, E)), PRECISION)
        q = _tile(x + key_head * D, position, stride, feature, length, D)
        of_total += tl.sum(result * q.to(WIDE), 1) * of_query * before
        _put(grad_q + pair * positions * D, position, D, feature, positions, D, result * before[:, None])
    gemms = tl.zeros([CHUNK, CHUNK], WIDE)
    for start in range(0, D, BLOCK):
        k = _tile(x + (keys + key_head) * D, position, stride, start + tl.arange(0, BLOCK), length, D)
        gemms += _dot(k, tl.trans(k), PRECISION)
    of_system = tl.where(place[:, None] > place[None, :], of_system * _decays(total, first), 0.0)
    slope = of_system * gemms * of_key[:, None] * of_key[None, :]
    grad_share += tl.sum(slope, 1)
    slope *= share[:, None]
    of_total += tl.sum(slope, 1) - tl.sum(slope, 0)
    tl.store(_square(grad_products, number, CHUNK), (of_system * share[:, None]).to(grad_products.dtype.element_ty))
    at_the_end = tl.sum(grad_after, 0) + tl.sum(carried, 0) * _last(before)
    of_total += tl.where(place == CHUNK - 1, at_the_end, 0.0) - grad_after
    inside = position < length
    at = position.to(tl.int64)
    to = (at * batch + sequence) * values + value_head
    tl.store(grad_beta + to, (grad_share * share * (1.0 - share)).to(grad_beta.dtype.element_ty), mask=inside)
    alpha += at * alpha_stride_s + sequence * alpha_stride_b + value_head
    rate, step = _gate(alpha, inside, a_log + value_head, dt_bias + value_head, WIDE)
    # a gate is in the sums of its own position and of all later ones
    grad_gate = tl.where(inside, -rate * tl.cumsum(of_total, 0, reverse=True), 0.0)
    grad_step = grad_gate / (1.0 + tl.exp(-step))
    tl.store(grad_alpha + to, grad_step.to(grad_alpha.dtype.element_ty), mask=inside)
    to = partial + (tl.program_id(0) * batch + sequence) * 2 * values + value_head
    tl.store(to, tl.sum(grad_gate * _softplus(step), 0))
    tl.store(to + values, tl.sum(grad_step, 0))


@triton.jit
def keys_kernel(
    x,
    factors,
    grad_q,
    grad_k,
    grad_scores,
    grad_products,
    grad_x,
    positions,
    length,
    batch,
    keys,
    values,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """One chunk of one key head: the gradients of q and k, from all its value heads."""
    WIDE: tl.constexpr = factors.dtype.element_ty
    place, feature = tl.arange(0, CHUNK), tl.arange(0, FEATURES)
    position = tl.program_id(0) * CHUNK + place
    sequence, key_head = tl.program_id(1).to(tl.int64) // keys, tl.program_id(1).to(tl.int64) % keys
    shared = values // keys
    pair = sequence * values + key_head * shared
    channels = 2 * keys * D + values * E
    stride = batch * channels
    chunks = tl.num_programs(0)
    apart = (tl.num_programs(1) // keys).to(tl.int64) * values * positions
    of_key = tl.load(factors + 5 * apart + pair * positions + position)
    of_query = tl.load(factors + 6 * apart + pair * positions + position)
    of_scores = tl.zeros([CHUNK, CHUNK], WIDE)
    of_q = tl.zeros([CHUNK, FEATURES], WIDE)
    for member in range(shared):
        of_scores += tl.load(_square(grad_scores, (pair + member) * chunks + tl.program_id(0), CHUNK)).to(WIDE)
        of_q += _tile(grad_q + (pair + member) * positions * D, position, D, feature, positions, D)
    x += sequence * channels + key_head * D
    grad_x += sequence * channels + key_head * D
    k = _tile(x + keys * D, position, stride, feature, length, D)
    of_q += _dot((of_scores * of_key[None, :]).to(k.dtype), k, PRECISION)
    q = _tile(x, position, stride, feature, length, D)
    # what would change the length changes nothing
    length_only = tl.sum(q.to(WIDE) * of_q, 1) * of_query * of_query / (D**-0.5 * D**-0.5)
    _put(grad_x, position, stride, feature, length, D, (of_q - q.to(WIDE) * length_only[:, None]) * of_query[:, None])
    of_k = tl.zeros([CHUNK, FEATURES], WIDE)
    for member in range(shared):
        of_k += _tile(grad_k + (pair + member) * positions * D, position, D, feature, positions, D)
    q = _tile(x, position, stride, feature, length, D)
    of_k += _dot((tl.trans(of_scores) * of_query[None, :]).to(q.dtype), q, PRECISION)
    of_products = tl.zeros([CHUNK, CHUNK], WIDE)
    for member in range(shared):
        of_products += tl.load(_square(grad_products, (pair + member) * chunks + tl.program_id(0), CHUNK)).to(WIDE)
    k = _tile(x + keys * D, position, stride, feature, length, D)
    of_k += _dot(((of_products + tl.trans(of_products)) * of_key[None, :]).to(k.dtype), k, PRECISION)
    length_only = tl.sum(k.to(WIDE) * of_k, 1) * of_key * of_key
    of_k = (of_k - k.to(WIDE) * length_only[:, None]) * of_key[:, None]
    _put(grad_x + keys * D, position, stride, feature, length, D, of_k)


class Gates(NamedTuple):
    """What decides over reading and writing: beta and alpha as projected, and the documents' ids or None."""

    beta_SBN: Tensor
    alpha_SBN: Tensor
    a_log_N: Tensor
    dt_bias_N: Tensor
    ids_BS: Tensor | None

    def rows(self) -> "Gates":
        """The same where heads lie side by side."""
        beta, alpha = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.beta_SBN, self.alpha_SBN))
        ids = None if self.ids_BS is None else self.ids_BS.contiguous()
        return Gates(beta, alpha, self.a_log_N.contiguous(), self.dt_bias_N.contiguous(), ids)

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.beta_SBN.stride()[:2], *self.alpha_SBN.stride()[:2]


class _Launch:
    """Sizes and grids of one sequence's kernels. x_SBC: after the convolution, contiguous."""

    def __init__(self, x_SBC: Tensor, heads: Heads):
        self.x, self.heads, (self.length, self.batch, _) = x_SBC, heads, x_SBC.shape
        self.chunks, self.pairs = triton.cdiv(self.length, CHUNK.value), self.batch * heads.values
        self.positions = self.chunks * CHUNK.value
        self.numbers = self.length, self.batch, heads.keys, heads.values
        self.wide = torch.promote_types(x_SBC.dtype, torch.float32)
        self.constants = {
            # of fp32; "ieee" would not use tensor cores
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
            "D": heads.key_dim,
            "E": heads.value_dim,
        }
        self.block = {"BLOCK": block_size(max(heads.key_dim, heads.value_dim), BLOCK)}
        self.features = {"FEATURES": block_size(heads.key_dim, 1 << 16)}
        columns = block_size(heads.value_dim, COLUMNS)
        # of what goes from chunk to chunk: as many warps and stages as a multiprocessor's shared memory holds
        width = self.features["FEATURES"] * x_SBC.itemsize
        self.walk_grid = triton.cdiv(heads.value_dim, columns), self.pairs
        self.walk = {
            **self.features,
            "COLUMNS": columns,
            "num_warps": 4 if width <= 256 else 8,
            "num_stages": 3 if width <= 256 else 2 if width <= 512 else 1,
        }

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.x.dtype, device=self.x.device)

    def prepare(self, gates: Gates, inverse: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return factors, W and U; write the inverse."""
        factors = self.empty(FACTORS, self.pairs, self.positions, dtype=self.wide)
        w, u = (self.empty(self.pairs, self.positions, dim) for dim in (self.heads.key_dim, self.heads.value_dim))
        prepare_kernel[(self.chunks, self.pairs)](
            self.x,
            *gates,
            factors,
            inverse,
            w,
            u,
            *self.numbers,
            *gates.strides,
            **self.constants,
            **self.block,
            num_warps=8,
        )
        return factors, w, u

    def states(self, factors: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each chunk, and the corrected values."""
        states = self.empty(self.pairs, self.chunks, self.heads.key_dim, self.heads.value_dim)
        corrected = torch.empty_like(u)
        states_kernel[self.walk_grid](
            self.x, factors, w, u, states, corrected, *self.numbers, **self.constants, **self.walk
        )
        return states, corrected


def forward(x_SBC: Tensor, gates: Gates, heads: Heads) -> Tensor:
    """y_SBNE of the delta rule. x: queries, keys and values after the convolution."""
    launch, gates = _Launch(x_SBC.contiguous(), heads), gates.rows()
    y_SBNE = launch.empty(launch.length, launch.batch, heads.values, heads.value_dim)
    if not y_SBNE.numel():
        return y_SBNE
    factors, w, u = launch.prepare(gates)
    states, corrected = launch.states(factors, w, u)
    grid = launch.chunks, launch.pairs, triton.cdiv(heads.value_dim, launch.block["BLOCK"])
    outputs_kernel[grid](
        launch.x, factors, states, corrected, y_SBNE, *launch.numbers, **launch.constants, **launch.block
    )
    return y_SBNE


def backward(x_SBC: Tensor, gates: Gates, heads: Heads, grad_SBNE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, beta and alpha, and the parts [programs, 2, N] whose sums are those of a_log and dt_bias."""
    launch, gates, grad_SBNE = _Launch(x_SBC.contiguous(), heads), gates.rows(), grad_SBNE.contiguous()
    x, chunks, pairs, positions = launch.x, launch.chunks, launch.pairs, launch.positions
    grad_x, grad_beta, grad_alpha = (
        launch.empty(*each.shape, dtype=each.dtype) for each in (x_SBC, gates.beta_SBN, gates.alpha_SBN)
    )
    results = grad_x, grad_beta, grad_alpha, launch.empty(chunks * launch.batch, 2, heads.values, dtype=launch.wide)
    if not grad_SBNE.numel():
        return results
    inverse, grad_scores, grad_products = (launch.empty(pairs, chunks, CHUNK.value, CHUNK.value) for _ in range(3))
    factors, w, u = launch.prepare(gates, inverse)
    states, corrected = launch.states(factors, w, u)
    grad_corrected, grad_states = torch.empty_like(u), torch.empty_like(states)
    grad_total = launch.empty(pairs, positions, dtype=launch.wide)
    of_outputs = corrected, grad_SBNE, grad_corrected
    scores_kernel[(chunks, pairs)](
        x, factors, *of_outputs, grad_scores, grad_total, *launch.numbers, **launch.constants, **launch.block
    )
    grad_states_kernel[launch.walk_grid](
        x, factors, w, grad_SBNE, grad_corrected, grad_states, *launch.numbers, **launch.constants, **launch.walk
    )
    grad_q, grad_k = (launch.empty(pairs, positions, heads.key_dim, dtype=launch.wide) for _ in range(2))
    known = factors, inverse, w, u, states, *of_outputs, grad_states
    made = *results, grad_q, grad_k, grad_total, grad_products
    chunk_kernel[(chunks, pairs)](
        x,
        *gates[:4],
        *known,
        *made,
        *launch.numbers,
        *gates.strides,
        **launch.constants,
        **launch.block,
        PART=min(PART, launch.block["BLOCK"]),
        num_warps=8,
    )
    of_products = grad_q, grad_k, grad_scores, grad_products
    keys_kernel[(chunks, launch.batch * heads.keys)](
        x,
        factors,
        *of_products,
        grad_x,
        positions,
        *launch.numbers,
        **launch.constants,
        **launch.features,
        num_warps=8,
    )
    return results

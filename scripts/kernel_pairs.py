"""Every Triton kernel beside the torch operation it stands in for, on the same inputs: for scripts/bench_kernels.py and tests/gpu.

    pair = make("norm", "mixtral", torch.bfloat16, "cuda")
    pair.kernel(), pair.plain()          # tuples of the same results
    pair.milliseconds(pair.kernel)       # median, by CUDA events

Forward and backward are one pair where training always does both.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.layers.kernels import Balancing
from moe_trainer.moe.balancing import LOSS_NAMES, balancing_losses
from moe_trainer.moe.router import score_topk
from moe_trainer.ops import cross_entropy, gated_delta_rule, permute, pointwise, quantize, rope
from moe_trainer.ops.expert_mlp import choose_block
from moe_trainer.ops.grouped_gemm import GROUPED_MM, GroupedProducts
from moe_trainer.ops.pointwise import Activation
from moe_trainer.ops.quantize import E4M3, POWER_OF_TWO, Scaling
from moe_trainer.parallel.state import ParallelState

SWIGLU = Activation("silu", gated=True)


class Size(NamedTuple):
    """tokens, hidden, ffn: of an expert, experts: to choose from, local: held by this rank, topk, vocab: columns of this rank,
    heads, head_dim, rotated: features of a head, offset: of the first of them, groups: (number, chosen) or None."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    local: int
    topk: int
    vocab: int
    heads: int
    head_dim: int
    rotated: int
    offset: int = 0
    groups: tuple[int, int] | None = None
    score: str = "softmax"


SIZES = (
    ("mixtral", Size(4096, 4096, 14336, 8, 8, 2, 32000, 32, 128, 128)),
    ("deepseek-v3", Size(4096, 7168, 2048, 256, 32, 8, 129280, 128, 192, 64, 128, (8, 4), "sigmoid")),
    ("qwen3-30b", Size(4096, 2048, 768, 128, 128, 8, 151936, 32, 128, 128)),
    ("parity", Size(1000, 1032, 520, 24, 24, 3, 5003, 6, 96, 32, 64, (4, 2), "sigmoid")),
    ("tiny", Size(9, 40, 24, 6, 6, 2, 50, 2, 12, 4, 8, (3, 2), "sigmoid")),
)


@dataclass(frozen=True)
class Pair:
    """kernel and plain return tuples of the same results. flops: of a product, 0 for what waits for memory. moved: bytes of the inputs."""

    kernel: Callable[[], tuple[Tensor, ...]]
    plain: Callable[[], tuple[Tensor, ...]]
    moved: int
    flops: int = 0

    def milliseconds(self, function: Callable, rounds: int = 20) -> float:
        """Median time of a call on the device, after some to warm up (the first compiles)."""
        for _ in range(5):
            function()
        times = []
        for _ in range(rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times)


def _kernels(name: str):
    return import_module(f"moe_trainer.ops.triton_{name}")


def _bytes(*tensors: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _trained(function: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A run of function(*leaves) and its backward: the result and the leaves' gradients."""
    def run():
        fresh = [each.detach().requires_grad_() for each in leaves]
        y = function(*fresh)
        y.backward(grad)
        return y.detach(), *(each.grad for each in fresh)

    return run


def activation(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """SwiGLU times probability, of the experts' rows."""
    rows = size.tokens * size.topk
    h = torch.randn(rows, 2 * size.ffn, device=device).to(dtype)
    p, grad = torch.rand(rows, device=device), torch.randn(rows, size.ffn, device=device).to(dtype)
    module, block = _kernels("pointwise"), choose_block(SWIGLU)
    return Pair(lambda: (module.swiglu_forward(h, p), *module.swiglu_backward(h, p, grad)),
                lambda: (block.forward(h, p), *block.backward(h, p, grad.clone())), _bytes(h, h, p, grad))


def norm(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """RMSNorm of the residual stream."""
    x, grad = (torch.randn(size.tokens, size.hidden, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(size.hidden, device=device).to(dtype)
    ours, theirs = _kernels("norm").rms_norm, pointwise.rms_norm
    return Pair(_trained(lambda x, w: ours(x, w, 1e-6), (x, weight), grad), _trained(lambda x, w: theirs(x, w, 1e-6), (x, weight), grad),
                _bytes(x, x, grad))


def head_norm(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """RMSNorm of every head's queries (--qk-layernorm)."""
    x, grad = (torch.randn(size.tokens, size.heads, size.head_dim, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(size.head_dim, device=device).to(dtype)
    ours, theirs = _kernels("norm").rms_norm, pointwise.rms_norm
    return Pair(_trained(lambda x, w: ours(x, w, 1e-6), (x, weight), grad), _trained(lambda x, w: theirs(x, w, 1e-6), (x, weight), grad),
                _bytes(x, x, grad))


def rotation(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """Rotary embedding of the queries: a part of each head, in pairs side by side, for latent attention."""
    x, grad = (torch.randn(size.tokens, 1, size.heads, size.head_dim, device=device).to(dtype) for _ in range(2))
    tables = rope.rope_tables(rope.inverse_frequencies(size.rotated, 10000.0), torch.arange(size.tokens, device=device))
    ours, theirs = _kernels("rope").apply_rope, rope.apply_rope
    how = (*tables, size.offset > 0, size.offset)
    return Pair(_trained(lambda x: ours(x, *how), (x,), grad), _trained(lambda x: theirs(x, *how), (x,), grad), _bytes(x, grad))


def _routing(size: Size, device: str) -> Tensor:
    scores = torch.randn(size.tokens, size.experts, device=device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(size.topk, 1)[1], True)


def reordering(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """Tokens to expert order and back, with probabilities and gradients."""
    x, grad = (torch.randn(size.tokens, size.hidden, device=device).to(dtype) for _ in range(2))
    routing = _routing(size, device)
    probs = torch.rand(size.tokens, size.experts, device=device) * routing

    def trip(permutation: permute.Permutation) -> Callable:
        def run(x: Tensor, probs: Tensor) -> Tensor:
            x_RH, probs_R, routes = permutation.permute(x, probs, routing)
            return permutation.unpermute(x_RH, routes) + probs_R.sum().to(x.dtype)

        return _trained(run, (x, probs), grad)

    return Pair(trip(_kernels("permute").TritonPermutation()), trip(permute.Permutation()), _bytes(x, grad) * (2 + 2 * size.topk) // 2)


def routing(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """Top-k with its backward; fp32 logits whatever the dtype, or equal scores would be dealt out differently."""
    logits, grad = (torch.randn(size.tokens, size.experts, device=device) for _ in range(2))
    bias = torch.randn(size.experts, device=device) * 0.1 if size.score == "sigmoid" else None
    number, chosen = size.groups or (None, None)
    ours = _kernels("router").fused_topk

    def kernel(logits: Tensor) -> Tensor:
        return ours(logits, size.topk, num_groups=number, group_topk=chosen, score_function=size.score, expert_bias=bias)[0]

    def plain(logits: Tensor) -> Tensor:
        return score_topk(logits, size.topk, num_groups=number, group_topk=chosen, score_function=size.score, expert_bias_E=bias)[0]

    return Pair(_trained(kernel, (logits,), grad), _trained(plain, (logits,), grad), _bytes(logits, logits, grad))


def balance(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """The balancing losses of a microbatch and their gradient."""
    logits = torch.randn(size.tokens, size.experts, device=device)
    router = _kernels("router")
    coefficients = {name: 0.1 if name == "load_balancing_loss" else 0.0 for name in LOSS_NAMES[:3]}

    def losses(kernels: Balancing | None) -> Callable[[], tuple[Tensor, ...]]:
        def run():
            found = balancing_losses(logits, num_sequences=1, topk=size.topk, score_function=size.score, coefficients=coefficients,
                                     z_loss_coeff=1e-3, per_token_loss=True, running=None, ps=ParallelState.single(), kernels=kernels)
            return found.values, found.grad_TE

        return run

    return Pair(losses(Balancing(router.count_choices, router.balancing_gradient, router.attach_gradient)), losses(None), _bytes(logits) * 3)


def loss(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """Softmax of the logits and their gradient, both in place (on a copy, which both pay for)."""
    logits = (torch.randn(size.tokens, size.vocab, device=device) * 3).to(dtype)
    labels = torch.randint(size.vocab, (size.tokens,), device=device)
    factor = torch.rand(size.tokens, device=device)

    def steps(module) -> Callable[[], tuple[Tensor, ...]]:
        def run():
            kept = logits.clone()
            found = module.softmax_in_place(kept, labels)
            module.gradient_in_place(kept, labels, factor, -factor)
            return *found, kept

        return run

    return Pair(steps(_kernels("cross_entropy")), steps(cross_entropy), _bytes(logits) * 4)


def _loop(size: Size, offsets: Tensor) -> GroupedProducts:
    """Expert by expert, for dtypes that grouped_mm does not take."""
    ends = offsets.tolist()
    rows = [slice(start, stop) for start, stop in zip([0, *ends], ends)]
    return GroupedProducts(
        lambda x, w, _: torch.cat([x[each] @ w[e].t() for e, each in enumerate(rows)]),
        lambda g, w, _: torch.cat([g[each] @ w[e] for e, each in enumerate(rows)]),
        lambda g, x, _: torch.stack([g[each].t() @ x[each] for each in rows]))


def products(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """fc1 of the experts: output, gradient of the input, gradient of the weight."""
    counts = _routing(size, device).sum(0)[:size.local]
    offsets = counts.cumsum(0).to(torch.int32)
    num_rows = int(offsets[-1])
    x = torch.randn(num_rows, size.hidden, device=device).to(dtype)
    w = (torch.randn(size.local, 2 * size.ffn, size.hidden, device=device) * 0.02).to(dtype)
    grad = torch.randn(num_rows, 2 * size.ffn, device=device).to(dtype)
    module = _kernels("grouped_gemm")
    ours = GroupedProducts(module.grouped_forward, module.grouped_input_grad, module.grouped_weight_grad)
    theirs = GROUPED_MM if dtype == torch.bfloat16 else _loop(size, offsets)

    def all_three(made: GroupedProducts) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (made.forward(x, w, offsets), made.input_grad(grad, w, offsets), made.weight_grad(grad, x, offsets))

    return Pair(all_three(ours), all_three(theirs), _bytes(x, w, grad) * 2, 3 * 2 * num_rows * size.hidden * 2 * size.ffn)


def quantisation(scaling: Scaling) -> Callable[[Size, torch.dtype, str], Pair]:
    """Activations to E4M3 bytes; the torch side makes the same bytes."""
    def pair(size: Size, dtype: torch.dtype, device: str) -> Pair:
        x = torch.randn(size.tokens, size.hidden, device=device).to(dtype)
        ours = _kernels("quantize").quantize

        def kernel():
            data, inverse = ours(x, scaling)
            return data.view(torch.uint8), inverse

        def plain():
            made = quantize.quantize(x, scaling)
            return made.values.to(scaling.fmt.dtype).view(torch.uint8), made.inverse

        return Pair(kernel, plain, _bytes(x))

    return pair


def delta_rule(size: Size, dtype: torch.dtype, device: str) -> Pair:
    """Convolution, gates and gated delta rule of a linear attention: two value heads for a key head."""
    heads = gated_delta_rule.Heads(max(1, size.heads // 2), max(1, size.heads // 2) * 2, size.head_dim, size.head_dim)
    x = torch.randn(size.tokens, 1, sum(heads.channels), device=device).to(dtype)
    gates = [torch.randn(size.tokens, 1, heads.values, device=device).to(dtype) for _ in range(2)]
    rest = [torch.randn(sum(heads.channels), 4, device=device).to(dtype) / 2, *(torch.randn(heads.values, device=device).to(dtype) for _ in range(2))]
    grad = torch.randn(size.tokens, 1, heads.values, heads.value_dim, device=device).to(dtype)
    ours, theirs = _kernels("delta_rule").gated_delta, gated_delta_rule.gated_delta
    return Pair(_trained(lambda *given: ours(*given, heads), (x, *gates, *rest), grad),
                _trained(lambda *given: theirs(*given, heads), (x, *gates, *rest), grad), _bytes(x, x, grad))


PAIRS = (
    ("activation", activation), ("norm", norm), ("norm of heads", head_norm), ("rope", rotation), ("permute", reordering),
    ("router", routing), ("balance", balance), ("cross-entropy", loss), ("grouped-gemm", products), ("delta-rule", delta_rule),
    ("quantize 1x128", quantisation(Scaling(E4M3, 1, 128, POWER_OF_TWO))),
    ("quantize 128x128", quantisation(Scaling(E4M3, 128, 128, POWER_OF_TWO))),
    ("quantize tensor", quantisation(Scaling(E4M3))), ("quantize mxfp8", quantisation(Scaling(E4M3, 1, 32, POWER_OF_TWO))),
)
NAMES = tuple(name for name, _ in PAIRS)


def make(name: str, size: str, dtype: torch.dtype, device: str) -> Pair:
    """The pair of a name at a named size; the same inputs every time."""
    torch.manual_seed(1)
    return dict(PAIRS)[name](dict(SIZES)[size], dtype, device)

"""Test cases of all Triton kernels, each with the torch operation it replaces, on the same inputs.

    case = make("norm", "mixtral", torch.bfloat16, "cuda")
    case.kernel(), case.plain()          # tuples of the same results
    case.milliseconds(case.kernel)       # median of CUDA events

Used by scripts/benchmarks/bench_kernels.py and tests/gpu. A case has forward and backward if training always runs both.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.layers.kernels import Balancing
from moe_trainer.moe.balancing import LOSS_NAMES, LossSettings, balancing_losses
from moe_trainer.moe.selections.topk import score_topk
from moe_trainer.ops import cross_entropy, gated_delta_rule, permute, pointwise, rope
from moe_trainer.ops.expert_mlp import get_activation_fns
from moe_trainer.ops.grouped_gemm import GROUPED_MM, GroupedGemms, token_offsets
from moe_trainer.ops.main_grad import MainGradSum
from moe_trainer.ops.pointwise import Activation
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization import quantize
from moe_trainer.quantization.quantize import E4M3, POWER_OF_TWO, Scaling

SWIGLU = Activation("silu", gated=True)


class Size(NamedTuple):
    """Sizes of a model on one rank."""

    tokens: int
    hidden: int
    ffn: int  # of one expert
    experts: int
    local: int  # experts of this rank
    topk: int
    vocab: int  # of this rank
    heads: int
    head_dim: int
    rotated: int  # features of a head
    offset: int = 0  # of the first rotated feature
    groups: tuple[int, int] | None = None  # number of groups, selected groups
    score: str = "softmax"


SIZES = (
    ("qwen3-30b", Size(4096, 2048, 768, 128, 128, 8, 151936, 32, 128, 128)),
    ("mixtral", Size(4096, 4096, 14336, 8, 8, 2, 32000, 32, 128, 128)),
    ("deepseek-v3", Size(4096, 7168, 2048, 256, 32, 8, 129280, 128, 192, 64, 128, (8, 4), "sigmoid")),
    ("parity", Size(1000, 1032, 520, 24, 24, 3, 5003, 6, 96, 32, 64, (4, 2), "sigmoid")),
    ("tiny", Size(9, 40, 24, 6, 6, 2, 50, 2, 12, 4, 8, (3, 2), "sigmoid")),
)


@dataclass(frozen=True)
class KernelCase:
    """A kernel and the torch operation it replaces; both return tuples of the same results."""

    kernel: Callable[[], tuple[Tensor, ...]]
    plain: Callable[[], tuple[Tensor, ...]]
    input_bytes: int
    flops: int = 0  # of a GEMM; 0 for memory-bound kernels

    def milliseconds(self, function: Callable, rounds: int = 20) -> float:
        """Return the median device time of a call after warm-up calls, the first of which compiles."""
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


def _kernels(name: str, package: str = "ops"):
    return import_module(f"moe_trainer.{package}.triton_{name}")


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _with_backward(
    function: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs function(*leaves) and its backward, and returns the result and all gradients."""

    def run():
        detached = [leaf.detach().requires_grad_() for leaf in leaves]
        y = function(*detached)
        y.backward(grad)
        return y.detach(), *(leaf.grad for leaf in detached)

    return run


def activation(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """SwiGLU times probability, of routed tokens."""
    num_routed = size.tokens * size.topk
    h = torch.randn(num_routed, 2 * size.ffn, device=device).to(dtype)
    p, grad = torch.rand(num_routed, device=device), torch.randn(num_routed, size.ffn, device=device).to(dtype)
    fused, block = _kernels("pointwise").SWIGLU, get_activation_fns(SWIGLU)
    return KernelCase(
        lambda: (fused.forward(h, p), *fused.backward(h, p, grad)),
        lambda: (block.forward(h, p), *block.backward(h, p, grad.clone())),
        _bytes(h, h, p, grad),
    )


def norm(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """RMSNorm of the residual stream."""
    return _rms_norm((size.tokens, size.hidden), dtype, device)


def head_norm(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """RMSNorm of the queries of every head (--qk-layernorm)."""
    return _rms_norm((size.tokens, size.heads, size.head_dim), dtype, device)


def _rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> KernelCase:
    x, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], device=device).to(dtype)
    kernel = _kernels("norm").rms_norm
    return KernelCase(
        _with_backward(lambda x, w: kernel(x, w, 1e-6), (x, weight), grad),
        _with_backward(lambda x, w: pointwise.rms_norm(x, w, 1e-6), (x, weight), grad),
        _bytes(x, x, grad),
    )


def rotation(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """Rotary embedding of the queries; for multi-latent attention of a part of each head, with interleaved features."""
    x, grad = (torch.randn(size.tokens, 1, size.heads, size.head_dim, device=device).to(dtype) for _ in range(2))
    tables = rope.rope_tables(rope.inverse_frequencies(size.rotated, 10000.0), torch.arange(size.tokens, device=device))
    kernel = _kernels("rope").apply_rope
    options = (*tables, size.offset > 0, size.offset)
    return KernelCase(
        _with_backward(lambda x: kernel(x, *options), (x,), grad),
        _with_backward(lambda x: rope.apply_rope(x, *options), (x,), grad),
        _bytes(x, grad),
    )


def _routing(size: Size, device: str) -> Tensor:
    scores = torch.randn(size.tokens, size.experts, device=device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(size.topk, 1)[1], True)


def reordering(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """Permutation of tokens to expert order and back, with probabilities and gradients."""
    x, grad = (torch.randn(size.tokens, size.hidden, device=device).to(dtype) for _ in range(2))
    routing = _routing(size, device)
    probs = torch.rand(size.tokens, size.experts, device=device) * routing

    def round_trip(permutation: permute.Permutation) -> Callable:
        def run(x: Tensor, probs: Tensor) -> Tensor:
            x_RH, probs_R, routes = permutation.permute(x, probs, routing)
            return permutation.unpermute(x_RH, routes) + probs_R.sum().to(x.dtype)

        return _with_backward(run, (x, probs), grad)

    return KernelCase(
        round_trip(_kernels("permute").TritonPermutation()),
        round_trip(permute.Permutation()),
        _bytes(x, grad) * (2 + 2 * size.topk) // 2,
    )


def routing(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """Top-k with its backward. The logits are always fp32: in a lower precision ties are resolved differently."""
    logits, grad = (torch.randn(size.tokens, size.experts, device=device) for _ in range(2))
    bias = torch.randn(size.experts, device=device) * 0.1 if size.score == "sigmoid" else None
    num_groups, group_topk = size.groups or (None, None)
    options = {"num_groups": num_groups, "group_topk": group_topk, "score_function": size.score}
    fused_topk = _kernels("router").fused_topk

    def kernel(logits: Tensor) -> Tensor:
        return fused_topk(logits, size.topk, expert_bias=bias, **options)[0]

    def plain(logits: Tensor) -> Tensor:
        return score_topk(logits, size.topk, expert_bias_E=bias, **options)[0]

    return KernelCase(
        _with_backward(kernel, (logits,), grad), _with_backward(plain, (logits,), grad), _bytes(logits, logits, grad)
    )


def balance(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """The balancing losses of a microbatch and their gradient."""
    logits = torch.randn(size.tokens, size.experts, device=device)
    router = _kernels("router")
    coefficients = {name: 0.1 if name == "load_balancing_loss" else 0.0 for name in LOSS_NAMES[:3]}

    def losses(kernels: Balancing | None) -> Callable[[], tuple[Tensor, ...]]:
        def run():
            result = balancing_losses(
                logits,
                LossSettings(size.topk, size.score, coefficients, 1e-3, True),
                num_sequences=1,
                running=None,
                ps=ParallelState.single(),
                kernels=kernels,
            )
            return result.values, result.grad_TE

        return run

    return KernelCase(
        losses(Balancing(router.count_choices, router.balancing_gradient, router.attach_gradient)),
        losses(None),
        _bytes(logits) * 3,
    )


def loss(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """Softmax of the logits and their gradient, both in place, on a copy whose cost both sides include."""
    logits = (torch.randn(size.tokens, size.vocab, device=device) * 3).to(dtype)
    labels = torch.randint(size.vocab, (size.tokens,), device=device)
    factor = torch.rand(size.tokens, device=device)

    def steps(module) -> Callable[[], tuple[Tensor, ...]]:
        def run():
            copy = logits.clone()
            result = module.softmax_in_place(copy, labels)
            module.gradient_in_place(copy, labels, factor, -factor)
            return *result, copy

        return run

    return KernelCase(steps(_kernels("cross_entropy")), steps(cross_entropy), _bytes(logits) * 4)


def _loop(size: Size, offsets: Tensor) -> GroupedGemms:
    """Grouped GEMMs as a loop over experts, for dtypes that grouped_mm does not support."""
    ends = offsets.tolist()
    experts = [slice(start, stop) for start, stop in zip([0, *ends], ends)]
    return GroupedGemms(
        lambda x, w, _: torch.cat([x[tokens] @ w[e].t() for e, tokens in enumerate(experts)]),
        lambda g, w, _: torch.cat([g[tokens] @ w[e] for e, tokens in enumerate(experts)]),
        lambda g, x, _: torch.stack([g[tokens].t() @ x[tokens] for tokens in experts]),
    )


def gemms(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """Grouped GEMMs of fc1 of the experts: output, gradient of the input, gradient of the weight."""
    counts = _routing(size, device).sum(0)[: size.local]
    offsets = counts.cumsum(0).to(torch.int32)
    num_tokens = int(offsets[-1])
    x = torch.randn(num_tokens, size.hidden, device=device).to(dtype)
    w = (torch.randn(size.local, 2 * size.ffn, size.hidden, device=device) * 0.02).to(dtype)
    grad = torch.randn(num_tokens, 2 * size.ffn, device=device).to(dtype)
    module = _kernels("grouped_gemm")
    kernel = GroupedGemms(module.grouped_forward, module.grouped_input_grad, module.grouped_weight_grad)
    plain = GROUPED_MM if dtype == torch.bfloat16 else _loop(size, offsets)

    def all_three(grouped: GroupedGemms) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (
            grouped.forward(x, w, offsets),
            grouped.input_grad(grad, w, offsets),
            grouped.weight_grad(grad, x, offsets),
        )

    flops = 3 * 2 * num_tokens * size.hidden * 2 * size.ffn
    return KernelCase(all_three(kernel), all_three(plain), _bytes(x, w, grad) * 2, flops)


def expert_gradients(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """Weight gradient of fc1 of the experts, in fp32; torch's is a GEMM of each expert."""
    counts = _routing(size, device).sum(0)[: size.local].tolist()
    offsets = token_offsets(counts, torch.device(device))
    x = torch.randn(sum(counts), size.hidden, device=device).to(dtype)
    grad = torch.randn(len(x), 2 * size.ffn, device=device).to(dtype)
    sums = [
        MainGradSum(torch.empty(size.local, 2 * size.ffn, size.hidden, device=device), beta=0.0, alpha=0.5)
        for _ in range(2)
    ]
    module = _kernels("grouped_gemm")

    def kernel() -> tuple[Tensor, ...]:
        module.add_weight_grad(grad, x, offsets, sums[0])
        return (sums[0].total,)

    def plain() -> tuple[Tensor, ...]:
        for expert, (g, rows) in enumerate(zip(grad.split(counts), x.split(counts), strict=True)):
            sums[1].slice(expert).add(g.t(), rows)
        return (sums[1].total,)

    return KernelCase(kernel, plain, _bytes(x, grad), 2 * len(x) * size.hidden * 2 * size.ffn)


def quantization(scaling: Scaling) -> Callable[[Size, torch.dtype, str], KernelCase]:
    """Quantization of activations to E4M3; both sides return the same bytes."""

    def make_case(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
        x = torch.randn(size.tokens, size.hidden, device=device).to(dtype)
        quantize_kernel = _kernels("quantize", "quantization").quantize

        def kernel():
            data, inverse = quantize_kernel(x, scaling)
            return data.view(torch.uint8), inverse

        def plain():
            quantized = quantize.quantize(x, scaling)
            return quantized.values.to(scaling.fmt.dtype).view(torch.uint8), quantized.inverse

        return KernelCase(kernel, plain, _bytes(x))

    return make_case


def delta_rule(size: Size, dtype: torch.dtype, device: str) -> KernelCase:
    """Convolution, gates and gated delta rule of a linear attention with two value heads per key head."""
    heads = gated_delta_rule.Heads(max(1, size.heads // 2), max(1, size.heads // 2) * 2, size.head_dim, size.head_dim)
    x = torch.randn(size.tokens, 1, sum(heads.channels), device=device).to(dtype)
    gates = [torch.randn(size.tokens, 1, heads.values, device=device).to(dtype) for _ in range(2)]
    parameters = [
        torch.randn(sum(heads.channels), 4, device=device).to(dtype) / 2,
        *(torch.randn(heads.values, device=device).to(dtype) for _ in range(2)),
    ]
    grad = torch.randn(size.tokens, 1, heads.values, heads.value_dim, device=device).to(dtype)
    kernel = _kernels("delta_rule").gated_delta
    return KernelCase(
        _with_backward(lambda *inputs: kernel(*inputs, heads), (x, *gates, *parameters), grad),
        _with_backward(lambda *inputs: gated_delta_rule.gated_delta(*inputs, heads), (x, *gates, *parameters), grad),
        _bytes(x, x, grad),
    )


CASES = (
    ("activation", activation),
    ("norm", norm),
    ("norm of heads", head_norm),
    ("rope", rotation),
    ("permute", reordering),
    ("router", routing),
    ("balance", balance),
    ("cross-entropy", loss),
    ("expert-wgrad", expert_gradients),
    ("grouped-gemm", gemms),
    ("delta-rule", delta_rule),
    ("quantize 1x128", quantization(Scaling(E4M3, 1, 128, POWER_OF_TWO))),
    ("quantize 128x128", quantization(Scaling(E4M3, 128, 128, POWER_OF_TWO))),
    ("quantize tensor", quantization(Scaling(E4M3))),
    ("quantize mxfp8", quantization(Scaling(E4M3, 1, 32, POWER_OF_TWO))),
)
NAMES = tuple(name for name, _ in CASES)


def make(name: str, size: str, dtype: torch.dtype, device: str) -> KernelCase:
    """Build the case of a name at a named size; its inputs are always the same."""
    torch.manual_seed(1)
    return dict(CASES)[name](dict(SIZES)[size], dtype, device)

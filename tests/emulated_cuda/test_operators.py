"""Operations that CUDA computes with other operators than a CPU: equal results, gradients, and tensors saved for backward."""

from collections.abc import Callable
from functools import partial

import pytest
from emulated_cuda.run import on_device

ROWS, WIDTH = 6, 16


def tensors(dtype, *shapes):
    import torch

    torch.manual_seed(1)
    return [torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(function: Callable, given: list, device: str) -> list:
    """The results of `function` and the gradients of `given`, in fp32 on the CPU."""
    import torch

    leaves = [x.detach().to(device).requires_grad_(x.requires_grad) for x in given]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    differentiable = [y for y in outs if y.requires_grad]
    torch.autograd.backward(
        differentiable,
        [torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(y.dtype) for y in differentiable],
    )
    return [(y.dtype, y.detach().float().cpu()) for y in (*outs, *(x.grad for x in leaves if x.grad is not None))]


def norm(weight: str | None, zero_centered: bool, x_TH, *weights):
    import torch

    from moe_trainer.ops.pointwise import rms_norm

    gain = weights[0].to(getattr(torch, weight)) if weights else None
    return rms_norm(x_TH, gain, 1e-5, zero_centered)


def rope(interleaved: bool, x_SBND):
    import torch

    from moe_trainer.ops.rope import apply_rope, inverse_frequencies, rope_tables

    cos, sin = rope_tables(inverse_frequencies(8, 100.0), torch.arange(4, device=x_SBND.device))
    return apply_rope(x_SBND, cos, sin, interleaved, offset=4)


def weight_gradient(total: str, left_RN, right_RK):
    """Two gradients of a weight, the second one added to the first."""
    import torch

    from moe_trainer.ops.main_grad import MainGradSum, can_accumulate_gemm

    left, right = left_RN.detach(), right_RK.detach()
    into = torch.full((left.shape[1], right.shape[1]), float("nan"), dtype=getattr(torch, total), device=left.device)
    for beta in (0.0, 1.0):
        part = MainGradSum(into, beta, 0.5)
        if can_accumulate_gemm(into, left):
            part.add(left.t(), right)
        else:
            assert not left.is_cuda
            part.add_gradient(left.t() @ right)
    return into + 0 * (left_RN.sum() + right_RK.sum())


def router(x_TH, weight_EH):
    import torch

    from moe_trainer.moe.router import _Gate

    return _Gate.apply(x_TH, weight_EH, torch.float32)


def select_topk(options: dict, logits_TE):
    from moe_trainer.moe.selections.topk import score_topk

    return score_topk(logits_TE * 2, 3, **options)


def balancing_gradient(score: str, sequences: bool, logits_TE):
    """The gradient of all losses, as it is attached."""
    from moe_trainer.moe.balancing import LossSettings, attach_gradient, balancing_losses
    from moe_trainer.parallel.state import ParallelState

    coefficients = {
        "load_balancing_loss": 1.0,
        "seq_load_balancing_loss": float(sequences),
        "global_load_balancing_loss": 0.0,
    }
    losses = balancing_losses(
        logits_TE.detach(),
        LossSettings(2, score, coefficients, 1.0),
        num_sequences=2,
        running=None,
        ps=ParallelState.single(),
    )
    return attach_gradient(logits_TE, losses.grad_TE, 0.5) * 1, losses.values


def permuted(x_TH, probs_TE):
    from moe_trainer.ops.permute import Permutation

    routing_TE, work = probs_TE.detach() > 0, Permutation()
    x_RH, probs_R, routes = work.permute(x_TH, probs_TE, routing_TE, num_rows=int(routing_TE.sum()))
    return work.unpermute(x_RH * probs_R.unsqueeze(1), routes), routes.counts_E


def delta(length: int, x_SBC, beta_SBN, alpha_SBN, weight_CW):
    import torch

    from moe_trainer.ops import gated_delta_rule

    gated_delta_rule.CHUNK, gated_delta_rule.SEGMENT = length, 2  # so that there are several of both
    return gated_delta_rule.gated_delta(
        x_SBC,
        beta_SBN,
        alpha_SBN,
        weight_CW,
        *(torch.ones(2, device=x_SBC.device) for _ in range(2)),
        gated_delta_rule.Heads(1, 2, 8, 8),
    )


def delta_in_triton(x_SBC, beta_SBN, alpha_SBN, weight_CW):
    """On the device in Triton's kernels, on a CPU in plain torch."""
    import torch

    from moe_trainer.ops import gated_delta_rule

    if x_SBC.is_cuda:
        from moe_trainer.ops.triton_delta_rule import gated_delta
    else:
        gated_delta = gated_delta_rule.gated_delta
    return gated_delta(
        x_SBC,
        beta_SBN,
        alpha_SBN,
        weight_CW,
        *(torch.ones(2, device=x_SBC.device) for _ in range(2)),
        gated_delta_rule.Heads(1, 2, 8, 8),
    )


NORMED = ((ROWS, WIDTH), (WIDTH,))
CASES = {
    "norm": (partial(norm, None, False), NORMED[:1]),
    "norm, bf16 gain": (partial(norm, "bfloat16", False), NORMED),
    "norm, fp32 gain": (partial(norm, "float32", False), NORMED),
    "norm, bf16 gain from one": (partial(norm, "bfloat16", True), NORMED),
    "weight gradient in fp32": (partial(weight_gradient, "float32"), ((ROWS, 3), (ROWS, WIDTH))),
    "logits in fp32": (router, ((ROWS, WIDTH), (4, WIDTH))),
    "softmax of the chosen": (partial(select_topk, {}), ((ROWS, 8),)),
    "softmax before the choice": (partial(select_topk, {"pre_softmax": True, "scaling_factor": 2.5}), ((ROWS, 8),)),
    "shares of sigmoids": (partial(select_topk, {"score_function": "sigmoid", "scaling_factor": 2.5}), ((ROWS, 8),)),
    "balancing by softmax": (partial(balancing_gradient, "softmax", False), ((ROWS, 8),)),
    "balancing by sigmoid, per sequence": (partial(balancing_gradient, "sigmoid", True), ((ROWS, 8),)),
    "permutation": (permuted, ((ROWS, WIDTH), (ROWS, 8))),
    "delta rule, one chunk": (partial(delta, 8), ((8, 2, 32), (8, 2, 2), (8, 2, 2), (32, 4))),
    "delta rule, segments": (partial(delta, 2), ((8, 2, 32), (8, 2, 2), (8, 2, 2), (32, 4))),
    "delta rule, Triton": (delta_in_triton, ((66, 1, 32), (66, 1, 2), (66, 1, 2), (32, 4))),
    "rope, halves": (partial(rope, False), ((4, 2, 3, WIDTH),)),
    "rope, interleaved": (partial(rope, True), ((4, 2, 3, WIDTH),)),
}


def compare(name: str, dtype: str) -> None:
    import torch

    function, shapes = CASES[name]
    given = tensors(getattr(torch, dtype), *shapes)
    # rounding of bf16: two of its last places
    close = {"rtol": 2**-6, "atol": 2**-6} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in zip(
        with_gradients(function, given, "cuda"), with_gradients(function, given, "cpu"), strict=True
    ):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], **close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_cuda_operators_equal_cpu_operators(name, dtype):
    if "Triton" in name:
        pytest.importorskip("triton")
    on_device(compare, name, dtype)

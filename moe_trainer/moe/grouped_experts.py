"""The experts' MLP with a library's grouped linears, or a library's MLP: fc1 -> activation * probability -> fc2.

The linears (layers/te_experts.py) need a multiple of tokens per expert, so tokens are padded with zeros and the results
unpadded, unless --moe-router-padding-for-quantization has padded the routing. The activation is that of
ops/expert_mlp.py.

Shape letters: R routed tokens sorted by expert, P with padding, e experts, H hidden, F expert FFN width, G fc1 output
width (2F when gated).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.host_read import integer_tensor
from moe_trainer.moe.receive.padding import TokenPadding
from moe_trainer.ops.expert_mlp import ActivationFns, ExpertWeights
from moe_trainer.ops.grouped_gemm import check_token_counts


class GroupedLinear(Protocol):
    """One linear of all experts, by a library (layers/te_experts.py) or with adapters (expert_lora.py).

    Attributes:
        pad_multiple: of each expert's tokens.
    """

    pad_multiple: int

    def __call__(self, x_RK: Tensor, weight_eNK: Tensor, counts: Sequence[int], /) -> Tensor: ...


class ExpertPipeline(Protocol):
    """MLP of all experts by a library (layers/te_ops.py)."""

    pad_multiple: int
    host_problem: str | None

    def __call__(
        self,
        x_PH: Tensor,
        probs_P: Tensor | None,
        w1_eGH: Tensor,
        w2_eHF: Tensor,
        counts: Sequence[int] | Tensor,
        *,
        stash_scope: Callable[[int, Callable[[Tensor], bool]], AbstractContextManager],
    ) -> Tensor: ...


class _ActivationTimesProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_PG: Tensor, probs_P: Tensor | None, activation_fns: ActivationFns) -> Tensor:
        ctx.save_for_backward(h_PG, probs_P)
        ctx.activation_fns = activation_fns
        return activation_fns.forward(h_PG, probs_P)

    @staticmethod
    def backward(ctx, grad_PF: Tensor):
        _, grad_h, grad_p = ctx.activation_fns.backward(*ctx.saved_tensors, grad_PF.contiguous())
        return grad_h, grad_p, None


def grouped_expert_mlp(
    x_RH: Tensor,
    probs_R: Tensor | None,
    weights: ExpertWeights,
    counts: Sequence[int] | Tensor,
    linears: tuple[GroupedLinear, GroupedLinear],
    activation_fns: ActivationFns,
    activations: ActivationPolicy,
    *,
    unused: int = 0,
) -> Tensor:
    """Run every expert on its tokens, of which there must be at least one in all; see expert_mlp.expert_mlp.

    Args:
        linears: fc1 and fc2, with the same pad_multiple.

    Raises:
        ValueError: if the counts do not add up to R, or are on the device.
    """
    if isinstance(counts, Tensor):
        raise ValueError("grouped_expert_mlp: it needs counts on the host")
    num_tokens = x_RH.shape[0] - unused
    check_token_counts("grouped_expert_mlp", counts, num_tokens)
    fc1, fc2 = linears
    w1_eGH, w2_eHF, b1_eG, b2_eH = weights
    padding = TokenPadding(counts, fc1.pad_multiple, x_RH.device)
    probs_R = None if probs_R is None else probs_R[:num_tokens]
    probs_P = None if probs_R is None else padding.pad(probs_R)
    with activations.offload_scope("expert_fc1"):
        h_PG = fc1(padding.pad(x_RH[:num_tokens]), w1_eGH, padding.counts)
    if b1_eG is not None:
        h_PG = h_PG + _repeat_per_token(b1_eG, padding.counts)
    inputs = (h_PG,) if probs_P is None else (h_PG, probs_P)
    with activations.offload_scope("moe_act"):
        a_PF, scope = activations.recompute_output(
            "moe_act", lambda h, p=None: _ActivationTimesProb.apply(h, p, activation_fns), *inputs
        )
        with scope:
            y_RH = padding.unpad(fc2(a_PF, w2_eHF, padding.counts))
    if b2_eH is not None:
        bias_RH = _repeat_per_token(b2_eH, counts)
        y_RH = y_RH + (bias_RH if probs_R is None else (bias_RH * probs_R.unsqueeze(1)).to(bias_RH.dtype))
    return F.pad(y_RH, (0, 0, 0, unused)) if unused else y_RH


def pipeline_expert_mlp(
    pipeline: ExpertPipeline,
    x_RH: Tensor,
    probs_R: Tensor | None,
    weights: tuple[Tensor, Tensor],
    counts: Sequence[int] | Tensor,
    activations: ActivationPolicy,
    unused: int = 0,
) -> Tensor:
    """Run a library's MLP of all experts on their tokens, of which there must be at least one in all.

    Args:
        weights: of fc1 and fc2.
        counts: tokens per expert: host integers, or a tensor on the device in multiples of the pipeline's pad_multiple.
        unused: tokens at the end of x_RH that no expert has; 0 with counts on the device.
    """
    stash_scope = activations.library_stash_scope
    if isinstance(counts, Tensor):
        return pipeline(x_RH, probs_R, *weights, counts, stash_scope=stash_scope)
    num_tokens = x_RH.shape[0] - unused
    padding = TokenPadding(counts, pipeline.pad_multiple, x_RH.device)
    x_PH, probs_P = padding.pad(x_RH[:num_tokens]), None if probs_R is None else padding.pad(probs_R[:num_tokens])
    y_RH = padding.unpad(pipeline(x_PH, probs_P, *weights, padding.counts, stash_scope=stash_scope))
    return F.pad(y_RH, (0, 0, 0, unused)) if unused else y_RH


def _repeat_per_token(bias_eN: Tensor, counts: Sequence[int]) -> Tensor:
    return bias_eN.repeat_interleave(integer_tensor(counts, bias_eN.device), dim=0, output_size=sum(counts))

"""The experts' feed-forward with linears of a library: fc1 -> activation * probability -> fc2, each linear one grouped call.

The linears (layers/te_experts.py) know nothing but products of rows in multiples that their units take. So here every
expert's rows are filled up with zeros first and picked out again at the end, unless they come in such multiples
(--moe-router-padding-for-quantization). Zero rows have zero gradients and add nothing. The activation is computed by
the same block functions as in ops/expert_mlp.py; it keeps fc1's output and the probabilities, fc2 keeps what it was
given, or, where moe_act is recomputed, gets it again.

Shape letters: R rows sorted by expert, P rows with padding, e experts, H hidden, F expert FFN width, G fc1 output
width (2F when gated).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.host_read import integer_tensor
from moe_trainer.moe.padding import RowPadding
from moe_trainer.ops.expert_mlp import ActivationFns

GroupedLinear = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


class _Weighed(torch.autograd.Function):
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
    w1_eGH: Tensor,
    w2_eHF: Tensor,
    counts: Sequence[int],
    linears: tuple[GroupedLinear, GroupedLinear],
    activation_fns: ActivationFns,
    activations: ActivationPolicy,
    *,
    pad_multiple: int = 1,
    b1_eG: Tensor | None = None,
    b2_eH: Tensor | None = None,
    unused: int = 0,
) -> Tensor:
    """Run every expert on its rows, at least one in all. linears: fc1 and fc2, of (rows, weights, row counts).

    pad_multiple: of the linears. Everything else as expert_mlp.expert_mlp. Raises: ValueError when the counts do not
    add up to R.
    """
    num_rows = x_RH.shape[0] - unused
    if sum(counts) != num_rows:
        raise ValueError(
            f"grouped_expert_mlp: the experts' row counts add up to {sum(counts)}, but there are {num_rows} rows"
        )
    fc1, fc2 = linears
    padding = RowPadding(counts, pad_multiple, x_RH.device)
    probs_R = None if probs_R is None else probs_R[:num_rows]
    probs_P = None if probs_R is None else padding.pad(probs_R)
    with activations.offload_scope("expert_fc1"):
        h_PG = fc1(padding.pad(x_RH[:num_rows]), w1_eGH, padding.counts)
    if b1_eG is not None:
        h_PG = h_PG + _per_row(b1_eG, padding.counts)
    given = (h_PG,) if probs_P is None else (h_PG, probs_P)
    with activations.offload_scope("moe_act"):
        a_PF, inside = activations.recompute_output(
            "moe_act", lambda h, p=None: _Weighed.apply(h, p, activation_fns), *given
        )
        with inside:
            y_RH = padding.unpad(fc2(a_PF, w2_eHF, padding.counts))
    if b2_eH is not None:
        bias_RH = _per_row(b2_eH, counts)
        y_RH = y_RH + (bias_RH if probs_R is None else (bias_RH * probs_R.unsqueeze(1)).to(bias_RH.dtype))
    return F.pad(y_RH, (0, 0, 0, unused)) if unused else y_RH


def _per_row(bias_eN: Tensor, counts: Sequence[int]) -> Tensor:
    return bias_eN.repeat_interleave(integer_tensor(counts, bias_eN.device), dim=0, output_size=sum(counts))

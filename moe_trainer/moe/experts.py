"""The experts of one layer: stacked weights, run on rows sorted by expert.

Weights of all local experts live in one parameter, [e, rows, hidden]; checkpoints and optimizers see one name per expert
(ParamInfo.stacked). --moe-grouped-gemm allows one product for all experts where that is faster; without it experts run one by one.
Both give the same numbers up to rounding.

Shape letters: R rows sorted by expert, e local experts, H hidden, F expert FFN width, G fc1 output width (2F when gated).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_trainer.layers.init import Init, hidden_init, make_parameter, residual_init
from moe_trainer.layers.kit import Kit
from moe_trainer.layers.mlp import MLP, make_activation
from moe_trainer.ops.expert_mlp import expert_mlp
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState


class _ExpertLinear(nn.Module):
    """Holds the stacked weight and bias of one linear of all local experts; `Experts` does the arithmetic."""

    def __init__(self, names: Sequence[str], rows: int, columns: int, bias: bool, init: Init):
        super().__init__()
        self.weight = make_parameter((len(names), rows, columns), ParamInfo(
            tuple(f"{name}.weight" for name in names), kind="expert", stacked=True, init=init.kind, init_std=init.std))
        self.bias = make_parameter((len(names), rows), ParamInfo(
            tuple(f"{name}.bias" for name in names), kind="expert", stacked=True, init="zeros")) if bias else None


class Experts(nn.Module):
    """All local experts of one layer."""

    def __init__(self, args, ps: ParallelState, name: str):
        super().__init__()
        model, moe = args.model, args.moe
        ffn = moe.moe_ffn_hidden_size or model.ffn_hidden_size
        self.activation = make_activation(model)
        self.allow_grouped = moe.moe_grouped_gemm
        self.probs_on_input = moe.moe_apply_probs_on_input
        num_local = moe.num_experts // ps.ep.size
        first = ps.ep.rank * num_local
        names = [f"{name}.local_experts.{expert}" for expert in range(first, first + num_local)]
        bias = model.add_bias_linear
        self.linear_fc1 = _ExpertLinear(
            [f"{expert}.linear_fc1" for expert in names], ffn * self.activation.in_per_out, model.hidden_size, bias,
            hidden_init(model))
        self.linear_fc2 = _ExpertLinear(
            [f"{expert}.linear_fc2" for expert in names], model.hidden_size, ffn, bias, residual_init(model))

    def forward(self, x_RH: Tensor, probs_R: Tensor, tokens_per_expert_e: Sequence[int]) -> Tensor:
        """Run the experts on their rows; the result is multiplied by the probabilities.

        Shapes: x_RH sorted by expert; probs_R floating; tokens_per_expert_e host integers. Returns: y_RH.
        """
        if self.probs_on_input:
            x_RH = (x_RH * probs_R.unsqueeze(1)).to(x_RH.dtype)
            probs_R = None
        return expert_mlp(
            x_RH, probs_R, self.linear_fc1.weight, self.linear_fc2.weight, tokens_per_expert_e, self.activation,
            b1_eG=self.linear_fc1.bias, b2_eH=self.linear_fc2.bias, allow_grouped=self.allow_grouped,
        )


class SharedExperts(MLP):
    """The expert every token takes; with --moe-shared-expert-gate times sigmoid of a learned projection of the token."""

    def __init__(self, args, ps: ParallelState, name: str, kit: Kit):
        super().__init__(
            args.model, args.moe.moe_shared_expert_intermediate_size, name=name, group=ps.tp, kit=kit, bias=False)
        self.gate_weight = None
        if args.moe.moe_shared_expert_gate:
            init = hidden_init(args.model)
            self.gate_weight = make_parameter((1, args.model.hidden_size), ParamInfo(
                (f"{name}.gate_weight",), init=init.kind, init_std=init.std))

    def forward(self, x_SBH: Tensor) -> Tensor:
        y_SBH = super().forward(x_SBH)
        if self.gate_weight is None:
            return y_SBH
        return y_SBH * torch.sigmoid(F.linear(x_SBH, self.gate_weight))

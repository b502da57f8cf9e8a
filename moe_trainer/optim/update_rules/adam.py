"""AdamW in fp32, by the fused kernel of torch or of a library (ops/fused_library.py).

The kernels apply the factor to gradients of every format, on the device and on the host: numbers must not depend on
placement, but for the roundings of a library's kernel. They scale fp32 gradients in place.
"""

from typing import Any

import torch
from torch import Tensor

from arguments.mechanisms.optimizer_kinds.adam import ADAM
from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.param_groups import ParamGroup, adam_eps
from moe_trainer.optim.update_rules.rule import ElementRule, GroupStep, Tensors, scale_grads


class Adam(ElementRule):
    """AdamW with bias correction and epsilon outside the root."""

    declaration = ADAM

    def update(self, params: Tensors, grads: Tensors, moments: dict[str, Tensors], step: GroupStep) -> None:
        (torch_adam if step.library is None else step.library.adam)(
            params,
            scale_grads(grads, 1.0, step.library),
            moments["exp_avg"],
            moments["exp_avg_sq"],
            lr=step.lr,
            betas=(self._settings.adam_beta1, self._settings.adam_beta2),
            eps=adam_eps(self._settings, step.group),
            weight_decay=step.weight_decay,
            step_count=step.count,
            factor=step.factor,
        )

    def describe(self, group: ParamGroup) -> dict[str, Any]:
        settings = self._settings
        betas = settings.adam_beta1, settings.adam_beta2
        return {"betas": betas, "eps": adam_eps(settings, group), "bias_correction": True}


def torch_adam(
    params: Tensors,
    grads: Tensors,
    averages: Tensors,
    square_averages: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step_count: int,
    factor: float,
) -> None:
    """Update as FusedLibrary.adam does, by torch's kernel."""
    # the fused kernel reads one step counter per tensor; it does not advance them
    steps = [torch.full((), float(step_count), device=params[0].device)] * len(params)
    divisor: Tensor | None = None if factor == 1.0 else torch.full((), 1.0 / factor, device=params[0].device)
    torch._fused_adamw_(
        params,
        grads,
        averages,
        square_averages,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )


def make_rule(settings: OptimizerArgs) -> ElementRule:
    return Adam(settings)

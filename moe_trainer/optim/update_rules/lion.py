"""Lion: a step along the sign of a mean of gradient and momentum (arXiv 2302.06675)."""

from typing import Any

import torch

from arguments.mechanisms.optimizer_kinds.lion import LION
from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.update_rules.rule import ElementRule, GroupStep, Tensors, scale_grads


class Lion(ElementRule):
    """Lion with decoupled weight decay."""

    declaration = LION

    def update(self, params: Tensors, grads: Tensors, moments: dict[str, Tensors], step: GroupStep) -> None:
        grads, averages, settings = scale_grads(grads, step.factor, step.library), moments["exp_avg"], self._settings
        signs = [average.sign_() for average in torch._foreach_lerp(averages, grads, 1.0 - settings.lion_beta1)]
        torch._foreach_mul_(params, 1.0 - step.lr * step.weight_decay)
        torch._foreach_add_(params, signs, alpha=-step.lr)
        torch._foreach_lerp_(averages, grads, 1.0 - settings.lion_beta2)

    def describe(self, group: ParamGroup) -> dict[str, Any]:
        return {"betas": (self._settings.lion_beta1, self._settings.lion_beta2)}


def make_rule(settings: OptimizerArgs) -> ElementRule:
    return Lion(settings)

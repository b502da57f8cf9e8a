"""SGD with momentum and coupled weight decay."""

from typing import Any

import torch

from arguments.mechanisms.optimizer_kinds.sgd import SGD as DECLARATION
from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.update_rules.rule import ElementRule, GroupStep, Tensors, scale_grads


class Sgd(ElementRule):
    """SGD; a zeroed momentum buffer needs no special first step."""

    declaration = DECLARATION

    def update(self, params: Tensors, grads: Tensors, moments: dict[str, Tensors], step: GroupStep) -> None:
        # without momentum the kernel rejects buffers
        grads, momentum = scale_grads(grads, step.factor, step.library), self._settings.sgd_momentum
        buffers = moments["momentum_buffer"] if momentum else []
        if params[0].device.type == "cpu":
            # the fused kernel rounds the values that do not fill a vector differently: results would depend on the
            # shard borders
            decay = step.weight_decay
            grads = list(torch._foreach_add(grads, params, alpha=decay)) if decay else grads
            if buffers:
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, grads)
            torch._foreach_add_(params, buffers or grads, alpha=-step.lr)
            return
        torch._fused_sgd_(
            params,
            grads,
            buffers,
            weight_decay=step.weight_decay,
            momentum=momentum,
            lr=step.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def describe(self, group: ParamGroup) -> dict[str, Any]:
        return {"momentum": self._settings.sgd_momentum}


def make_rule(settings: OptimizerArgs) -> ElementRule:
    return Sgd(settings)

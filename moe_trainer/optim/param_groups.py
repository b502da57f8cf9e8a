"""Megatron's parameter groups: weight decay, learning-rate range, and the matrices that an optimizer updates whole."""

from dataclasses import dataclass

from torch.nn import Parameter

from arguments.mechanisms.optimizers import get_optimizer
from arguments.mup import DECOUPLED_LR_WEIGHTS, EMBEDDING_WEIGHTS, is_lr_scaled, mup_lr_mult
from arguments.optimizer import OptimizerArgs
from moe_trainer.parallel.params import get_param_info, logical_ndim

_QK_NORMS = (".q_layernorm.", ".k_layernorm.")


@dataclass(frozen=True, order=True)
class ParamGroup:
    """Multipliers of a group of parameters.

    Args:
        lr_mult: multiplies the learning-rate range, and Adam's epsilon.
    """

    wd_mult: float
    lr_mult: float
    is_decoupled_lr: bool
    is_expert_parallel: bool

    def rates(
        self, lr: float, weight_decay: float, decoupled_lr: float | None, scaled_lr: float | None = None
    ) -> tuple[float, float]:
        """Return (learning rate, weight decay) of this group in an iteration.

        Args:
            scaled_lr: learning rate of groups with an lr_mult; None for lr * lr_mult.
        """
        if self.lr_mult != 1.0:
            base = lr * self.lr_mult if scaled_lr is None else scaled_lr
        else:
            base = decoupled_lr if self.is_decoupled_lr and decoupled_lr is not None else lr
        return base, weight_decay * self.wd_mult


def adam_eps(optimizer: OptimizerArgs, group: ParamGroup) -> float:
    """Return Adam's epsilon, which scales with the learning rate unless another optimizer updates the matrices."""
    return optimizer.adam_eps * group.lr_mult if get_optimizer(optimizer).epsilon else optimizer.adam_eps


def is_matrix(param: Parameter, optimizer: OptimizerArgs) -> bool:
    """Return whether a parameter is updated as a full matrix: one or a stack of them, no embedding or output layer."""
    is_table = get_param_info(param).names[0].endswith(EMBEDDING_WEIGHTS)
    return get_optimizer(optimizer).updates_matrices and logical_ndim(param) == 2 and not is_table


def get_param_group(param: Parameter, optimizer: OptimizerArgs, expert_parallel: bool) -> ParamGroup:
    """Return the group of a parameter.

    Vectors, biases and what has no gradient are not decayed; query and key norms are with --apply-wd-to-qk-layernorm.

    Args:
        expert_parallel: experts are sharded over ranks, so their parameters are separate groups.
    """
    info = get_param_info(param)
    name = info.names[0]
    is_decayed = logical_ndim(param) > 1 and not name.endswith(".bias") and info.has_gradient
    if optimizer.no_weight_decay_cond_type == "apply_wd_to_qk_layernorm" or optimizer.apply_wd_to_qk_layernorm:
        is_decayed = is_decayed or any(norm in name for norm in _QK_NORMS)
    is_decoupled = optimizer.decoupled_lr is not None and name.endswith(DECOUPLED_LR_WEIGHTS)
    has_scaled_lr = is_lr_scaled(name, logical_ndim(param), optimizer.optimizer, optimizer.decoupled_lr is not None)
    return ParamGroup(
        1.0 if is_decayed else 0.0,
        mup_lr_mult(optimizer.optimizer, optimizer.mup_width_mult) if has_scaled_lr else 1.0,
        is_decoupled,
        expert_parallel and info.kind == "expert",
    )

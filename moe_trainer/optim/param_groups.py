"""Which parameters are decayed, which follow their own learning rate, and which are matrices: Megatron's parameter groups."""

from dataclasses import dataclass

from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.parallel.params import info_of, logical_ndim
from moe_trainer.shape.mup import DECOUPLED, EMBEDDINGS, is_scaled, rate_mult

_QK_NORMS = (".q_layernorm.", ".k_layernorm.")


@dataclass(frozen=True, order=True)
class ParamGroup:
    """What a parameter's update multiplies, and whose learning rate it follows. lr_mult: of the learning rate's range, and of Adam's epsilon."""

    wd_mult: float
    lr_mult: float
    is_decoupled_lr: bool
    is_expert_parallel: bool

    def rates(self, lr: float, weight_decay: float, decoupled_lr: float | None, scaled_lr: float | None = None) -> tuple[float, float]:
        """(learning rate, weight decay) of this group in an iteration. scaled_lr: of groups with an lr_mult; None: lr times that."""
        if self.lr_mult != 1.0:
            base = lr * self.lr_mult if scaled_lr is None else scaled_lr
        else:
            base = decoupled_lr if self.is_decoupled_lr and decoupled_lr is not None else lr
        return base, weight_decay * self.wd_mult


def adam_eps(optimizer: OptimizerArgs, group: ParamGroup) -> float:
    """Adam's epsilon follows its learning rate, but not where Adam only accompanies Muon."""
    return optimizer.adam_eps * group.lr_mult if optimizer.optimizer == "adam" else optimizer.adam_eps


def is_matrix(param: Parameter, optimizer: OptimizerArgs) -> bool:
    """Whether Muon updates a parameter: matrices do, and stacks of them, but embeddings and the output layer do not."""
    name = info_of(param).names[0]
    return optimizer.optimizer == "muon" and logical_ndim(param) == 2 and not name.endswith(EMBEDDINGS)


def group_of(param: Parameter, optimizer: OptimizerArgs, expert_parallel: bool) -> ParamGroup:
    """Vectors and biases are not decayed (query and key norms are with --apply-wd-to-qk-layernorm); everything else is.

    expert_parallel: whether experts are spread over ranks, which makes their parameters a group of their own.
    """
    info = info_of(param)
    name = info.names[0]
    decayed = logical_ndim(param) > 1 and not name.endswith(".bias")
    if "apply_wd_to_qk_layernorm" == optimizer.no_weight_decay_cond_type or optimizer.apply_wd_to_qk_layernorm:
        decayed = decayed or any(norm in name for norm in _QK_NORMS)
    decoupled = optimizer.decoupled_lr is not None and name.endswith(DECOUPLED)
    scaled = is_scaled(name, logical_ndim(param), optimizer.optimizer, optimizer.decoupled_lr is not None)
    return ParamGroup(1.0 if decayed else 0.0, rate_mult(optimizer.optimizer, optimizer.mup_width_mult) if scaled else 1.0, decoupled,
                      expert_parallel and info.kind == "expert")

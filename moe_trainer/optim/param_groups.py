"""Which parameters are decayed, which follow their own learning rate, and which are matrices: Megatron's parameter groups."""

from dataclasses import dataclass

from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.parallel.params import info_of, logical_ndim

_QK_NORMS = (".q_layernorm.", ".k_layernorm.")
_NO_MATRICES = ("embeddings.weight", "output_layer.weight")
_EMBEDDING_OR_OUTPUT = ("word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, order=True)
class ParamGroup:
    """What a parameter's update multiplies, and whose learning rate it follows."""

    wd_mult: float
    lr_mult: float
    is_decoupled_lr: bool
    is_expert_parallel: bool

    def rates(self, lr: float, weight_decay: float, decoupled_lr: float | None) -> tuple[float, float]:
        """(learning rate, weight decay) of this group in an iteration."""
        base = decoupled_lr if self.is_decoupled_lr and decoupled_lr is not None else lr
        return base * self.lr_mult, weight_decay * self.wd_mult


def is_matrix(param: Parameter, optimizer: OptimizerArgs) -> bool:
    """Whether Muon updates a parameter: matrices do, and stacks of them, but embeddings and the output layer do not."""
    name = info_of(param).names[0]
    return optimizer.optimizer == "muon" and logical_ndim(param) == 2 and not name.endswith(_NO_MATRICES)


def group_of(param: Parameter, optimizer: OptimizerArgs, expert_parallel: bool) -> ParamGroup:
    """Vectors and biases are not decayed (query and key norms are with --apply-wd-to-qk-layernorm); everything else is.

    expert_parallel: whether experts are spread over ranks, which makes their parameters a group of their own.
    """
    info = info_of(param)
    name = info.names[0]
    decayed = logical_ndim(param) > 1 and not name.endswith(".bias")
    if "apply_wd_to_qk_layernorm" == optimizer.no_weight_decay_cond_type or optimizer.apply_wd_to_qk_layernorm:
        decayed = decayed or any(norm in name for norm in _QK_NORMS)
    decoupled = optimizer.decoupled_lr is not None and name.endswith(_EMBEDDING_OR_OUTPUT)
    return ParamGroup(1.0 if decayed else 0.0, 1.0, decoupled, expert_parallel and info.kind == "expert")

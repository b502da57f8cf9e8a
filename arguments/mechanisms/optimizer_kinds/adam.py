"""Adam with decoupled weight decay (AdamW)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability, OptimizerDeclaration
from arguments.mechanisms.support import Rejected


def record_adam_group(record: Mapping[str, Any], epsilon: Any) -> dict[str, Any]:
    """Return the settings of a group of Adam in Megatron-LM's checkpoints."""
    return {
        "betas": (record.get("adam_beta1"), record.get("adam_beta2")),
        "eps": epsilon,
        "amsgrad": False,
        "capturable": False,
        "decoupled_weight_decay": True,
        "bias_correction": True,
    }


ADAM = OptimizerDeclaration(
    key="adam",
    name="Adam",
    states=("exp_avg", "exp_avg_sq"),
    epsilon="adam_eps",
    record_group=record_adam_group,
    capabilities=MappingProxyType(
        {
            OptimizerCapability.FSDP: True,
            OptimizerCapability.EARLY_GATHER: True,
            OptimizerCapability.STATE_FORMATS: True,
            OptimizerCapability.HOST_UPDATE: Rejected("as in Megatron-LM"),
            OptimizerCapability.HOST_UPDATE_8_BITS: Rejected("as in Megatron-LM"),
            OptimizerCapability.LEGACY_FORMAT: True,
            OptimizerCapability.OTHER_FORMATS: True,
        }
    ),
)

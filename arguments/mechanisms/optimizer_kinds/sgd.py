"""Stochastic gradient descent with momentum."""

from types import MappingProxyType

from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability, OptimizerDeclaration
from arguments.mechanisms.support import Rejected

SGD = OptimizerDeclaration(
    key="sgd",
    name="SGD",
    states=("momentum_buffer",),
    scaled_by_mup="vectors",
    counts_steps=False,
    record_group=lambda record, _: {"momentum": record.get("sgd_momentum"), "dampening": 0, "nesterov": False},
    capabilities=MappingProxyType(
        {
            OptimizerCapability.FSDP: True,
            OptimizerCapability.EARLY_GATHER: True,
            OptimizerCapability.STATE_FORMATS: Rejected("as in Megatron-LM"),
            OptimizerCapability.HOST_UPDATE: Rejected("as in Megatron-LM"),
            OptimizerCapability.HOST_UPDATE_8_BITS: Rejected("as in Megatron-LM"),
            OptimizerCapability.LEGACY_FORMAT: True,
            OptimizerCapability.OTHER_FORMATS: True,
        }
    ),
)

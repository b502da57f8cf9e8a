"""Lion: steps along the sign of a mean of gradient and momentum (arXiv 2302.06675)."""

from types import MappingProxyType

from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability, OptimizerDeclaration
from arguments.mechanisms.support import Rejected

LION = OptimizerDeclaration(
    key="lion",
    name="Lion",
    states=("exp_avg",),
    is_layer_wise=True,
    counts_steps=False,
    record_group=lambda record, _: {"betas": (record.get("lion_beta1"), record.get("lion_beta2"))},
    capabilities=MappingProxyType(
        {
            OptimizerCapability.FSDP: Rejected("as in Megatron-LM"),
            OptimizerCapability.EARLY_GATHER: Rejected("as in Megatron-LM"),
            OptimizerCapability.STATE_FORMATS: Rejected("as in Megatron-LM"),
            OptimizerCapability.HOST_UPDATE: Rejected("as in Megatron-LM"),
            OptimizerCapability.HOST_UPDATE_8_BITS: Rejected("as in Megatron-LM"),
            OptimizerCapability.LEGACY_FORMAT: Rejected("the format has the state of adam and sgd only"),
            OptimizerCapability.OTHER_FORMATS: Rejected("as in Megatron-LM"),
        }
    ),
)

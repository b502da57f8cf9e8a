"""Data parallelism with flat gradient buffers: every rank has all parameters."""

from types import MappingProxyType

from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability, ShardingDeclaration
from arguments.mechanisms.support import NoEffect, Rejected, Support

_HAS_ALL = "every rank updates all parameters"
_NO_OUTER = "as in Megatron-LM, instances of the distributed optimizer are replicas"
_ACTS: MappingProxyType[ShardingCapability, Support] = MappingProxyType(
    {
        ShardingCapability.PIPELINE: True,
        ShardingCapability.EXPERT_PARALLEL: True,
        ShardingCapability.MAIN_FORMATS: True,
        ShardingCapability.FP32_SUMS: True,
        ShardingCapability.DEFERRED_WGRAD: True,
        ShardingCapability.MODULE_GRAPHS: True,
        ShardingCapability.FROZEN: True,
        ShardingCapability.QK_CLIP: True,
        ShardingCapability.OUTPUT_BIAS: True,
        ShardingCapability.COMPRESSED_KEYS: True,
        ShardingCapability.DYNAMIC_CONTEXT: True,
        ShardingCapability.REPLICA_HASH: True,
    }
)

REPLICATED = ShardingDeclaration(
    key="replicated",
    name="replicated",
    capabilities=MappingProxyType(
        {
            **_ACTS,
            ShardingCapability.INSTANCES: NoEffect(_HAS_ALL),
            ShardingCapability.OUTER: NoEffect(_HAS_ALL),
            ShardingCapability.PARAM_GATHER_OVERLAP: Rejected(_HAS_ALL),
            ShardingCapability.EARLY_GATHER: Rejected(_HAS_ALL),
            ShardingCapability.QUANTIZED_GATHER: Rejected(_HAS_ALL),
            ShardingCapability.GRAD_BUFFER_REUSE: Rejected(_HAS_ALL),
        }
    ),
)
"""What no flag asks for."""

DISTRIBUTED_OPTIMIZER = ShardingDeclaration(
    key="distributed_optimizer",
    name="distributed optimizer",
    dest="use_distributed_optimizer",
    shards_flat_state=True,
    capabilities=MappingProxyType(
        {
            **_ACTS,
            ShardingCapability.INSTANCES: True,
            ShardingCapability.OUTER: NoEffect(_NO_OUTER),
            ShardingCapability.PARAM_GATHER_OVERLAP: True,
            ShardingCapability.EARLY_GATHER: True,
            ShardingCapability.QUANTIZED_GATHER: True,
            ShardingCapability.GRAD_BUFFER_REUSE: True,
        }
    ),
)

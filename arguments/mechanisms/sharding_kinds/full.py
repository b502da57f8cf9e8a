"""Fully sharded data parallelism: Megatron's, with one declaration for each strategy, and torch's."""

from collections.abc import Mapping
from types import MappingProxyType

from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability, ShardingDeclaration
from arguments.mechanisms.support import NoEffect, Rejected, Support

_AS_MEGATRON = "as in Megatron-LM"
_HAS_ALL = "every rank updates all parameters"
_UNCHANGED = Rejected("it shards parameters that do not change")
_BIAS = Rejected("the bias is not gathered with the weight")
_COMPRESSORS = Rejected("parameters of compressors are not sharded so")
_CLIP = Rejected("sharded parameters are not rescaled")
_ADDRESSES = Rejected("sharded parameters are gathered at a different address every time")
_SEPARATED = Rejected("a layer's parameters are gathered for one complete forward and backward only")
_FP32 = Rejected("shards and their gradients are fp32")
_REDUCES = Rejected("it reduces its gradients itself")
_WIDE = NoEffect("weights are stored and gathered in the model's format; GEMMs quantize them")
_NO_REPLICAS = "parameters are sharded over the data-parallel ranks, so there are no replicas to compare"

_BY_BOTH: MappingProxyType[ShardingCapability, Support] = MappingProxyType(
    {
        ShardingCapability.MODULE_GRAPHS: _ADDRESSES,
        ShardingCapability.FROZEN: _UNCHANGED,
        ShardingCapability.QK_CLIP: _CLIP,
        ShardingCapability.OUTPUT_BIAS: _BIAS,
        ShardingCapability.COMPRESSED_KEYS: _COMPRESSORS,
    }
)
_BY_SHARDED_PARAMS: MappingProxyType[ShardingCapability, Support] = MappingProxyType(
    {
        ShardingCapability.QUANTIZED_GATHER: _WIDE,
        ShardingCapability.MAIN_FORMATS: _FP32,
        ShardingCapability.FP32_SUMS: _REDUCES,
        ShardingCapability.DEFERRED_WGRAD: _SEPARATED,
        ShardingCapability.REPLICA_HASH: NoEffect(_NO_REPLICAS),
    }
)
_BY_BUFFERS: MappingProxyType[ShardingCapability, Support] = MappingProxyType(
    {
        ShardingCapability.QUANTIZED_GATHER: True,
        ShardingCapability.MAIN_FORMATS: True,
        ShardingCapability.FP32_SUMS: True,
        ShardingCapability.DEFERRED_WGRAD: True,
        ShardingCapability.REPLICA_HASH: True,
    }
)
_BY_MEGATRON: MappingProxyType[ShardingCapability, Support] = MappingProxyType(
    {
        ShardingCapability.PIPELINE: True,
        ShardingCapability.EXPERT_PARALLEL: True,
        ShardingCapability.INSTANCES: True,
        ShardingCapability.OUTER: Rejected("instances can share only what each of them shards"),
        ShardingCapability.PARAM_GATHER_OVERLAP: True,
        ShardingCapability.EARLY_GATHER: Rejected("it gathers layer by layer"),
        ShardingCapability.GRAD_BUFFER_REUSE: NoEffect("as in Megatron-LM, Megatron-FSDP gathers into its own buffers"),
        ShardingCapability.DYNAMIC_CONTEXT: Rejected(_AS_MEGATRON),
        **_BY_BOTH,
    }
)


def _megatron_fsdp(strategy: str, own: Mapping[ShardingCapability, Support], **traits: bool) -> ShardingDeclaration:
    return ShardingDeclaration(
        key=f"megatron_fsdp_{strategy}",
        name=f"Megatron-FSDP, {strategy}",
        dest="use_megatron_fsdp",
        strategy=strategy,
        is_wrapped=True,
        has_formats=True,
        implies="Megatron-FSDP",
        ckpt_format="fsdp_dtensor",
        capabilities=MappingProxyType({**_BY_MEGATRON, **own}),
        **traits,
    )


MEGATRON_FSDP = (
    _megatron_fsdp(
        "no_shard",
        MappingProxyType(
            {
                **_BY_BUFFERS,
                ShardingCapability.INSTANCES: NoEffect(_HAS_ALL),
                ShardingCapability.PARAM_GATHER_OVERLAP: NoEffect(_HAS_ALL),
                ShardingCapability.QUANTIZED_GATHER: _WIDE,
            }
        ),
    ),
    _megatron_fsdp("optim", _BY_BUFFERS, shards_flat_state=True, reduces_each_microbatch=True, is_measured=False),
    _megatron_fsdp(
        "optim_grads",
        _BY_SHARDED_PARAMS,
        shards_flat_state=True,
        shards_params=True,
        reduces_each_microbatch=True,
        is_measured=False,
    ),
    _megatron_fsdp(
        "optim_grads_params",
        MappingProxyType(
            {
                **_BY_SHARDED_PARAMS,
                ShardingCapability.OUTER: True,
                ShardingCapability.REPLICA_HASH: Rejected(f"{_AS_MEGATRON}: no two ranks hold the same weight"),
            }
        ),
        shards_flat_state=True,
        shards_params=True,
        gathers_each_pass=True,
        reduces_each_microbatch=True,
        is_measured=False,
    ),
)
"""By strategy. With one data-parallel rank, gradients have flat buffers whatever it is."""

TORCH_FSDP2 = ShardingDeclaration(
    key="torch_fsdp2",
    name="torch FSDP2",
    dest="use_torch_fsdp2",
    shards_params=True,
    gathers_each_pass=True,
    reduces_each_microbatch=True,
    is_wrapped=True,
    shards_optimizer=True,
    is_measured=False,
    capabilities=MappingProxyType(
        {
            **_BY_BOTH,
            **_BY_SHARDED_PARAMS,
            ShardingCapability.PIPELINE: Rejected(_AS_MEGATRON),
            ShardingCapability.EXPERT_PARALLEL: Rejected(_AS_MEGATRON),
            ShardingCapability.INSTANCES: NoEffect("it shards over all data-parallel ranks"),
            ShardingCapability.OUTER: NoEffect("it shards over all data-parallel ranks"),
            ShardingCapability.PARAM_GATHER_OVERLAP: Rejected(f"{_AS_MEGATRON}: it gathers layer by layer"),
            ShardingCapability.EARLY_GATHER: Rejected(f"{_AS_MEGATRON}: it gathers layer by layer"),
            ShardingCapability.GRAD_BUFFER_REUSE: NoEffect("gradients have no flat buffer"),
            ShardingCapability.DYNAMIC_CONTEXT: True,
        }
    ),
)

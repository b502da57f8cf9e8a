"""NCCL EP: TransformerEngine's exchange by NCCL."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import AS_MANY, FLEX, Capability, Dispatcher, orders_inside
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import once_per_domain

NCCLEP = Dispatcher(
    name="NCCL EP",
    type=FLEX,
    backend="ncclep",
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: Rejected("as in Megatron-LM: it sends the tokens that the router selects"),
            Capability.QUANTIZED_PADDING: NoEffect(f"NCCL EP {AS_MANY}"),
            Capability.RANK_CAPACITY: True,
            Capability.FUSED_EXPERTS: NoEffect("NCCL EP does not pad the tokens of an expert, so the host does"),
            Capability.MXFP8_TRANSPORT: Rejected("carries bf16 here", "later"),
            Capability.EXCHANGE_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            Capability.SHARED_EXPERT_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            Capability.WGRAD_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            Capability.PERMUTATION_KERNELS: NoEffect("NCCL EP sorts tokens itself"),
            Capability.NUM_SMS: True,
            Capability.PREPROCESS_GRAPH: NoEffect(orders_inside("ncclep")),
            Capability.PADDED_GRAPH: Rejected("experts are not padded to capacity"),
            Capability.DROPLESS_GRAPH: Rejected(
                "its context is made again, collectively, when the mode changes, which a graph would not do"
            ),
        }
    ),
    package="transformer_engine",
    compute_capability=9,
    sorts_tokens=True,
    needs_flex=True,
    upstream_needs_ranks=True,
    sends_copies=False,
    gathers=False,
    traffic=once_per_domain,
    is_measured=True,
    is_upstream=True,
)

"""NCCL EP: TransformerEngine's exchange by NCCL."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import (
    AS_MANY,
    FLEX,
    DispatcherCapability,
    DispatcherDeclaration,
    orders_inside,
)
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import once_per_domain

NCCLEP = DispatcherDeclaration(
    name="NCCL EP",
    type=FLEX,
    backend="ncclep",
    capabilities=MappingProxyType(
        {
            DispatcherCapability.CAPACITY_PADDING: Rejected(
                "as in Megatron-LM: it sends the tokens that the router selects"
            ),
            DispatcherCapability.QUANTIZED_PADDING: NoEffect(f"NCCL EP {AS_MANY}"),
            DispatcherCapability.RANK_CAPACITY: True,
            DispatcherCapability.FUSED_EXPERTS: NoEffect(
                "NCCL EP does not pad the tokens of an expert, so the host does"
            ),
            DispatcherCapability.MXFP8_TRANSPORT: Rejected("carries bf16 here", "later"),
            DispatcherCapability.EXCHANGE_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            DispatcherCapability.SHARED_EXPERT_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            DispatcherCapability.WGRAD_OVERLAP: NoEffect("one call of NCCL EP sends and receives"),
            DispatcherCapability.PERMUTATION_KERNELS: NoEffect("NCCL EP sorts tokens itself"),
            DispatcherCapability.NUM_SMS: True,
            DispatcherCapability.PREPROCESS_GRAPH: NoEffect(orders_inside("ncclep")),
            DispatcherCapability.PADDED_GRAPH: Rejected("experts are not padded to capacity"),
            DispatcherCapability.DROPLESS_GRAPH: Rejected(
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

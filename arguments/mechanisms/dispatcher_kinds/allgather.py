"""Every rank gathers the tokens of all."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import (
    NO_RANK_CAPACITY,
    WITHOUT_KERNELS,
    DispatcherCapability,
    DispatcherDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import all_gather

ALLGATHER = DispatcherDeclaration(
    name="allgather",
    type="allgather",
    backend=None,
    capabilities=MappingProxyType(
        {
            DispatcherCapability.CAPACITY_PADDING: True,
            DispatcherCapability.QUANTIZED_PADDING: Rejected("as in Megatron-LM"),
            DispatcherCapability.RANK_CAPACITY: Rejected(NO_RANK_CAPACITY),
            DispatcherCapability.FUSED_EXPERTS: Rejected(NO_RANK_CAPACITY),
            DispatcherCapability.MXFP8_TRANSPORT: Rejected("carries bf16"),
            DispatcherCapability.EXCHANGE_OVERLAP: Rejected("as in Megatron-LM: it gathers in one call"),
            DispatcherCapability.SHARED_EXPERT_OVERLAP: Rejected("as in Megatron-LM: it gathers in one call"),
            DispatcherCapability.WGRAD_OVERLAP: NoEffect("the allgather dispatcher gathers in one call"),
            DispatcherCapability.PERMUTATION_KERNELS: True,
            DispatcherCapability.NUM_SMS: NoEffect(WITHOUT_KERNELS),
            DispatcherCapability.PREPROCESS_GRAPH: True,
            DispatcherCapability.PADDED_GRAPH: True,
            DispatcherCapability.DROPLESS_GRAPH: Rejected(NO_RANK_CAPACITY),
        }
    ),
    sends_copies=False,
    gathers=True,
    traffic=all_gather,
    is_measured=False,
    is_upstream=True,
)

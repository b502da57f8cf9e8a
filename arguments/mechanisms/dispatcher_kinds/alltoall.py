"""All-to-all of one copy of a token for each of its experts."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import (
    NO_RANK_CAPACITY,
    WITHOUT_KERNELS,
    DispatcherCapability,
    DispatcherDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import every_copy

ALLTOALL = DispatcherDeclaration(
    name="alltoall",
    type="alltoall",
    backend=None,
    old_names=("alltoall_seq",),
    capabilities=MappingProxyType(
        {
            DispatcherCapability.CAPACITY_PADDING: True,
            DispatcherCapability.QUANTIZED_PADDING: True,
            DispatcherCapability.RANK_CAPACITY: Rejected(NO_RANK_CAPACITY),
            DispatcherCapability.FUSED_EXPERTS: Rejected(NO_RANK_CAPACITY),
            DispatcherCapability.MXFP8_TRANSPORT: True,
            DispatcherCapability.EXCHANGE_OVERLAP: True,
            DispatcherCapability.SHARED_EXPERT_OVERLAP: True,
            DispatcherCapability.WGRAD_OVERLAP: True,
            DispatcherCapability.PERMUTATION_KERNELS: True,
            DispatcherCapability.NUM_SMS: NoEffect(WITHOUT_KERNELS),
            DispatcherCapability.PREPROCESS_GRAPH: True,
            DispatcherCapability.PADDED_GRAPH: True,
            DispatcherCapability.DROPLESS_GRAPH: Rejected(NO_RANK_CAPACITY),
        }
    ),
    sends_copies=True,
    gathers=False,
    traffic=every_copy,
    is_measured=True,
    is_upstream=True,
    slows_with_experts=True,
)

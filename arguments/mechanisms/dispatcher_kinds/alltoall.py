"""All-to-all of one copy of a token for each of its experts."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import NO_RANK_CAPACITY, WITHOUT_KERNELS, Capability, Dispatcher
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import every_copy

ALLTOALL = Dispatcher(
    name="alltoall",
    type="alltoall",
    backend=None,
    old_names=("alltoall_seq",),
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: Rejected(NO_RANK_CAPACITY),
            Capability.FUSED_EXPERTS: Rejected(NO_RANK_CAPACITY),
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect(WITHOUT_KERNELS),
            Capability.PREPROCESS_GRAPH: True,
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: Rejected(NO_RANK_CAPACITY),
        }
    ),
    sends_copies=True,
    gathers=False,
    traffic=every_copy,
    is_measured=True,
    is_upstream=True,
    slows_with_experts=True,
)

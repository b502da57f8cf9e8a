"""Every rank gathers the tokens of all."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import NO_RANK_CAPACITY, WITHOUT_KERNELS, Capability, Dispatcher
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import all_gather

ALLGATHER = Dispatcher(
    name="allgather",
    type="allgather",
    backend=None,
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: Rejected("as in Megatron-LM"),
            Capability.RANK_CAPACITY: Rejected(NO_RANK_CAPACITY),
            Capability.FUSED_EXPERTS: Rejected(NO_RANK_CAPACITY),
            Capability.MXFP8_TRANSPORT: Rejected("carries bf16"),
            Capability.EXCHANGE_OVERLAP: Rejected("as in Megatron-LM: it gathers in one call"),
            Capability.SHARED_EXPERT_OVERLAP: Rejected("as in Megatron-LM: it gathers in one call"),
            Capability.WGRAD_OVERLAP: NoEffect("the allgather dispatcher gathers in one call"),
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect(WITHOUT_KERNELS),
            Capability.PREPROCESS_GRAPH: NoEffect(
                "the allgather dispatcher gathers the tokens of all ranks before it orders them"
            ),
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: Rejected(NO_RANK_CAPACITY),
        }
    ),
    sends_copies=False,
    gathers=True,
    traffic=all_gather,
    is_measured=False,
    is_upstream=True,
)

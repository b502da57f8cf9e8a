"""Two all-to-alls: between domains, then inside them."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import ANY_SIZE, FLEX, Capability, Dispatcher
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import two_steps

HIERARCHICAL = Dispatcher(
    name="hierarchical",
    type=FLEX,
    backend="hierarchical",
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: Rejected(ANY_SIZE),
            Capability.FUSED_EXPERTS: Rejected(ANY_SIZE),
            Capability.MXFP8_TRANSPORT: Rejected("carries bf16 here", "later"),
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect("with the plain collectives of the hierarchical backend"),
            Capability.PREPROCESS_GRAPH: NoEffect("the number of tokens for each node depends on the routing"),
            Capability.PADDED_GRAPH: Rejected("the number of tokens for each node depends on the routing", "later"),
            Capability.DROPLESS_GRAPH: Rejected(ANY_SIZE),
        }
    ),
    needs_flex=True,
    groups_by_domain=True,
    sends_copies=False,
    gathers=False,
    traffic=two_steps,
    is_measured=True,
    is_upstream=False,
)

"""Two all-to-alls: between domains, then inside them."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import (
    ANY_SIZE,
    FLEX,
    DispatcherCapability,
    DispatcherDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import two_steps

HIERARCHICAL = DispatcherDeclaration(
    name="hierarchical",
    type=FLEX,
    backend="hierarchical",
    capabilities=MappingProxyType(
        {
            DispatcherCapability.CAPACITY_PADDING: True,
            DispatcherCapability.QUANTIZED_PADDING: True,
            DispatcherCapability.RANK_CAPACITY: Rejected(ANY_SIZE),
            DispatcherCapability.FUSED_EXPERTS: Rejected(ANY_SIZE),
            DispatcherCapability.MXFP8_TRANSPORT: Rejected("carries bf16 here", "later"),
            DispatcherCapability.EXCHANGE_OVERLAP: True,
            DispatcherCapability.SHARED_EXPERT_OVERLAP: True,
            DispatcherCapability.WGRAD_OVERLAP: True,
            DispatcherCapability.PERMUTATION_KERNELS: True,
            DispatcherCapability.NUM_SMS: NoEffect("with the plain collectives of the hierarchical backend"),
            DispatcherCapability.PREPROCESS_GRAPH: NoEffect(
                "the number of tokens for each node depends on the routing"
            ),
            DispatcherCapability.PADDED_GRAPH: Rejected(
                "the number of tokens for each node depends on the routing", "later"
            ),
            DispatcherCapability.DROPLESS_GRAPH: Rejected(ANY_SIZE),
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

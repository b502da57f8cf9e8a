"""HybridEP: a library's kernels send a token once to a domain of fast links."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import (
    FLEX,
    DispatcherCapability,
    DispatcherDeclaration,
    orders_inside,
)
from arguments.mechanisms.support import NoEffect
from arguments.mechanisms.traffic import once_per_domain

HYBRIDEP = DispatcherDeclaration(
    name="HybridEP",
    type=FLEX,
    backend="hybridep",
    capabilities=MappingProxyType(
        {
            DispatcherCapability.CAPACITY_PADDING: True,
            DispatcherCapability.QUANTIZED_PADDING: True,
            DispatcherCapability.RANK_CAPACITY: True,
            DispatcherCapability.FUSED_EXPERTS: True,
            DispatcherCapability.MXFP8_TRANSPORT: True,
            DispatcherCapability.EXCHANGE_OVERLAP: True,
            DispatcherCapability.SHARED_EXPERT_OVERLAP: True,
            DispatcherCapability.WGRAD_OVERLAP: True,
            DispatcherCapability.PERMUTATION_KERNELS: NoEffect("HybridEP sorts tokens itself"),
            DispatcherCapability.NUM_SMS: True,
            DispatcherCapability.PREPROCESS_GRAPH: NoEffect(orders_inside("hybridep")),
            DispatcherCapability.PADDED_GRAPH: True,
            DispatcherCapability.DROPLESS_GRAPH: True,
        }
    ),
    package="deep_ep",
    sorts_tokens=True,
    sends_filled_slots=True,
    mxfp8_multiple=512,  # DeepEP's scales, which it copies 4 at a time
    sends_copies=False,
    gathers=False,
    traffic=once_per_domain,
    is_measured=True,
    is_upstream=True,
    measured_domains=2,
)

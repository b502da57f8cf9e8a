"""HybridEP: a library's kernels send a token once to a domain of fast links."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import FLEX, Capability, Dispatcher, orders_inside
from arguments.mechanisms.support import NoEffect
from arguments.mechanisms.traffic import once_per_domain

HYBRIDEP = Dispatcher(
    name="HybridEP",
    type=FLEX,
    backend="hybridep",
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: True,
            Capability.FUSED_EXPERTS: True,
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: NoEffect("HybridEP sorts tokens itself"),
            Capability.NUM_SMS: True,
            Capability.PREPROCESS_GRAPH: NoEffect(orders_inside("hybridep")),
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: True,
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

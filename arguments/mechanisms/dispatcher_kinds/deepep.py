"""DeepEP: a library's kernels send a token once to a rank."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import (
    ANY_SIZE,
    AS_MANY,
    FLEX,
    DispatcherCapability,
    DispatcherDeclaration,
    orders_inside,
)
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import ExchangedTokens, Traffic, once_per_domain

DEEPEP_WIDE = 2.0
"""Time of DeepEP's exchange over HybridEP's, where NVLink connects more than the 8 ranks that DeepEP was made for.

On 256 GB200, DeepSeek-V3 went from 830 to 944 TFLOP/s when HybridEP replaced DeepEP, 0.6 ms for each of 1,900 exchanges
(Megatron-LM, branch dev, discussion).
"""


def _deepep_traffic(tokens: ExchangedTokens) -> Traffic:
    return once_per_domain(tokens, DEEPEP_WIDE if min(tokens.ep, tokens.domain) > 8 else 1.0)


DEEPEP = DispatcherDeclaration(
    name="DeepEP",
    type=FLEX,
    backend="deepep",
    old_names=("deepepv2",),
    capabilities=MappingProxyType(
        {
            DispatcherCapability.CAPACITY_PADDING: Rejected(
                "as in Megatron-LM: it sends the tokens that the router selects"
            ),
            DispatcherCapability.QUANTIZED_PADDING: NoEffect(f"DeepEP {AS_MANY}"),
            DispatcherCapability.RANK_CAPACITY: Rejected(ANY_SIZE),
            DispatcherCapability.FUSED_EXPERTS: Rejected(ANY_SIZE),
            DispatcherCapability.MXFP8_TRANSPORT: True,
            DispatcherCapability.EXCHANGE_OVERLAP: True,
            DispatcherCapability.SHARED_EXPERT_OVERLAP: True,
            DispatcherCapability.WGRAD_OVERLAP: True,
            DispatcherCapability.PERMUTATION_KERNELS: True,
            DispatcherCapability.NUM_SMS: True,
            DispatcherCapability.PREPROCESS_GRAPH: NoEffect(orders_inside("deepep")),
            DispatcherCapability.PADDED_GRAPH: Rejected("experts are not padded to capacity"),
            DispatcherCapability.DROPLESS_GRAPH: Rejected(ANY_SIZE),
        }
    ),
    package="deep_ep",
    classes=(("deepep_v2", "ElasticBuffer"),),
    upstream_needs_ranks=True,
    probs_dtype="fp32",
    default_sms=20,
    mxfp8_multiple=128,  # one 4-byte scale for these channels
    sends_copies=False,
    gathers=False,
    traffic=_deepep_traffic,
    is_measured=True,
    is_upstream=True,
    measured_gpus=8,
)

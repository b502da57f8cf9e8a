"""DeepEP: a library's kernels send a token once to a rank."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import (
    ANY_SIZE,
    AS_MANY,
    FLEX,
    Capability,
    Dispatcher,
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


DEEPEP = Dispatcher(
    name="DeepEP",
    type=FLEX,
    backend="deepep",
    old_names=("deepepv2",),
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: Rejected("as in Megatron-LM: it sends the tokens that the router selects"),
            Capability.QUANTIZED_PADDING: NoEffect(f"DeepEP {AS_MANY}"),
            Capability.RANK_CAPACITY: Rejected(ANY_SIZE),
            Capability.FUSED_EXPERTS: Rejected(ANY_SIZE),
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: True,
            Capability.SHARED_EXPERT_OVERLAP: True,
            Capability.WGRAD_OVERLAP: True,
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: True,
            Capability.PREPROCESS_GRAPH: NoEffect(orders_inside("deepep")),
            Capability.PADDED_GRAPH: Rejected("experts are not padded to capacity"),
            Capability.DROPLESS_GRAPH: Rejected(ANY_SIZE),
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

"""Of one expert rank; no flag selects it."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import DispatcherCapability, DispatcherDeclaration
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import nothing

LOCAL = DispatcherDeclaration(
    name="local",
    type=None,
    backend=None,
    capabilities=MappingProxyType(
        {
            DispatcherCapability.CAPACITY_PADDING: True,
            DispatcherCapability.QUANTIZED_PADDING: True,
            DispatcherCapability.RANK_CAPACITY: True,
            DispatcherCapability.FUSED_EXPERTS: True,
            DispatcherCapability.MXFP8_TRANSPORT: True,
            DispatcherCapability.EXCHANGE_OVERLAP: Rejected(
                "with all experts on one rank there is no exchange to overlap"
            ),
            DispatcherCapability.SHARED_EXPERT_OVERLAP: NoEffect("with all experts on every rank there is no exchange"),
            DispatcherCapability.WGRAD_OVERLAP: NoEffect("with --expert-model-parallel-size 1 there is no exchange"),
            DispatcherCapability.PERMUTATION_KERNELS: True,
            DispatcherCapability.NUM_SMS: NoEffect("with one expert rank there is nothing to send"),
            DispatcherCapability.PREPROCESS_GRAPH: True,
            DispatcherCapability.PADDED_GRAPH: True,
            DispatcherCapability.DROPLESS_GRAPH: True,
        }
    ),
    sends_copies=True,
    gathers=False,
    traffic=nothing,
    is_measured=True,
    is_upstream=True,
)

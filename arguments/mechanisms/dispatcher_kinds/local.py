"""Of one expert rank; no flag selects it."""

from types import MappingProxyType

from arguments.mechanisms.dispatcher_kinds.declaration import Capability, Dispatcher
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.mechanisms.traffic import nothing

LOCAL = Dispatcher(
    name="local",
    type=None,
    backend=None,
    capabilities=MappingProxyType(
        {
            Capability.CAPACITY_PADDING: True,
            Capability.QUANTIZED_PADDING: True,
            Capability.RANK_CAPACITY: True,
            Capability.FUSED_EXPERTS: True,
            Capability.MXFP8_TRANSPORT: True,
            Capability.EXCHANGE_OVERLAP: Rejected("with all experts on one rank there is no exchange to overlap"),
            Capability.SHARED_EXPERT_OVERLAP: NoEffect("with all experts on every rank there is no exchange"),
            Capability.WGRAD_OVERLAP: NoEffect("with --expert-model-parallel-size 1 there is no exchange"),
            Capability.PERMUTATION_KERNELS: True,
            Capability.NUM_SMS: NoEffect("with one expert rank there is nothing to send"),
            Capability.PREPROCESS_GRAPH: True,
            Capability.PADDED_GRAPH: True,
            Capability.DROPLESS_GRAPH: True,
        }
    ),
    sends_copies=True,
    gathers=False,
    traffic=nothing,
    is_measured=True,
    is_upstream=True,
)

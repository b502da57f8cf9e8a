"""Interleaved 1F1B: a rank runs several chunks of layers in turn, so that the bubble is smaller."""

from types import MappingProxyType

from arguments.mechanisms.schedule_kinds.declaration import ScheduleCapability, ScheduleDeclaration

INTERLEAVED = ScheduleDeclaration(
    key="interleaved",
    name="interleaved",
    needs_virtual_stages=True,
    capabilities=MappingProxyType(
        {
            ScheduleCapability.VIRTUAL_STAGES: True,
            ScheduleCapability.EXCHANGE_OVERLAP: True,
            ScheduleCapability.WGRAD_OVERLAP: True,
            ScheduleCapability.HEAD_WGRAD: True,
            ScheduleCapability.SHARDED_GRADS: True,
            ScheduleCapability.MLP_CHUNKS: True,
        }
    ),
)
"""What runs with virtual stages if no flag says otherwise."""

"""1F1B: a forward and a backward in turn (PipeDream-Flush)."""

from types import MappingProxyType

from arguments.mechanisms.schedule_kinds.declaration import ScheduleCapability, ScheduleDeclaration
from arguments.mechanisms.support import Rejected

ONE_F_ONE_B = ScheduleDeclaration(
    key="1f1b",
    name="1F1B",
    capabilities=MappingProxyType(
        {
            ScheduleCapability.VIRTUAL_STAGES: Rejected("it runs one chunk of layers on a rank"),
            ScheduleCapability.EXCHANGE_OVERLAP: True,
            ScheduleCapability.WGRAD_OVERLAP: True,
            ScheduleCapability.HEAD_WGRAD: True,
            ScheduleCapability.SHARDED_GRADS: True,
            ScheduleCapability.MLP_CHUNKS: True,
        }
    ),
)
"""What runs without virtual stages if no flag says otherwise."""

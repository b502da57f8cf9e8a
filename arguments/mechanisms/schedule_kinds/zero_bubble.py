"""Zero bubble (ZB-H1): weight gradients are computed where a rank would wait."""

from types import MappingProxyType

from arguments.mechanisms.schedule_kinds.declaration import ScheduleCapability, ScheduleDeclaration
from arguments.mechanisms.support import NoEffect, Rejected

_BOTH_DECIDE = "both decide when weight gradients are computed"

ZERO_BUBBLE = ScheduleDeclaration(
    key="zero-bubble",
    name="zero bubble",
    splits_backward=True,
    is_drawn=True,
    is_measured=False,
    capabilities=MappingProxyType(
        {
            ScheduleCapability.VIRTUAL_STAGES: True,
            ScheduleCapability.EXCHANGE_OVERLAP: Rejected(_BOTH_DECIDE),
            ScheduleCapability.WGRAD_OVERLAP: Rejected(_BOTH_DECIDE),
            ScheduleCapability.HEAD_WGRAD: NoEffect("weight gradients of all layers are deferred"),
            ScheduleCapability.SHARDED_GRADS: Rejected(
                "parameters are sharded again before weight gradients are computed"
            ),
            ScheduleCapability.MLP_CHUNKS: Rejected("deferred weight gradients hold the tensors of all chunks"),
        }
    ),
)

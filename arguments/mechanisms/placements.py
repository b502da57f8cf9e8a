"""Which ranks compute an expert's tokens: one declaration each, of everything that other code asks of a placement.

`get_placement` is the only place that reads the flags that select. The module of a placement is
moe_trainer/moe/placement/<key>.py, with `make_placement` and a class whose `declaration` it is. A declaration, in
placement_kinds/, states for every `PlacementCapability` that it acts, that the flags that demand it are rejected and
why, or that they have no effect and why.
"""

from typing import Any

from arguments.mechanisms.placement_kinds.cloned import CLONED
from arguments.mechanisms.placement_kinds.declaration import PlacementDeclaration
from arguments.mechanisms.placement_kinds.own import OWN

PLACEMENTS: tuple[PlacementDeclaration, ...] = (
    CLONED,
    OWN,
)
MOVED_RATES = tuple(each.moved_rate for each in PLACEMENTS if each.moved_rate is not None)
UNMOVED_MAXIMA = tuple(each.unmoved_maximum for each in PLACEMENTS if each.unmoved_maximum is not None)
"""Names in metrics.jsonl."""


def get_placement(moe: Any, ep: int) -> PlacementDeclaration:
    """Return the placement that the flags ask for.

    Args:
        moe: has the fields of MoEArgs.
        ep: expert-parallel ranks; one rank computes all experts.
    """
    return next((each for each in PLACEMENTS if ep > 1 and each.slots(moe)), OWN)

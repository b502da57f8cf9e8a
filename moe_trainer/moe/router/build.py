"""The selections, and the choice of one for a layer."""

from moe_trainer.moe.router.grid import GridSelection
from moe_trainer.moe.router.hash_routing import HashSelection
from moe_trainer.moe.router.quantile_balancing import QuantileBalancing
from moe_trainer.moe.router.replay import ReplaySelection
from moe_trainer.moe.router.selection import Selection, SelectionContext
from moe_trainer.moe.router.sinkhorn import SinkhornSelection
from moe_trainer.moe.router.topk import TopKSelection

SELECTIONS: tuple[type[Selection], ...] = (
    HashSelection,
    SinkhornSelection,
    QuantileBalancing,
    GridSelection,
    ReplaySelection,
    TopKSelection,
)
"""Where the flags ask for several, as only some layers are hash-routed, the first one is taken."""


def build_selection(context: SelectionContext) -> Selection:
    """Build the selection that the flags ask for in a layer."""
    return next(each for each in SELECTIONS if each.applies(context)).build(context)

"""The selections, and the choice of one for a layer."""

from moe_trainer.moe.selections.grid import GridSelection
from moe_trainer.moe.selections.hash_routing import HashSelection
from moe_trainer.moe.selections.quantile_balancing import QuantileBalancing
from moe_trainer.moe.selections.replay import ReplaySelection
from moe_trainer.moe.selections.selection import ExpertSelection, SelectionContext
from moe_trainer.moe.selections.sinkhorn import SinkhornSelection
from moe_trainer.moe.selections.topk import TopKSelection

SELECTIONS: tuple[type[ExpertSelection], ...] = (
    HashSelection,
    SinkhornSelection,
    QuantileBalancing,
    GridSelection,
    ReplaySelection,
    TopKSelection,
)
"""Where the flags ask for several, as only some layers are hash-routed, the first one is taken."""


def build_selection(context: SelectionContext) -> ExpertSelection:
    """Build the selection that the flags ask for in a layer."""
    return next(each for each in SELECTIONS if each.applies(context)).build(context)

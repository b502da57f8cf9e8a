"""The choice of a selection for a layer."""

from arguments.mechanisms.selections import get_selection
from moe_trainer.declared_module import load_module
from moe_trainer.moe.selections.selection import ExpertSelection, SelectionContext


def build_selection(context: SelectionContext) -> ExpertSelection:
    """Build the selection that the flags ask for in a layer."""
    return load_module(get_selection(context.moe, context.layer_number)).make_selection(context)

"""The choice of a selection for a layer."""

import importlib
from typing import Any

from arguments.mechanisms.selection_kinds.declaration import DeclaredSelection
from arguments.mechanisms.selections import get_selection
from moe_trainer.moe.selections.selection import ExpertSelection, SelectionContext


def load_module(selection: DeclaredSelection) -> Any:
    """Import the module of a selection, which has the name of the declaration, and with it `make_selection`."""
    return importlib.import_module(f"moe_trainer.moe.selections.{selection.key}")


def build_selection(context: SelectionContext) -> ExpertSelection:
    """Build the selection that the flags ask for in a layer."""
    return load_module(get_selection(context.moe, context.layer_number)).make_selection(context)

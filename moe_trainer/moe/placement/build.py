"""The choice of a placement for a layer."""

import importlib
from typing import Any

from arguments.mechanisms.placement_kinds.declaration import DeclaredPlacement
from arguments.mechanisms.placements import get_placement
from arguments.moe import MoEArgs
from moe_trainer.moe.placement.own import ExpertPlacement
from moe_trainer.parallel.state import ParallelState


def load_module(placement: DeclaredPlacement) -> Any:
    """Import the module of a placement, which has the name of the declaration, and with it `make_placement`."""
    return importlib.import_module(f"moe_trainer.moe.placement.{placement.key}")


def build_placement(moe: MoEArgs, ps: ParallelState) -> ExpertPlacement:
    """Build the placement that the flags ask for."""
    return load_module(get_placement(moe, ps.ep.size)).make_placement(moe, ps)

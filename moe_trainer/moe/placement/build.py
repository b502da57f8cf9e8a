"""The choice of a placement for a layer."""

from arguments.mechanisms.placements import get_placement
from arguments.moe import MoEArgs
from moe_trainer.declared_module import load_module
from moe_trainer.moe.placement.own import ExpertPlacement
from moe_trainer.parallel.state import ParallelState


def build_placement(moe: MoEArgs, ps: ParallelState) -> ExpertPlacement:
    """Build the placement that the flags ask for."""
    return load_module(get_placement(moe, ps.ep.size)).make_placement(moe, ps)

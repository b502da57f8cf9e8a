"""Judge a command line as a run would, for plans."""

from __future__ import annotations

from collections.abc import Mapping

from arguments import ArgumentError, Arguments, parse_args
from moe_trainer.planner.plan import PlanError
from moe_trainer.shape.batch_sizes import sizes_that_wait


def judged(argv: list[str], world_size: int, checkpoint: Mapping[str, object] | None = None) -> Arguments:
    """The flags, if a run on so many ranks would start with them.

    Raises: ArgumentError with everything that is wrong; PlanError for batch sizes with which virtual stages would wait for ever.
    """
    args = parse_args(argv, world_size, checkpoint)
    if args.unbuildable:
        raise ArgumentError(args.unbuildable)
    sizes = args.parallel
    replicas = world_size // (sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size)
    waiting = sizes_that_wait(args, replicas)
    if waiting:
        raise PlanError("; ".join(waiting))
    return args

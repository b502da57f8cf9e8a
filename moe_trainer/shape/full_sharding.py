"""What --use-megatron-fsdp and --use-torch-fsdp2 cut over the data-parallel ranks, from flags alone; with one such rank it is nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arguments.parallel import ParallelArgs


def strategy_of(parallel: ParallelArgs) -> str | None:
    """In the words of --data-parallel-sharding-strategy; None without such a flag."""
    if parallel.use_torch_fsdp2:
        return "optim_grads_params"
    return parallel.data_parallel_sharding_strategy if parallel.use_megatron_fsdp else None


def shards_parameters(parallel: ParallelArgs) -> bool:
    """Are parameters themselves cut, so that none is held twice?"""
    return strategy_of(parallel) in ("optim_grads", "optim_grads_params")


def keeps_gathered(parallel: ParallelArgs) -> bool:
    """Do they stay whole beside the shards between forward and backward?"""
    return strategy_of(parallel) == "optim_grads" or (parallel.use_torch_fsdp2 and not parallel.torch_fsdp2_reshard_after_forward)

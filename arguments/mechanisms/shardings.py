"""Shardings: how data-parallel ranks share parameters, gradients and optimizer state; one declaration each.

The flags that select (--use-distributed-optimizer, --use-megatron-fsdp with --data-parallel-sharding-strategy,
--use-torch-fsdp2) are read here only; `get_sharding` returns the declaration that all other code asks. A declaration,
in sharding_kinds/, states for every `ShardingCapability` that it acts, that the flags that demand it are rejected and
why, or that they have no effect and why.
"""

from typing import Any

from arguments.mechanisms.sharding_kinds.buffers import DISTRIBUTED_OPTIMIZER, REPLICATED
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability, ShardingDeclaration
from arguments.mechanisms.sharding_kinds.full import MEGATRON_FSDP, TORCH_FSDP2
from arguments.mechanisms.support import rejected_flags

SHARDINGS: tuple[ShardingDeclaration, ...] = (
    REPLICATED,
    DISTRIBUTED_OPTIMIZER,
    TORCH_FSDP2,
    *MEGATRON_FSDP,
)
WRAPPED_FLAGS = tuple(dict.fromkeys(each.dest for each in SHARDINGS if each.is_wrapped and each.dest is not None))
"""Destinations of the flags that ask for full sharding."""


def asked_for(parallel: Any) -> tuple[ShardingDeclaration, ...]:
    """Return the shardings that the flags ask for, the one that acts first; arguments as of `get_sharding`."""
    return tuple(
        each
        for each in reversed(SHARDINGS)
        if all(getattr(parallel, dest) == value for dest, value in each.selected_by.items())
    )


def get_sharding(parallel: Any) -> ShardingDeclaration:
    """Return the sharding that the flags ask for, which acts if there is more than one data-parallel rank.

    Args:
        parallel: has the fields of ParallelArgs.
    """
    return asked_for(parallel)[0]


def wrapped(parallel: Any) -> tuple[ShardingDeclaration, ...]:
    """Return the kinds of full sharding that flags ask for; there is one at most in a run."""
    return tuple(each for each in asked_for(parallel) if each.is_wrapped)


def needs_support(capability: ShardingCapability) -> str:
    """Return the condition, as arguments/needs.py reads it, without which flags that demand a capability do not act."""
    return " or ".join(dict.fromkeys(str(each.dest) for each in SHARDINGS if each.supports(capability)))


def rejections(parallel: Any, capability: ShardingCapability) -> tuple[tuple[str, bool], ...]:
    """Return flags of which a value asks for a sharding that rejects a capability, and whether theirs does."""
    rejected = {each.dest for each in asked_for(parallel) if each.rejects(capability)}
    return tuple((dest, dest in rejected) for dest, _ in rejected_flags(SHARDINGS, capability))

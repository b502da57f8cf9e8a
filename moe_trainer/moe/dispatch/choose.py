"""Choice of the dispatcher, once, when the model is built."""

from collections.abc import Iterable

from arguments.moe import MoEArgs
from moe_trainer.moe.dispatch.allgather import AllGatherDispatcher
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
from moe_trainer.moe.dispatch.base import TokenDispatcher
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.parallel.state import ParallelState


def choose_dispatcher(moe: MoEArgs, ps: ParallelState) -> TokenDispatcher:
    """Return the dispatcher for --moe-token-dispatcher-type under these parallel sizes.

    Raises: ValueError when the type needs something that this version has not.
    """
    kind = moe.moe_token_dispatcher_type
    if kind not in ("allgather", "alltoall"):
        raise ValueError(f"--moe-token-dispatcher-type {kind} is not available yet; use alltoall or allgather")
    if ps.tp_ep.size == 1:
        return LocalDispatcher()
    return AllToAllDispatcher(ps) if kind == "alltoall" else AllGatherDispatcher(ps)


def connect_dispatcher(layers: Iterable, dispatcher: TokenDispatcher) -> None:
    """Give every MoE layer of a model the same dispatcher."""
    for layer in layers:
        layer.dispatcher = dispatcher

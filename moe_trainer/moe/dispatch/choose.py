"""Choice of the dispatcher, once, when the model is built."""

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
    if ps.etp.size != 1:
        raise ValueError(f"--expert-tensor-parallel-size {ps.etp.size} is not available yet; use 1")
    if ps.ep.size == 1:
        return LocalDispatcher()
    return AllToAllDispatcher(ps.ep) if kind == "alltoall" else AllGatherDispatcher(ps.ep)

"""Whether all ranks see the same folder. A node's own disk, or a relative path, may name another one on each node."""

import contextlib
import os
import socket
import time
from pathlib import Path

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.parallel.coordination import gather_errors
from moe_trainer.parallel.state import ParallelState

LOOK_TIMEOUT_S = 10.0
"""How long a rank looks for a path that rank 0 may just have made: network file systems remember what they saw."""
_LOOK_AGAIN_S = 0.5
_RANKS_SHOWN = 4


def check_seen_by_all(folder: Path, path: Path, need: str, ps: ParallelState, flag: str = "") -> None:
    """Check that every rank sees a path that rank 0 sees. Collective.

    Args:
        folder: as the flags name it, on every rank.
        path: the folder, or something in it.
        need: what the ranks need it for.
        ps: of the run.
        flag: that names the folder, with a space.

    Raises:
        CheckpointError: on every rank; it names the ranks and nodes that do not see it.
    """
    blind = gather_errors(None if _is_seen(path) else describe_place(folder, ps), ps.world)
    if blind:
        more = f"; and {len(blind) - _RANKS_SHOWN} more" if len(blind) > _RANKS_SHOWN else ""
        raise CheckpointError(
            f"{flag}{folder}: {len(blind)} of {ps.world.size} ranks do not see what rank 0 sees in this folder: "
            f"{'; '.join(blind[:_RANKS_SHOWN])}{more}. {need}: give the absolute path of a folder that all nodes "
            "share. No checkpoint was changed"
        )


def describe_place(folder: Path, ps: ParallelState) -> str:
    """Describe where this rank looks for a folder."""
    return f"rank {ps.world.rank} on node {socket.gethostname()} ({folder.absolute()})"


def _is_seen(path: Path) -> bool:
    end = time.monotonic() + LOOK_TIMEOUT_S
    while not os.path.exists(path):
        if time.monotonic() >= end:
            return False
        for parent in path.parents:  # listing a folder renews what NFS remembers of it
            with contextlib.suppress(OSError):
                os.listdir(parent)
                break
        time.sleep(_LOOK_AGAIN_S)
    return True

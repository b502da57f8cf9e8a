"""Whether all ranks see the same folder. A node's own disk, or a relative path, may name another one on each node."""

import contextlib
import logging
import os
import socket
import time
from pathlib import Path

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.parallel.coordination import gather_errors
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 90.0
"""How long a rank looks for a path that rank 0 may just have made: network file systems remember up to a minute that
it was not there."""
NOTE_AFTER_S = 5.0
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
    blind = gather_errors(None if _is_seen(path, ps) else describe_place(folder, ps), ps.world)
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


def _is_seen(path: Path, ps: ParallelState) -> bool:
    start, is_noted = time.monotonic(), False
    while not os.path.exists(path):
        waited = time.monotonic() - start
        if waited >= LOOK_TIMEOUT_S:
            return False
        if waited >= NOTE_AFTER_S and not is_noted:
            is_noted = True
            logger.warning(
                "%s does not see %s yet, which rank 0 sees; it looks for up to %.0f s",
                describe_place(path.parent, ps),
                path.name,
                LOOK_TIMEOUT_S,
            )
        for parent in path.parents:  # listing a folder renews what NFS remembers of it
            with contextlib.suppress(OSError):
                os.listdir(parent)
                break
        time.sleep(_LOOK_AGAIN_S)
    return True

"""Rank, world size and rendezvous address from the launcher's environment, without torch.

In this order:

* torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
* SLURM, inside an `srun` step: SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID. Megatron-LM leaves this mapping to the
  container.
* A single process. The shell of sbatch or salloc has the variables of its job too (SLURM_NTASKS, of sbatch even
  SLURM_PROCID=0), but a plain `python pretrain_moe.py` in it is one process; only srun sets SLURM_STEP_ID. A hint says
  so where the job asked for several tasks.

Ranks per node: NVLINK_DOMAIN_SIZE (NVLink may join the GPUs of several hosts), else LOCAL_WORLD_SIZE of torchrun, else
SLURM_STEP_TASKS_PER_NODE if the nodes have equally many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

_NAMES, _SLURM_NAMES = ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")


@dataclass(frozen=True)
class LaunchEnv:
    """Rank, world size and rendezvous address of this process."""

    rank: int
    world_size: int
    local_rank: int | None  # None: there are several ranks, and it is unknown which of them share a node
    master_addr: str | None
    master_port: int | None
    source: str
    ranks_per_node: int | None = None  # consecutive ranks with fast links between them; None: unknown
    hint: str | None = None  # why the number of ranks may not be the one that is meant


def read_launch_env(env: Mapping[str, str]) -> LaunchEnv:
    """Read rank, world size and rendezvous address from the environment.

    Raises:
        ValueError: if a variable is not a number, or several processes have no rendezvous address.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        launch = LaunchEnv(
            rank=_number(env, "RANK", 0),
            world_size=_number(env, "WORLD_SIZE", 1),
            local_rank=_number(env, "LOCAL_RANK", None if _number(env, "WORLD_SIZE", 1) > 1 else 0),
            master_addr=env.get("MASTER_ADDR"),
            master_port=_number(env, "MASTER_PORT", None),
            source="RANK/WORLD_SIZE",
            ranks_per_node=_number(env, "NVLINK_DOMAIN_SIZE", _number(env, "LOCAL_WORLD_SIZE", None)),
        )
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
        job = _number(env, "SLURM_JOB_ID", 0)
        launch = LaunchEnv(
            rank=_number(env, "SLURM_PROCID", 0),
            world_size=_number(env, "SLURM_NTASKS", 1),
            local_rank=_number(env, "SLURM_LOCALID", 0),
            master_addr=env.get("MASTER_ADDR") or first_slurm_host(nodes),
            # One port per job, so that two jobs on one node do not connect to each other.
            master_port=_number(env, "MASTER_PORT", 20000 + job % 20000),
            source="SLURM",
            ranks_per_node=_number(env, "NVLINK_DOMAIN_SIZE", _tasks_per_node(env)),
        )
    else:
        return LaunchEnv(0, 1, 0, None, None, "single process", hint=_hint_of_job(env))
    _check_rank(launch.rank, launch.world_size, _SLURM_NAMES if launch.source == "SLURM" else _NAMES)
    if launch.local_rank is not None and launch.local_rank < 0:
        raise ValueError(f"{launch.source}: LOCAL_RANK {launch.local_rank} is negative")
    if launch.ranks_per_node is not None and launch.ranks_per_node < 1:
        raise ValueError(f"{launch.source}: {launch.ranks_per_node} ranks per node (NVLINK_DOMAIN_SIZE)")
    if launch.master_port is not None and not 0 < launch.master_port < 65536:
        raise ValueError(f"environment variable MASTER_PORT must be from 1 to 65535, got {launch.master_port}")
    if launch.world_size > 1 and (not launch.master_addr or launch.master_port is None):
        raise ValueError(
            f"WORLD_SIZE is {launch.world_size} but MASTER_ADDR and MASTER_PORT are not both set: start the ranks with "
            "torchrun or srun, or export the address and a free port of the first node"
        )
    return launch


def _hint_of_job(env: Mapping[str, str]) -> str | None:
    """Return that a job of SLURM asked for more tasks than this process, None without one.

    A number that cannot be read is not one: a process alone does not depend on it.
    """
    tasks = env.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" not in env or not tasks.isdecimal() or int(tasks) < 2:
        return None
    return (
        f"this is one process of one rank, though SLURM job {env['SLURM_JOB_ID']} asked for {tasks} tasks "
        "(SLURM_NTASKS): start the ranks with srun in front of the command, or with torchrun"
    )


def is_first_rank(env: Mapping[str, str]) -> bool:
    """Return whether this is the first process of a job or the only one; nothing else of the environment is read.

    Raises:
        ValueError: if it is no process of the job.
    """
    names = _SLURM_NAMES if "SLURM_STEP_ID" in env and not env.keys() & set(_NAMES) else _NAMES
    rank, world_size = _number(env, names[0], 0) or 0, _number(env, names[1], None)
    if world_size is None:  # a rank alone is left over from something else
        return True
    _check_rank(rank, world_size, names)
    return rank == 0


def _check_rank(rank: int, world_size: int, names: tuple[str, str]) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"{names[0]} and {names[1]}: rank {rank} is not valid for world size {world_size}")


def _tasks_per_node(env: Mapping[str, str]) -> int | None:
    """Return the tasks of every node of a SLURM step ("8(x4)"), None if they differ or are unknown."""
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(match[1]) if match else None


@overload
def _number(env: Mapping[str, str], name: str, default: int) -> int: ...


@overload
def _number(env: Mapping[str, str], name: str, default: None) -> int | None: ...


def _number(env: Mapping[str, str], name: str, default: int | None) -> int | None:
    if name not in env:
        return default
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {env[name]!r}") from None


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: "gpu[003-010,12],cpu1" -> "gpu003"."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise ValueError(f"cannot read the SLURM node list {nodelist!r}")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")

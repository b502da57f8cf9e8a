"""From a started process to a rank: launch environment, device, process groups, seeds, logging.

The order is visible in `initialize`. Nothing is kept in module state; the result is a `Runtime`.
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import logging
import os
import platform
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from arguments import ArgumentError, Arguments, check_machine
from arguments.container import OPTIONS
from arguments.machine import check_packages, environment_defaults
from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.program import program_name
from arguments.stage_layout import grid_sizes, group_options
from moe_trainer.errors import UserError, as_user_error, report_once_per_job
from moe_trainer.exit_codes import ExitCode
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.parallel import collectives
from moe_trainer.parallel.grid import make_layout
from moe_trainer.parallel.groups import group_table, plan_groups
from moe_trainer.parallel.nccl_options import read_options
from moe_trainer.parallel.state import Group, ParallelState, communicator_timeout
from moe_trainer.parallel.trace import CommunicationError, backend_reason, is_communication_failure

logger = logging.getLogger(__name__)

# paths that may differ between nodes (a value of a `_json` flag may be the JSON itself), and what the launcher sets
_RANK_LOCAL_FLAGS = frozenset(("local_rank",)) | frozenset(
    dest
    for dest, option in OPTIONS.items()
    if option.section == "data" and option.path is not None and not dest.endswith("_json")
)
_MAX_LINES = 12
_JOIN_GRACE_S = 15.0  # torch enforces its own timeout with a better message


@dataclass(frozen=True)
class Runtime:
    """Launch environment, device, process groups and rendezvous store of this process."""

    launch_env: LaunchEnv
    device: torch.device
    ps: ParallelState
    store: dist.Store | None = None  # rendezvous store; None with one rank


def initialize(args: Arguments, launch_env: LaunchEnv) -> Runtime:
    """Join the process group, create the groups, seed the generators and set up logging.

    Raises:
        ArgumentError: if the flags do not fit this machine or its environment variables.
        UserError: if the ranks were started with different flags.
    """
    configure_logging(launch_env, args.output.logging_level)
    # a memory-mapped token file that is truncated kills the process: print at least where it was reading
    faulthandler.enable(2)
    device = _choose_device(launch_env)
    check_environment(args, torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None)
    store = _init_process_group(args, launch_env, device) if launch_env.world_size > 1 else None
    chooses_threads = device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ
    cores = cores_by_sharers() if chooses_threads else {}
    if store is not None:
        for key in cores:
            store.add(key, 1)
    with report_once_per_job(make_error_dedup_counter(store)), as_user_error("start-up"):
        check_same_flags(args, launch_env)
        ps = make_groups(
            args, launch_env, communicator_timeout(args.parallel.distributed_timeout_minutes * 60.0, device)
        )
    if chooses_threads:  # check_same_flags has waited for all ranks
        shares = [count // (1 if store is None else store.add(key, 0)) for key, count in cores.items()]
        torch.set_num_threads(max(1, min(torch.get_num_threads(), *shares)))
    set_seeds(args, ps)
    set_numerics_flags(args)
    if launch_env.hint is not None:
        logger.warning(launch_env.hint)
    logger.info(
        f"{launch_env.world_size} rank(s) from {launch_env.source}, device {device.type}, {torch.get_num_threads()} "
        f"thread(s) per rank, torch {torch.__version__}"
    )
    return Runtime(launch_env, device, ps, store)


def cores_by_sharers(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> dict[str, int]:
    """Return numbers of cores by the key of the ranks that share them; this rank is one of them.

    A launcher may bind each rank to its own cores, or all of a job to the same ones: ranks of the same affinity share
    its cores. All ranks of a container share its quota, which torch does not know.
    """
    node = platform.node()
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {f"threads/{node}/{' '.join(map(str, sorted(bound)))}": len(bound)}
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        cores[f"threads/{node}"] = max(1, int(allowed) // int(period))
    except (OSError, ValueError):  # no such file, or "max": no quota
        pass
    return cores


def check_same_flags(args: Arguments, launch_env: LaunchEnv) -> None:
    """Check that all ranks were launched with the same settings; divergent control flow would deadlock.

    Each rank parses its own command line, and with --use-checkpoint-args a file that nodes may see in different states.

    Raises:
        UserError: on every rank, with the flags that differ.

    Communication: a digest per rank. Collective.
    """
    if launch_env.world_size == 1:
        return
    world = Group(
        "world", tuple(range(launch_env.world_size)), launch_env.rank, launch_env.world_size, dist.group.WORLD
    )
    settings = {name: repr(value) for name, value in args.as_dict().items() if name not in _RANK_LOCAL_FLAGS}
    if get_dispatcher(args.moe).groups_by_domain:  # the groups depend on it
        settings["ranks per node"] = repr(launch_env.ranks_per_node)
    digests = collectives.all_gather_object(hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest(), world)
    if len(set(digests)) == 1:
        return
    first = collectives.broadcast_object(settings, world)
    other = {name: value for name, value in settings.items() if first.get(name) != value}
    is_first_with_these = digests.index(digests[world.rank]) == world.rank
    differences = collectives.all_gather_object(other if is_first_with_these else {}, world)
    lines = [
        f"  {OPTIONS[name].spellings[0] if name in OPTIONS else name}: {first.get(name)} on rank 0, {value} on rank "
        f"{rank}"
        for rank, differing in enumerate(differences)
        for name, value in differing.items()
    ]
    title = "the ranks were not started with the same flags (or read different checkpoints' flags):"
    rest = [f"  ... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    raise UserError("\n".join([title, *lines[:_MAX_LINES], *rest]))


def make_groups(args: Arguments, launch_env: LaunchEnv, timeout: datetime.timedelta) -> ParallelState:
    """Create the process groups. Collective.

    Raises:
        ValueError: if the sizes do not fit, or for options of groups that do not exist.
    """
    sizes, options = grid_sizes(args.parallel), group_options(args)
    if options["ranks_per_node"] is None and get_dispatcher(args.moe).groups_by_domain:
        options["ranks_per_node"] = launch_env.ranks_per_node
    plans = plan_groups(make_layout(launch_env.world_size, **sizes), **options)
    if args.parallel.print_groups and launch_env.rank == 0:
        print(f"groups of {launch_env.world_size} ranks:\n{group_table(plans)}", flush=True)
    nccl = read_options(args.parallel.nccl_communicator_config_path, args.parallel.high_priority_groups, plans)
    sizes |= options
    try:
        return ParallelState.create(launch_env.world_size, launch_env.rank, **sizes, timeout=timeout, nccl=nccl)
    except RuntimeError as error:
        if not is_communication_failure(error):
            raise
        raise CommunicationError(
            f"start-up: not all of the {launch_env.world_size} ranks came to make the process groups "
            f"({backend_reason(error)})"
        ) from error


def check_environment(args: Arguments, arch: int | None) -> None:
    """Check the flags against environment, packages and GPU generation; set the variables that the flags imply.

    Raises:
        ArgumentError: with everything that does not fit.
    """
    for name, value in environment_defaults(args, os.environ, arch).items():
        os.environ[name] = value
        logger.info("%s=%s (implied by the flags)", name, value)
    violations = check_machine(args, os.environ, arch)
    # only torch is checked: flags that need a version of Transformer Engine also run without it
    violations += check_packages(args, {"torch": torch.__version__})
    for violation in violations:
        if violation.kind == "note":
            logger.info("%s", violation.message)
    if errors := [violation for violation in violations if violation.kind != "note"]:
        raise ArgumentError(errors)


def configure_logging(launch_env: LaunchEnv, level: int | None) -> None:
    """Log info from rank 0 only, warnings from every rank."""
    if level is None:
        text = os.environ.get("MEGATRON_LOGGING_LEVEL", str(logging.INFO))
        if not text.isdigit():
            raise ValueError(f"environment variable MEGATRON_LOGGING_LEVEL must be a number such as 20, got {text!r}")
        level = int(text)
    handler = logging.StreamHandler()
    prefix = "" if launch_env.world_size == 1 else f"[rank {launch_env.rank}] "
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    handler.addFilter(lambda record: launch_env.rank == 0 or record.levelno >= logging.WARNING)
    for name in ("moe_trainer", "arguments"):
        root = logging.getLogger(name)
        root.handlers[:] = [handler]
        root.setLevel(level)
        root.propagate = False


def _choose_device(launch_env: LaunchEnv) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(launch_env, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def device_index(launch_env: LaunchEnv, count: int) -> int:
    """Return which of this process's `count` visible GPUs to use.

    A launcher that shows every task its own GPU (`srun --gpus-per-task=1`) leaves no choice whatever the local rank.

    Raises:
        ValueError: if there are fewer GPUs than local ranks.
    """
    if count == 1 and launch_env.source == "SLURM":
        return 0
    if launch_env.local_rank is None:
        logger.warning(f"LOCAL_RANK is not set: rank {launch_env.rank} takes GPU {launch_env.rank % count} of {count}")
        return launch_env.rank % count
    if launch_env.local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK {launch_env.local_rank} needs {launch_env.local_rank + 1} GPUs on this node, {count} are "
            "visible"
        )
    return launch_env.local_rank


def _init_process_group(args: Arguments, launch_env: LaunchEnv, device: torch.device) -> dist.Store:
    """Meet the other ranks and return the rendezvous store.

    Raises:
        CommunicationError: if not all of them join within the timeout.
    """
    backend = args.parallel.distributed_backend
    if device.type == "cpu" and backend != "gloo":
        logger.info("--distributed-backend %s needs CUDA devices: these CPU ranks talk over gloo", backend)
        backend = "gloo"
    method = f"tcp://{launch_env.master_addr}:{launch_env.master_port}" if launch_env.source == "SLURM" else "env://"
    minutes = args.parallel.distributed_timeout_minutes
    # in a shell of `srun --ntasks 4 --pty bash` the other ranks are never started, and this is the only line
    logger.info(
        f"waiting for all {launch_env.world_size} ranks ({launch_env.source}) to meet at "
        f"{launch_env.master_addr}:{launch_env.master_port}, at most {minutes} minutes"
    )
    timeout = datetime.timedelta(minutes=minutes)
    limit = threading.Timer(timeout.total_seconds() + _JOIN_GRACE_S, _abort_unanswered, (args, launch_env))
    limit.daemon = True
    limit.start()
    try:
        store, _, _ = next(dist.rendezvous(method, launch_env.rank, launch_env.world_size, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("groups", store),
            rank=launch_env.rank,
            world_size=launch_env.world_size,
            timeout=communicator_timeout(args.parallel.distributed_timeout_minutes * 60.0, device),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        raise CommunicationError(
            f"start-up: the {launch_env.world_size} ranks did not all meet at "
            f"{launch_env.master_addr}:{launch_env.master_port} within {minutes} minutes ({backend_reason(error)})"
        ) from error
    finally:
        limit.cancel()
    return store


def _abort_unanswered(args: Arguments, launch_env: LaunchEnv) -> None:
    """End a process that waits for a server that accepts connections and never answers, which is not a store."""
    print(
        f"{program_name('train')}: rank {launch_env.rank}: start-up: no answer from "
        f"{launch_env.master_addr}:{launch_env.master_port} within {args.parallel.distributed_timeout_minutes} "
        "minutes; is another program listening there? Choose another MASTER_PORT",
        file=sys.stderr,
        flush=True,
    )
    os._exit(ExitCode.COMMUNICATION_FAILED)


def make_error_dedup_counter(store: dist.Store | None) -> Callable[[str], int] | None:
    """Return a function that counts in the rendezvous store how many ranks reported a message."""
    return None if store is None else lambda text: store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1)


def set_numerics_flags(args: Arguments) -> None:
    """Set torch's determinism and matmul reduction flags.

    cuBLAS may sum the parts of a bf16 GEMM (split-k) in bf16, unless --disable-bf16-reduced-precision-matmul.
    """
    if args.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        # a kernel for every torch.empty; nothing here reads before it writes
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - a property of the module
    if args.precision.disable_bf16_reduced_precision_matmul:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def set_seeds(args: Arguments, ps: ParallelState) -> None:
    """Seed every generator; ranks differ by pipeline stage (Megatron-LM: seed + 100 * stage).

    Dropout must differ between data-parallel ranks, so the torch generator also depends on the data rank.
    Tensor-parallel ranks share it: replicated activations lose the same elements (sharded ones: parallel/rng.py,
    ShardRNG). Initial weights do not depend on these generators (parallel/rng.py).
    """
    seed = args.training.seed + 100 * ps.pp.rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed + 1_000_003 * ps.dp_cp.rank)

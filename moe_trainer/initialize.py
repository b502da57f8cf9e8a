"""From a started process to a rank that knows its place: environment, process group, device, seeds, logging.

Order matters and is visible in `initialize`: who am I (environment) -> device and process group -> groups -> seeds ->
logging. Nothing here is kept in module state; the result is a `Runtime` that the caller passes on.
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

import numpy as np
import torch
import torch.distributed as dist

from arguments import ArgumentError, Arguments, check_machine
from arguments.container import OPTIONS
from arguments.machine import check_packages, environment_defaults
from moe_trainer.errors import InputError, told_once, user_input
from moe_trainer.exit_codes import ExitCode
from moe_trainer.parallel import collectives
from moe_trainer.parallel.groups import group_table, plan_groups
from moe_trainer.parallel.state import Group, ParallelState, communicator_timeout
from moe_trainer.parallel.trace import CommunicationError, backend_reason, is_communication_failure
from moe_trainer.place import Place
from moe_trainer.shape.layout import mapping_sizes

logger = logging.getLogger(__name__)

# what a node may call by another name, and what a launcher gives every process
_MAY_DIFFER = frozenset({
    "local_rank", "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path",
    "data_cache_path", "tokenizer_model", "vocab_file", "merge_file",
})
_MAX_LINES = 12
_JOIN_GRACE_S = 15.0  # torch keeps its own time limit, and says more where it does


@dataclass(frozen=True)
class Runtime:
    """What every later step needs to know about this process."""

    place: Place
    device: torch.device
    ps: ParallelState
    store: dist.Store | None = None  # where the ranks met; None with one rank


def initialize(args: Arguments, place: Place) -> Runtime:
    """Join the process group, make the groups, seed the generators, set up logging.

    Raises: ArgumentError for flags that do not fit this machine or its environment variables, InputError when the ranks were
        started with different flags.
    """
    configure_logging(place, args.output.logging_level)
    # a token file that is cut off under its memory map ends a process without a word: so it tells at least where it was reading
    faulthandler.enable(2)
    device = _choose_device(place)
    fit_machine(args, torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None)
    store = _join(args, place, device) if place.world_size > 1 else None
    counted = f"threads/{platform.node()}"  # ranks of this machine that leave their number of threads to torch
    if store is not None and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        store.add(counted, 1)
    with told_once(counter_of_words(store)), user_input("start-up"):
        check_same_flags(args, place)
        ps = make_groups(args, place, communicator_timeout(args.parallel.distributed_timeout_minutes * 60.0, device))
    set_seeds(args, ps)
    set_arithmetic(args)
    logger.info(
        "%d rank(s) from %s, device %s, %d thread(s) per rank, torch %s",
        place.world_size, place.source, device.type, torch.get_num_threads(), torch.__version__,
    )
    if store is not None and place.rank == 0:  # check_same_flags has waited for all ranks
        hint = hint_on_threads(store.add(counted, 0), torch.get_num_threads(), os.cpu_count() or 1)
        if hint:
            logger.warning("%s", hint)
    return Runtime(place, device, ps, store)


def hint_on_threads(ranks: int, threads: int, cores: int) -> str | None:
    """What would help if this machine's ranks without OMP_NUM_THREADS have more threads than it has cores; None where they do not."""
    if ranks < 2 or ranks * threads <= cores:
        return None
    return (f"OMP_NUM_THREADS is not set: {ranks} ranks of {threads} thread{'s' if threads > 1 else ''} share {cores} core{'s' if cores > 1 else ''} and slow each other down; "
            f"export OMP_NUM_THREADS={max(1, cores // ranks)}")


def check_same_flags(args: Arguments, place: Place) -> None:
    """See that all ranks run with the same settings: others would take other turns, and wait for each other for ever.

    Each rank reads its command line for itself, and with --use-checkpoint-args a file on top, which another node may see
    in another state. Communication: a digest per rank. Collective.
    Raises: InputError on every rank, with the flags that differ.
    """
    if place.world_size == 1:
        return
    world = Group("world", tuple(range(place.world_size)), place.rank, place.world_size, dist.group.WORLD)
    mine = {name: repr(value) for name, value in args.as_dict().items() if name not in _MAY_DIFFER}
    digests = collectives.all_gather_object(hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest(), world)
    if len(set(digests)) == 1:
        return
    first = collectives.broadcast_object(mine, world)
    other = {name: value for name, value in mine.items() if first.get(name) != value}
    found = collectives.all_gather_object(other if digests.index(digests[world.rank]) == world.rank else {}, world)
    lines = [f"  {OPTIONS[name].spellings[0] if name in OPTIONS else name}: {first.get(name)} on rank 0, {value} on rank {rank}"
             for rank, differing in enumerate(found) for name, value in differing.items()]
    rest = [f"  ... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    raise InputError("\n".join(["the ranks were not started with the same flags (or read different checkpoints' flags):",
                                *lines[:_MAX_LINES], *rest]))


def make_groups(args: Arguments, place: Place, timeout: datetime.timedelta) -> ParallelState:
    """Make the groups that the flags ask for. Collective.

    Raises: ValueError when the sizes do not fit.
    """
    sizes = mapping_sizes(args)
    if args.parallel.print_groups and place.rank == 0:
        print(f"groups of {place.world_size} ranks:\n{group_table(plan_groups(place.world_size, **sizes))}", flush=True)
    try:
        return ParallelState.create(place.world_size, place.rank, **sizes, timeout=timeout)
    except RuntimeError as error:
        if not is_communication_failure(error):
            raise
        raise CommunicationError(
            f"start-up: not all of the {place.world_size} ranks came to make the process groups ({backend_reason(error)})") from error


def fit_machine(args: Arguments, arch: int | None) -> None:
    """Check flags against environment, packages and GPU generation; set the variables that the flags imply.

    Raises: ArgumentError with everything that does not fit.
    """
    for name, value in environment_defaults(args, os.environ, arch).items():
        os.environ[name] = value
        logger.info("%s=%s (implied by the flags)", name, value)
    found = check_machine(args, os.environ, arch)
    # Only torch counts so far: the flags that ask for a version of Transformer Engine run here without it.
    found += check_packages(args, {"torch": torch.__version__})
    for violation in found:
        if violation.kind == "note":
            logger.warning("%s", violation.message)
    errors = [violation for violation in found if violation.kind != "note"]
    if errors:
        raise ArgumentError(errors)


def configure_logging(place: Place, level: int | None) -> None:
    """Log facts from rank 0 only, warnings from every rank."""
    if level is None:
        text = os.environ.get("MEGATRON_LOGGING_LEVEL", str(logging.INFO))
        if not text.isdigit():
            raise ValueError(f"environment variable MEGATRON_LOGGING_LEVEL must be a number such as 20, got {text!r}")
        level = int(text)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s" if place.world_size == 1 else f"[rank {place.rank}] %(message)s"))
    handler.addFilter(lambda record: place.rank == 0 or record.levelno >= logging.WARNING)
    for name in ("moe_trainer", "arguments"):
        root = logging.getLogger(name)
        root.handlers[:] = [handler]
        root.setLevel(level)
        root.propagate = False


def _choose_device(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", device_index(place, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def device_index(place: Place, count: int) -> int:
    """Which of this process's `count` visible GPUs to use.

    A launcher that shows every task one GPU of its own (`srun --gpus-per-task=1`) leaves no choice whatever the local rank.
    Raises: ValueError when there are fewer GPUs than local ranks.
    """
    if count == 1 and place.source == "SLURM":
        return 0
    if place.local_rank is None:
        logger.warning("LOCAL_RANK is not set: rank %d takes GPU %d of %d", place.rank, place.rank % count, count)
        return place.rank % count
    if place.local_rank >= count:
        raise ValueError(f"LOCAL_RANK {place.local_rank} needs {place.local_rank + 1} GPUs on this node, {count} are visible")
    return place.local_rank


def _join(args: Arguments, place: Place, device: torch.device) -> dist.Store:
    """Meet the other ranks. Returns: the store through which they met.

    Raises: CommunicationError when not all of them come within the timeout.
    """
    backend = args.parallel.distributed_backend
    if device.type == "cpu" and backend != "gloo":
        logger.info("--distributed-backend %s needs CUDA devices: these CPU ranks talk over gloo", backend)
        backend = "gloo"
    method = f"tcp://{place.master_addr}:{place.master_port}" if place.source == "SLURM" else "env://"
    timeout = datetime.timedelta(minutes=args.parallel.distributed_timeout_minutes)
    limit = threading.Timer(timeout.total_seconds() + _JOIN_GRACE_S, _leave_unanswered, (args, place))
    limit.daemon = True
    limit.start()
    try:
        store, _, _ = next(dist.rendezvous(method, place.rank, place.world_size, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=dist.PrefixStore("groups", store), rank=place.rank, world_size=place.world_size,
            timeout=communicator_timeout(args.parallel.distributed_timeout_minutes * 60.0, device), device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        raise CommunicationError(
            f"start-up: the {place.world_size} ranks did not all meet at {place.master_addr}:{place.master_port} within "
            f"{args.parallel.distributed_timeout_minutes} minutes ({backend_reason(error)})") from error
    finally:
        limit.cancel()
    return store


def _leave_unanswered(args: Arguments, place: Place) -> None:
    """End a process that torch keeps waiting: a program that is no store accepts connections and never answers."""
    print(f"pretrain_moe.py: rank {place.rank}: start-up: no answer from {place.master_addr}:{place.master_port} within "
          f"{args.parallel.distributed_timeout_minutes} minutes; is another program listening there? Choose another MASTER_PORT",
          file=sys.stderr, flush=True)
    os._exit(ExitCode.COMMUNICATION_FAILED)


def counter_of_words(store: dist.Store | None) -> Callable[[str], int] | None:
    """For told_once: counts on the store where the ranks met who says what."""
    return None if store is None else lambda text: store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1)


def set_arithmetic(args: Arguments) -> None:
    """Tell torch how products are to be computed.

    cuBLAS may add up the parts of a bf16 product (split-k) in bf16, unless --disable-bf16-reduced-precision-matmul.
    """
    if args.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for every torch.empty; nothing here reads before it writes
    if args.precision.disable_bf16_reduced_precision_matmul:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def set_seeds(args: Arguments, ps: ParallelState) -> None:
    """Seed every generator; ranks differ by pipeline stage (Megatron-LM: seed + 100 * stage).

    Dropout must differ between data-parallel ranks, so the torch generator of the forward pass also gets the data rank.
    Tensor-parallel ranks share it: what they all hold loses the same elements (what is cut: parallel/rng.py, ShardStream).
    Initial weights do not depend on these generators (parallel/rng.py).
    """
    seed = args.training.seed + 100 * ps.pp.rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed + 1_000_003 * ps.dp_cp.rank)

"""Bytes of weights, gradients, main parameters and moments, from flags alone.

What every parameter costs on a rank that holds it, and what is sharded over data-parallel ranks: the main parameters
and moments of the distributed optimizer, or everything under full sharding. Dense parameters are sharded over dp x cp,
experts over their own data-parallel ranks, in both cases within one instance of the optimizer.

Counted separately are weights stored in a narrow form (arguments/stored_weights.py), whose main parameters are
complete because no bf16 copy holds half of them, and the tables of embeddings and head, which another rule updates if
the optimizer updates matrices; vectors are counted as matrices. Not counted are the padding of buffers, one fp32 scale
per tensor in a format with scales, and temporary tensors of a step (optim/optimizer_shard.py, optim/host_offload.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from arguments.mechanisms.formats import STATE_BYTES
from arguments.mechanisms.optimizers import get_element_rule, get_optimizer
from arguments.mechanisms.shardings import get_sharding
from arguments.stage_layout import parallel_sizes

if TYPE_CHECKING:
    from arguments import Arguments


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one parameter on a rank, averaged over its elements; `host` of them are in host memory."""

    weights: float
    gradients: float
    main_params: float
    moments: float
    host: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.main_params + self.moments

    @property
    def device(self) -> float:
        return self.total - self.host


def state_bytes(
    args: Arguments,
    world_size: int,
    kind: Literal["dense", "expert"] = "dense",
    stored: bool = False,
    table: bool = False,
) -> StateBytes:
    """Return the bytes of a dense or expert parameter on a rank.

    `stored`: the weight is stored in 8 or 4 bits. `table`: the parameter belongs to the embeddings or the head.

    Raises:
        ValueError: if the optimizer's state is unknown.
    """
    state = _trained_state_bytes(args, world_size, kind, stored, table)
    return StateBytes(state.weights, 0.0, 0.0, 0.0, 0.0) if args.has_frozen_weights else state


def _trained_state_bytes(args: Arguments, world_size: int, kind: str, stored: bool, table: bool) -> StateBytes:
    optimizer, precision, parallel = args.optimizer, args.precision, args.parallel
    if not has_known_state(args):
        raise ValueError(f"the state of --optimizer {optimizer.optimizer} is not known")
    aware, half = optimizer.use_precision_aware_optimizer, precision.bf16 or precision.fp16
    ranks = _data_ranks(args, world_size, kind)
    # a search estimates before the rules have set the number of instances
    instance_ranks = max(1, ranks // (parallel.num_distributed_optimizer_instances or 1))
    count = len((get_element_rule(optimizer) if table else get_optimizer(optimizer)).states)
    formats = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) if aware else ("fp32", "fp32")
    moments = sum(STATE_BYTES[name] for name in formats[:count])
    width = 2.0 if half else 4.0
    if parallel.has_sharded_params and _data_ranks(args, world_size, "dense") > 1:
        # shards are weights and main parameters at once
        is_wide = parallel.has_fp32_main_params(precision.params_dtype_name)
        narrow_sums = parallel.has_bf16_main_grads
        shard = (4.0 if is_wide else width) / instance_ranks
        # narrow parameters have narrow gradients, which are added to fp32 sums
        gradients = 4.0 if is_wide else width + (0.0 if narrow_sums else 4.0)
        moments /= ranks if parallel.shards_outer else instance_ranks
        gathered = width if parallel.has_gathered_params else 0.0
        return StateBytes(shard + gathered, gradients / instance_ranks, 0.0, moments, _share_on_host(args) * moments)
    is_sharded = get_sharding(parallel).shards_flat_state
    shards = instance_ranks if is_sharded else 1
    share, main_device, main_host = _share_on_host(args), 0.0, 0.0
    if stored:
        width, main_device = quantized_param_bytes(args), STATE_BYTES[optimizer.main_params_dtype] if aware else 4.0
        main_host = main_device
    elif half and parallel.has_fp32_main_params(precision.params_dtype_name):
        # fp32 main parameters need only the bits that bf16 weights lack, except on a host that updates them
        main_host = STATE_BYTES[optimizer.main_params_dtype] if aware else 4.0
        shared = aware and precision.bf16 and optimizer.main_params_dtype == "fp32"
        main_device = 2.0 if shared else main_host
        if not optimizer.optimizer_cpu_offload:
            main_host = main_device
    main = (1 - share) * main_device + share * main_host
    host = share * (main_host + moments)
    return StateBytes(width, _gradient_bytes(args), main / shards, moments / shards, host / shards)


def rank_state_bytes(
    args: Arguments, world_size: int, dense: int, expert: int, stored: tuple[int, int] = (0, 0), tables: int = 0
) -> StateBytes:
    """Return all bytes of a rank with these numbers of dense and expert parameters.

    `stored`: how many of each are stored in 8 or 4 bits. `tables`: how many of the dense ones belong to the embeddings
    and the head.
    """
    counts: tuple[tuple[Literal["dense", "expert"], bool, bool, int], ...] = (
        ("dense", False, False, dense - stored[0] - tables),
        ("expert", False, False, expert - stored[1]),
        ("dense", True, False, stored[0]),
        ("expert", True, False, stored[1]),
        ("dense", False, True, tables),
    )
    parts = [
        (count, state_bytes(args, world_size, kind, is_quantized, table)) for kind, is_quantized, table, count in counts
    ]
    names = [field.name for field in fields(StateBytes)]
    return StateBytes(*(sum(count * getattr(each, name) for count, each in parts) for name in names))


def has_known_state(args: Arguments) -> bool:
    """Return whether the size of the optimizer's state is known."""
    return bool(get_optimizer(args.optimizer).states)


def quantized_param_bytes(args: Arguments) -> float:
    """Return the bytes of a stored weight, with its share of the block's scales; 0 if none is stored so."""
    return 0.0 if (stored := args.stored_weight_format) is None else stored.num_bytes


def _data_ranks(args: Arguments, world_size: int, kind: str) -> int:
    """Return how many ranks hold the same parameter."""
    sizes = parallel_sizes(args)
    model = sizes["etp"] * sizes["ep"] * sizes["pp"] if kind == "expert" else sizes["tp"] * sizes["pp"]
    return max(1, world_size // model)


def _share_on_host(args: Arguments) -> float:
    optimizer = args.optimizer
    if optimizer.optimizer_cpu_offload:
        return optimizer.optimizer_offload_fraction
    return optimizer.optimizer_state_offload_fraction if optimizer.chunked_optimizer_state_offload else 0.0


def _gradient_bytes(args: Arguments) -> float:
    """Return the bytes of a gradient in the buffer.

    With --ddp-param-name-patterns-for-fp32-local-accumulation all, the separate accumulation counts too.
    """
    precision, half = args.precision, args.precision.bf16 or args.precision.fp16
    stored_in_bf16 = half and (args.parallel.has_bf16_main_grads or args.optimizer.main_grads_dtype == "bf16")
    if not (stored_in_bf16 or (precision.bf16 and precision.grad_reduce_in_bf16)):
        return 4.0
    return 6.0 if "all" in args.parallel.ddp_param_name_patterns_for_fp32_local_accumulation else 2.0

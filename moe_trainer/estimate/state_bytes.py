"""Bytes of weights, gradients, main parameters and moments, from flags alone.

What every parameter costs on a rank that holds it, and what is divided among data-parallel ranks: the main parameters and moments of the
distributed optimizer, everything under full sharding. Dense parameters are divided over dp x cp, experts over their own data-parallel
ranks; in both cases within one instance of the optimizer. Weights that are kept in 8 bits (--fp8-param-gather) are counted apart: they
have whole main parameters of their own, since no bf16 copy holds a half of them. So are, with --optimizer muon, tables of
embeddings and head, which its other rule updates; its vectors are taken for matrices. Not counted are what fills buffers up to their alignment, one fp32 scale for every tensor in a
format with scales, and what a step opens in passing (optim/optimizer_shard.py, optim/host_offload.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from arguments.stage_layout import parallel_sizes

if TYPE_CHECKING:
    from arguments import Arguments

FP8_BLOCK_ELEMENTS = 128 * 128
FP8_BLOCK_SCALE_BYTES = 12
"""A block's scale, its inverse, and the largest magnitude that both follow from."""
_BYTES = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})
MOMENTS = MappingProxyType({"adam": 2, "sgd": 1, "lion": 1, "muon": 1})
"""Moments of a parameter by --optimizer."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one parameter on a rank that holds it, on average over its elements.

    host: how many of them are in host memory; on a CPU, too.
    """

    weights: float
    gradients: float
    main_params: float
    moments: float
    host: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.main_params + self.moments

    @property
    def device(self) -> float:
        """Those in the memory of the device."""
        return self.total - self.host


def state_bytes(
    args: Arguments,
    world_size: int,
    kind: Literal["dense", "expert"] = "dense",
    stored: bool = False,
    table: bool = False,
) -> StateBytes:
    """What a dense parameter, or one of an expert, costs on a rank. stored: one that is kept in 8 bits. table: one of embeddings or head.

    Raises: ValueError for an optimizer whose state is not known.
    """
    found = _trained(args, world_size, kind, stored, table)
    return StateBytes(found.weights, 0.0, 0.0, 0.0, 0.0) if args.has_frozen_weights else found


def _trained(args: Arguments, world_size: int, kind: str, stored: bool, table: bool) -> StateBytes:
    """As state_bytes, of a parameter that is updated."""
    optimizer, precision, parallel = args.optimizer, args.precision, args.parallel
    if not has_known_state(args):
        raise ValueError(f"the state of --optimizer {optimizer.optimizer} is not known")
    aware, half, ranks = (
        optimizer.use_precision_aware_optimizer,
        precision.bf16 or precision.fp16,
        _data_ranks(args, world_size, kind),
    )
    count = MOMENTS[optimizer.muon_scalar_optimizer if optimizer.optimizer == "muon" and table else optimizer.optimizer]
    formats = (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) if aware else ("fp32", "fp32")
    moments = float(sum(_BYTES[name] for name in formats[:count]))
    width = 2.0 if half else 4.0
    if parallel.has_sharded_params and _data_ranks(args, world_size, "dense") > 1:
        instance = max(
            1, ranks // (parallel.num_distributed_optimizer_instances or 1)
        )  # (a search asks before rules do)
        # fp32 shards are weights and main parameters in one
        return StateBytes(
            4 / instance + (width if parallel.has_gathered_params else 0.0),
            4 / instance,
            0.0,
            moments / instance,
            _share_on_host(args) * moments / instance,
        )
    shards = 1
    if parallel.use_distributed_optimizer and parallel.fsdp_strategy != "no_shard":
        shards = max(1, ranks // (parallel.num_distributed_optimizer_instances or 1))
    share, main_device, main_host = _share_on_host(args), 0.0, 0.0
    if stored:
        width, main_device = fp8_param_bytes(args), float(_BYTES[optimizer.main_params_dtype]) if aware else 4.0
        main_host = main_device
    elif half:
        # beside bf16 weights, fp32 main parameters need only what these lack; on a host that updates them there are no weights
        main_host = float(_BYTES[optimizer.main_params_dtype]) if aware else 4.0
        shared = aware and precision.bf16 and optimizer.main_params_dtype == "fp32"
        main_device = 2.0 if shared else main_host
        if not optimizer.optimizer_cpu_offload:
            main_host = main_device
    return StateBytes(
        width,
        _gradient_bytes(args),
        ((1 - share) * main_device + share * main_host) / shards,
        moments / shards,
        share * (main_host + moments) / shards,
    )


def rank_state_bytes(
    args: Arguments, world_size: int, dense: int, expert: int, stored: tuple[int, int] = (0, 0), tables: int = 0
) -> StateBytes:
    """All bytes of a rank that holds so many dense parameters and parameters of experts.

    stored: how many of each are kept in 8 bits. tables: how many of the dense ones are rows of embeddings and head.
    """
    counts = (
        ("dense", False, False, dense - stored[0] - tables),
        ("expert", False, False, expert - stored[1]),
        ("dense", True, False, stored[0]),
        ("expert", True, False, stored[1]),
        ("dense", False, True, tables),
    )
    parts = [(count, state_bytes(args, world_size, kind, apart, table)) for kind, apart, table, count in counts]
    return StateBytes(
        *(
            sum(count * getattr(each, name) for count, each in parts)
            for name in ("weights", "gradients", "main_params", "moments", "host")
        )
    )


def has_known_state(args: Arguments) -> bool:
    """Can all this be told? Not of an optimizer whose state is not known."""
    return args.optimizer.optimizer in MOMENTS


def fp8_param_bytes(args: Arguments) -> float:
    """Return the bytes of a weight stored in fp8, with its share of the block's scales; a scale per tensor is not counted."""
    has_blocks = args.precision.fp8_recipe == "blockwise"
    return 1.0 + (FP8_BLOCK_SCALE_BYTES / FP8_BLOCK_ELEMENTS if has_blocks else 0.0)


def _data_ranks(args: Arguments, world_size: int, kind: str) -> int:
    """Ranks that hold the same parameter."""
    sizes = parallel_sizes(args)
    model = sizes["etp"] * sizes["ep"] * sizes["pp"] if kind == "expert" else sizes["tp"] * sizes["pp"]
    return max(1, world_size // model)


def _share_on_host(args: Arguments) -> float:
    optimizer = args.optimizer
    if optimizer.optimizer_cpu_offload:
        return optimizer.optimizer_offload_fraction
    return optimizer.optimizer_state_offload_fraction if optimizer.chunked_optimizer_state_offload else 0.0


def _gradient_bytes(args: Arguments) -> float:
    """Of the buffer; with --ddp-param-name-patterns-for-fp32-local-accumulation all also of what is added up beside it."""
    precision, half = args.precision, args.precision.bf16 or args.precision.fp16
    sharded = args.parallel.use_megatron_fsdp and args.parallel.megatron_fsdp_main_grads_dtype == "bf16"
    narrow = (
        precision.bf16
        and precision.grad_reduce_in_bf16
        or half
        and (sharded or args.optimizer.main_grads_dtype == "bf16")
    )
    if not narrow:
        return 4.0
    return 6.0 if "all" in args.parallel.ddp_param_name_patterns_for_fp32_local_accumulation else 2.0

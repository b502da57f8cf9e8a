"""Parameter metadata: `param.info`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.parallel.state import Group, ParallelState

KINDS = ("dense", "expert")
INITS = ("normal", "zeros", "ones", "constant", "xavier_uniform", "uniform", "log_uniform", "log_step")


@dataclass(frozen=True)
class ParamInfo:
    """All that the optimizer and checkpoints need from the model about a parameter.

    Attributes:
        names: global Megatron-Core names: one, or with `stacked` one per slice of the leading dimension, or with
            `row_counts` one per block of rows.
        kind: "dense" (gradient reduced over dp_cp) or "expert" (over edp).
        sharded_dim: dimension of one named tensor that is sharded over tp (experts: etp).
        parts: number of equal parts along sharded_dim that are sharded separately (2 for a gated fc1: [gate; up]).
        part_sizes: sizes of unequal parts, in the full tensor.
        part_names: suffixes, if checkpoints store every part as a tensor (gated DeltaNet in Megatron-Core).
        row_blocks: rows of each projection within a period of a fused matrix (linear_qkv: within a query group), which
            optimizers of matrices update separately.
        is_grad_partial: the gradient is partial over tp (experts: etp) and must be all-reduced.
        tied: several pipeline stages hold it; the gradient must be all-reduced over ps.embedding.
        is_replica: an earlier stage owns it; not counted in norms and not saved.
        stacked: the leading dimension enumerates `names` (local experts).
        has_gradient: no loss reaches it if False (it only selects); weight decay leaves it alone then.
        row_counts: rows of each of `names`, if the parameter is their concatenation; it is not sharded then.
        init: initial distribution; "log_uniform" is the logarithm of uniform values (decay of a gated DeltaNet head),
            "log_step" what softplus maps to log-uniform step sizes (Mamba).
        init_std: used by "normal" and "uniform" only.
        init_value: used by "constant" only.
    """

    names: tuple[str, ...]
    kind: str = "dense"
    sharded_dim: int | None = None
    shard_rank: int = 0
    shard_count: int = 1
    parts: int = 1
    part_sizes: tuple[int, ...] = ()
    part_names: tuple[str, ...] = ()
    row_blocks: tuple[int, ...] = ()
    is_grad_partial: bool = False
    tied: bool = False
    is_replica: bool = False
    stacked: bool = False
    has_gradient: bool = True
    row_counts: tuple[int, ...] = ()
    init: str = "normal"
    init_std: float = 0.0
    init_value: float = 0.0

    def __post_init__(self):
        assert self.names and all(isinstance(name, str) for name in self.names), f"ParamInfo.names: {self.names!r}"
        assert self.stacked or len(self.names) == (len(self.row_counts) or 1), (
            f"several names need stacked=True or row_counts: {self.names}"
        )
        assert not self.row_counts or (self.sharded_dim is None and not self.stacked), f"{self.names[0]}: row_counts"
        assert self.kind in KINDS, f"ParamInfo.kind {self.kind!r} of {self.names[0]}: one of {KINDS}"
        assert self.init in INITS, f"ParamInfo.init {self.init!r} of {self.names[0]}: one of {INITS}"
        assert 0 <= self.shard_rank < self.shard_count, f"shard {self.shard_rank} of {self.shard_count}"
        assert self.shard_count == 1 or self.sharded_dim is not None, f"{self.names[0]}: shards of which dimension?"
        assert self.parts == 1 or self.sharded_dim is not None, f"{self.names[0]}: parts of an unsharded tensor"
        assert all(len(each) in (0, self.parts) for each in (self.part_sizes, self.part_names)), (
            f"{self.names[0]}: {self.parts} parts"
        )
        assert not self.is_replica or self.tied, f"{self.names[0]}: a replica must be tied"


def part_lengths(info: ParamInfo, length: int) -> list[int]:
    """Return the lengths of the parts along sharded_dim of a full tensor or a shard that has `length` there."""
    sizes = info.part_sizes or (1,) * info.parts
    assert all(size * length % sum(sizes) == 0 for size in sizes), f"{info.names[0]}: {length} in parts like {sizes}"
    return [size * length // sum(sizes) for size in sizes]


def named_slices(info: ParamInfo, x: Tensor) -> list[tuple[str, Tensor]]:
    """Return the named tensors, as views, of a parameter or of what has its shape."""
    slices = x.unbind(0) if info.stacked else x.split(info.row_counts) if info.row_counts else (x,)
    return list(zip(info.names, slices, strict=True))


def named_shapes(info: ParamInfo, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of `named_slices` of a parameter of this shape."""
    rest = tuple(shape[1:])
    if info.row_counts:
        return [(name, (rows, *rest)) for name, rows in zip(info.names, info.row_counts, strict=True)]
    return [(name, rest if info.stacked else tuple(shape)) for name in info.names]


def get_param_info(param: Parameter) -> ParamInfo:
    """Return `param.info`; raise ValueError if there is none."""
    info = getattr(param, "info", None)
    if info is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has no ParamInfo; set `param.info` where it is created"
        )
    if info.stacked and len(info.names) != param.shape[0]:
        raise ValueError(f"{info.names[0]}: {len(info.names)} names for a stack of {param.shape[0]}")
    return info


def set_param_info(param: Parameter, info: ParamInfo) -> None:
    """Set `param.info`."""
    param.info = info  # type: ignore[attr-defined]  # torch's class does not declare it


def freeze_all_but(modules: Iterable[nn.Module], is_trained: Callable[[str], bool]) -> None:
    """Freeze the parameters whose global name is not trained, so that none has a gradient or an optimizer state."""
    for param in (param for module in modules for param in module.parameters()):
        param.requires_grad_(is_trained(get_param_info(param).names[0]))


def is_quantized_param(param: Parameter) -> bool:
    """Return whether the values are in `param.stored_weight` (quantization/stored_weight.py), not in the parameter."""
    return getattr(param, "stored_weight", None) is not None


def replica_group(kind: str, ps: ParallelState) -> Group:
    """Return the data-parallel group of a parameter kind."""
    return ps.edp if kind == "expert" else ps.dp_cp


def is_unique_replica(info: ParamInfo, ps: ParallelState) -> bool:
    """Whether this rank counts a parameter in norms: unsharded and tied ones are counted once per model replica."""
    tp = ps.etp if info.kind == "expert" else ps.tp
    return not info.is_replica and (info.shard_count > 1 or tp.rank == 0)


def is_global_owner(info: ParamInfo, ps: ParallelState) -> bool:
    """Whether this rank is the one of the world that saves its shard of a parameter."""
    return is_unique_replica(info, ps) and replica_group(info.kind, ps).rank == 0


def logical_ndim(param: Parameter) -> int:
    """Return the number of dimensions of one named tensor."""
    return param.dim() - int(get_param_info(param).stacked)


def unique_params(params: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters in order, tied ones once."""
    return list({id(param): param for param in params}.values())

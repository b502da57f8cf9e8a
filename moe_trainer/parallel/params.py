"""What the machinery must know about a parameter: one record on each, `param.info`."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch.nn import Parameter

from moe_trainer.parallel.state import Group, ParallelState

KINDS = ("dense", "expert")
INITS = ("normal", "zeros", "ones", "xavier_uniform", "uniform", "log_uniform")


@dataclass(frozen=True)
class ParamInfo:
    """The single channel between the model wing and the machinery wing.

    names: global Megatron-Core names; one, or (with `stacked`) one per slice of the leading dimension.
    kind: which data-parallel group reduces it: "dense" over dp_cp, "expert" over edp.
    sharded_dim, shard_rank, shard_count: tensor-parallel cut (over tp; over etp for experts); the dimension is that of one
    named (unstacked) tensor. parts: that dimension holds so many equal parts, each of which is cut by itself (a gated fc1 is
    [gate; up]: 2); a rank has its piece of every part, one after the other. part_sizes: of parts that are not equal, in the whole
    tensor. part_names: checkpoints keep every part as a tensor of its own, under the name with this ending (Megatron-Core's
    gated DeltaNet).
    row_blocks: the rows are made of equal runs, and each of these of so many rows of one projection, so many of the next (a fused
    linear_qkv: those of a query group). Whoever treats a matrix as a whole (optim/muon.py) takes every projection by itself.
    is_grad_partial: its gradient is partial over the tensor-parallel group (tp; etp for experts) and must be summed there.
    tied: several pipeline stages hold it; its gradient must be summed over ps.embedding.
    is_replica: an earlier stage owns it: not counted in norms, not written to checkpoints.
    stacked: the leading dimension enumerates `names` (local experts).
    init, init_std: initial distribution; init_std is read by "normal" and "uniform" only. log_uniform: the logarithm of a number
    between 1 and 16 (the decay of a gated DeltaNet head).
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
    init: str = "normal"
    init_std: float = 0.0

    def __post_init__(self):
        assert self.names and all(isinstance(name, str) for name in self.names), f"ParamInfo.names: {self.names!r}"
        assert self.stacked or len(self.names) == 1, f"several names need stacked=True: {self.names}"
        assert self.kind in KINDS, f"ParamInfo.kind {self.kind!r} of {self.names[0]}: one of {KINDS}"
        assert self.init in INITS, f"ParamInfo.init {self.init!r} of {self.names[0]}: one of {INITS}"
        assert 0 <= self.shard_rank < self.shard_count, f"shard {self.shard_rank} of {self.shard_count}"
        assert self.parts == 1 or self.sharded_dim is not None, f"{self.names[0]}: parts of an uncut tensor"
        assert all(len(each) in (0, self.parts) for each in (self.part_sizes, self.part_names)), (
            f"{self.names[0]}: {self.parts} parts"
        )
        assert not self.is_replica or self.tied, f"{self.names[0]}: a copy is tied to its owner"


def part_lengths(info: ParamInfo, length: int) -> list[int]:
    """Lengths of the parts of the cut dimension of a tensor, or of a rank's piece of it, which has so many rows (or columns)."""
    sizes = info.part_sizes or (1,) * info.parts
    assert all(size * length % sum(sizes) == 0 for size in sizes), f"{info.names[0]}: {length} in parts like {sizes}"
    return [size * length // sum(sizes) for size in sizes]


def get_param_info(param: Parameter) -> ParamInfo:
    """Return `param.info`.

    Raises: ValueError when the parameter was built without one.
    """
    info = getattr(param, "info", None)
    if info is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} carries no ParamInfo; set `param.info` where it is created"
        )
    if info.stacked and len(info.names) != param.shape[0]:
        raise ValueError(f"{info.names[0]}: {len(info.names)} names for a stack of {param.shape[0]}")
    return info


def is_fp8_param(param: Parameter) -> bool:
    """Whether the model keeps a parameter in 8 bits (`param.fp8_weight`, quantization/fp8_weight.py), so that the parameter itself has no values."""
    return getattr(param, "fp8_weight", None) is not None


def replica_group(kind: str, ps: ParallelState) -> Group:
    """The group in which a parameter of this kind has its replicas, and which reduces its gradient."""
    return ps.edp if kind == "expert" else ps.dp_cp


def is_unique_replica(info: ParamInfo, ps: ParallelState) -> bool:
    """Whether, of the ranks of one model replica that hold the same values, this is the one that counts for them: the first of its
    tensor-parallel group where the tensor is not cut, the owner where several stages hold it.
    """
    cut = ps.etp if info.kind == "expert" else ps.tp
    return not info.is_replica and (info.shard_count > 1 or cut.rank == 0)


def is_global_owner(info: ParamInfo, ps: ParallelState) -> bool:
    """Whether this rank is the one of the whole world that counts for its piece of a tensor."""
    return is_unique_replica(info, ps) and replica_group(info.kind, ps).rank == 0


def logical_ndim(param: Parameter) -> int:
    """Number of dimensions of one named tensor: a stack of matrices counts as a matrix."""
    return param.dim() - int(get_param_info(param).stacked)


def unique_params(params: Iterable[Parameter]) -> list[Parameter]:
    """The parameters in order, each once (a tied parameter appears in several modules)."""
    seen: set[int] = set()
    kept = []
    for param in params:
        if id(param) not in seen:
            seen.add(id(param))
            kept.append(param)
    return kept

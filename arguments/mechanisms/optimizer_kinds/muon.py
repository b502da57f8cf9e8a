"""Muon: matrices step along the orthogonal factor of their momentum. Its declaration and its flags."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from arguments.mechanisms.optimizer_kinds.adam import record_adam_group
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability, OptimizerDeclaration
from arguments.mechanisms.support import Rejected
from arguments.schema import flag
from arguments.settings import Settings

COEFFICIENTS = ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "cubic5")
"""Those of ops/newton_schulz.py, which this floor does not see."""


def _comparable(s: Settings, has_tensor_ranks: bool) -> tuple[dict[str, object], list[str]]:
    options: dict[str, object] = {"muon_fp32_matmul_prec": "high"}
    notes = []
    if s.muon_fp32_matmul_prec != "high":
        notes.append("--muon-fp32-matmul-prec high: bf16 matmuls amplify the rounding of a gradient")
    if s.muon_tp_mode == "blockwise" and has_tensor_ranks:
        options["muon_tp_mode"] = "duplicated"
        reason = "one process does not orthogonalize tensor-parallel shards separately"
        notes.append(f"{s.shown('muon_tp_mode')}: duplicated instead; {reason}")
    return options, notes


MUON = OptimizerDeclaration(
    key="muon",
    name="Muon",
    states=("momentum_buffer",),
    old_names=("dist_muon",),
    relatives=("soap", "adaptive_muon"),
    updates_matrices=True,
    others_follow="muon_scalar_optimizer",
    others=("adam", "lion"),
    is_layer_wise=True,
    record_group=record_adam_group,
    has_rules=True,
    comparable=_comparable,
    set_again=("muon_fp32_matmul_prec",),
    capabilities=MappingProxyType(
        {
            OptimizerCapability.FSDP: Rejected("as in Megatron-LM: it updates full matrices"),
            OptimizerCapability.EARLY_GATHER: Rejected("it updates full matrices"),
            OptimizerCapability.STATE_FORMATS: Rejected("as in Megatron-LM"),
            OptimizerCapability.HOST_UPDATE: True,
            OptimizerCapability.HOST_UPDATE_8_BITS: True,
            OptimizerCapability.LEGACY_FORMAT: Rejected("the format has the state of adam and sgd only"),
            OptimizerCapability.OTHER_FORMATS: Rejected("as in Megatron-LM"),
        }
    ),
)


@dataclass(frozen=True)
class MuonArgs:
    """Flags of Muon."""

    # ---- muon
    muon_momentum: float = flag(0.9, needs="optimizer=muon", bounds="[0,1)", role="update")
    """Momentum of Muon, from 0 to below 1."""
    muon_nesterov: bool = flag(False, needs="optimizer=muon", role="update")
    """Use Nesterov momentum in Muon."""
    muon_split_qkv: bool = flag(True, off=("--muon-no-split-qkv",), needs="optimizer=muon", role="update")
    """Orthogonalize queries, keys and values separately."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "spectral", needs="optimizer=muon", role="update"
    )
    """Scale of Muon's update as a function of the matrix shape."""
    muon_extra_scale_factor: float = flag(1.0, needs="optimizer=muon", bounds=">0", role="update")
    """Multiply Muon's update by this factor."""
    muon_fp32_matmul_prec: Literal["low", "medium", "high"] = flag("medium", needs="optimizer=muon", role="update")
    """Precision of the GEMMs in Newton-Schulz: high computes in fp32, the others in bf16."""
    muon_coefficient_type: str = flag("quintic", needs="optimizer=muon", role="update")
    """Name of the polynomial of Newton-Schulz."""
    muon_num_ns_steps: int = flag(5, needs="optimizer=muon", bounds=">0", role="update")
    """Number of iterations of Newton-Schulz."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = flag(
        "duplicated", needs="optimizer=muon", role="update"
    )
    """Orthogonalize tensor-parallel matrices shard by shard (blockwise), unsharded on every rank (duplicated), or
    together (distributed)."""
    muon_use_syrk: bool = False
    """Use the symmetric GEMM kernel in Newton-Schulz."""
    muon_scalar_optimizer: Literal["adam", "lion"] = flag("adam", needs="optimizer=muon", role="update")
    """Optimizer of vectors and embeddings with --optimizer muon."""

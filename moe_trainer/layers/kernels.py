"""Which implementation the small operations of a model use: plain torch, or the kernels of --triton-kernels.

The choice is made once, when the model is built, and passed down with the layer factory. Every kernel has the signature
of the torch function it replaces, and tests/ops/test_triton.py compares their results.
"""

import importlib
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from types import MappingProxyType

import torch
from torch import Tensor

from arguments.mechanisms.sublayers import variant_of
from arguments.model import ModelArgs
from moe_trainer.backends import BackendPolicy, import_problem
from moe_trainer.ops import pointwise, rope
from moe_trainer.ops.absorbed_mla import TORCH_TILE_KERNELS, TileKernels
from moe_trainer.ops.attach_loss import Balancing
from moe_trainer.ops.cross_entropy import TORCH_LOGIT_KERNELS, LogitKernels
from moe_trainer.ops.expert_mlp import ActivationFns
from moe_trainer.ops.gated_delta_rule import gated_delta
from moe_trainer.ops.grouped_gemm import GroupedGemms
from moe_trainer.ops.paged_copy import TORCH_PAGE_KERNELS, PageKernels
from moe_trainer.ops.permute import Permutation
from moe_trainer.ops.pointwise import Activation
from moe_trainer.quantization.mxfp8_rowwise import TORCH_ROW_CASTS, RowCasts
from moe_trainer.quantization.quantize import QuantizedTensor, quantize
from moe_trainer.quantization.scaled_grouped import ExpertKernels

logger = logging.getLogger(__name__)

INSTALL = "pip install triton"
MIN_FLA_VERSION = (0, 6)
DELTA_RULE, LARGEST_HEAD = "delta-rule", 256
# name of --triton-kernels -> fields of Kernels, each with the module and the name of its value
_SOURCES: Mapping[str, tuple[tuple[str, str, str], ...]] = MappingProxyType(
    {
        "activation": (("activations", "ops.triton_pointwise", "ACTIVATIONS"),),
        "norm": (("rms_norm", "ops.triton_norm", "rms_norm"),),
        "rope": (("apply_rope", "ops.triton_rope", "apply_rope"),),
        "permute": (("permutation", "ops.triton_permute", "TritonPermutation"),),
        "router": (
            ("fused_topk", "ops.triton_router", "fused_topk"),
            ("balancing", "ops.triton_router", "BALANCING"),
        ),
        "cross-entropy": (("logit_kernels", "ops.triton_cross_entropy", "LOGIT_KERNELS"),),
        "expert-wgrad": (("add_weight_grad", "ops.triton_grouped_gemm", "add_weight_grad"),),
        "grouped-gemm": (
            ("grouped_gemms", "ops.triton_grouped_gemm", "GROUPED_GEMMS"),
            ("add_weight_grad", "ops.triton_grouped_gemm", "add_weight_grad"),
        ),
        "quantize": (
            ("quantize", "quantization.triton_quantize", "quantize_with_fallback"),
            ("row_casts", "quantization.triton_quantize", "ROW_CASTS"),
            ("expert_kernels", "quantization.triton_block_gemm", "EXPERT_KERNELS"),
        ),
        "sparse-attention": (("sparse_attention", "ops.triton_absorbed_mla", "STEPS"),),
        "paged-stash": (("paged_stash", "ops.triton_paged_copy", "PAGE_KERNELS"),),
    }
)
NAMES = tuple(_SOURCES)
# torch's own grouped GEMM is one kernel, too, and was made for each generation of devices
DEFAULT = tuple(name for name in NAMES if name != "grouped-gemm")


@dataclass(frozen=True)
class Kernels:
    """One function per operation; the defaults are torch's.

    Attributes:
        activations: activations that have kernels, each with a function of (x, probs) for dense MLPs, or None, and
            ActivationFns for experts.
        grouped_gemms, permutation, fused_topk, balancing: None for the torch versions.
        expert_kernels: for quantized experts whose counts are on the device; None for the torch versions.
        add_weight_grad: adds weight gradients of all experts to fp32 sums, which torch's grouped GEMM cannot; None for
            torch's GEMM of each expert.
    """

    rms_norm: Callable[..., Tensor] = pointwise.rms_norm
    apply_rope: Callable[..., Tensor] = rope.apply_rope
    logit_kernels: LogitKernels = TORCH_LOGIT_KERNELS
    sparse_attention: TileKernels = TORCH_TILE_KERNELS
    quantize: Callable[..., QuantizedTensor] = quantize
    row_casts: RowCasts = TORCH_ROW_CASTS
    expert_kernels: ExpertKernels | None = None
    paged_stash: PageKernels = TORCH_PAGE_KERNELS
    activations: tuple[tuple[Activation, Callable[..., Tensor] | None, ActivationFns], ...] = ()
    grouped_gemms: GroupedGemms | None = None
    add_weight_grad: Callable[..., None] | None = None
    permutation: Callable[[], Permutation] | None = None
    fused_topk: Callable[..., tuple[Tensor, Tensor]] | None = None
    balancing: Balancing | None = None
    gated_delta: Callable[..., Tensor] = gated_delta

    def dense_activation(self, activation: Activation) -> Callable[..., Tensor]:
        """Return the activation function of a dense MLP."""
        return next(
            (function for kind, function, _ in self.activations if kind == activation and function is not None),
            activation,
        )

    def expert_activation(self, activation: Activation) -> ActivationFns | None:
        """Return the activation functions of the experts; None for the torch versions."""
        return next((activation_fns for kind, _, activation_fns in self.activations if kind == activation), None)


def select_kernels(
    names: Sequence[str], backends: BackendPolicy = BackendPolicy(), unfused: Collection[str] = ()
) -> Kernels:
    """Return the kernels of --triton-kernels; without names, DEFAULT on a CUDA device that has triton.

    Args:
        unfused: names that DEFAULT does without (ModelArgs.unfused_operations).

    Raises:
        MissingBackendError: if they are unavailable and no fallback is allowed.
    """
    if "none" in names or not names and not backends.cuda:
        return Kernels()
    asked = names or [name for name in DEFAULT if name not in unfused]
    wanted = NAMES if "all" in asked else tuple(name for name in NAMES if name in asked)
    if not wanted:
        return Kernels()
    problem, remedy = None, "Use --triton-kernels none"
    if not backends.cuda:
        problem = "the kernels run on CUDA devices, and this rank computes on a CPU"
    elif missing := import_problem("triton"):
        problem, remedy = missing, f"Install it ({INSTALL})"
    found = backends.should_use(
        ("triton_kernels",),
        flag=f"--triton-kernels {' '.join(asked)}",
        problem=problem,
        remedy=remedy,
        instead="plain torch, with the same results",
    )
    if not found:
        return Kernels()
    logger.info("Triton kernels: %s", ", ".join(wanted))
    return Kernels(**{part: value for name in wanted for part, value in _load(name).items()})


def with_delta_rule(
    kernels: Kernels, names: Sequence[str], model: ModelArgs, dtype: torch.dtype, backends: BackendPolicy
) -> Kernels:
    """Add the delta-rule kernels of gated DeltaNet layers: flash-linear-attention's if installed, else ours.

    Args:
        names: --triton-kernels.
        dtype: of activations.

    Raises:
        MissingBackendError: if they were named and are unavailable.
    """
    if (
        "none" in names
        or names
        and not {"all", DELTA_RULE} & set(names)
        or not backends.cuda
        and DELTA_RULE not in names
        or variant_of(model).decays_by_channel  # which have no kernels
    ):
        return kernels
    problem, remedy = None, f"Install it ({INSTALL}), or leave out {DELTA_RULE}"
    if not backends.cuda:
        problem, remedy = "the kernels run on CUDA devices, and this rank computes on a CPU", f"Leave out {DELTA_RULE}"
    elif missing := import_problem("triton"):
        problem = missing
    elif dtype == torch.float64 or max(model.linear_key_head_dim, model.linear_value_head_dim) > LARGEST_HEAD:
        problem, remedy = f"the kernels take heads up to {LARGEST_HEAD} wide, not in fp64", f"Leave out {DELTA_RULE}"
    named = ("triton_kernels",) if DELTA_RULE in names else ()
    if not backends.should_use(
        named,
        flag=f"--triton-kernels {DELTA_RULE}",
        problem=problem,
        remedy=remedy,
        instead="plain torch, with the same results",
    ):
        return kernels
    module = importlib.import_module("moe_trainer.ops.triton_delta_rule")
    if without := import_problem("fla") or _fla_version_problem():
        logger.info("gated DeltaNet: the delta rule of our own Triton kernels (%s)", without)
        return replace(kernels, gated_delta=module.gated_delta)
    logger.info(
        "gated DeltaNet: the delta rule of flash-linear-attention; of packed documents, that of our own Triton kernels"
    )
    return replace(kernels, gated_delta=module.load_fla())


def _fla_version_problem() -> str | None:
    """Return why the installed version is unsuitable: earlier ones need as many key heads as value heads."""
    try:
        version = metadata.version("fla-core")  # which holds its kernels
    except metadata.PackageNotFoundError:
        version = "of no version"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return (
        None
        if numbers >= MIN_FLA_VERSION
        else f"the installed flash-linear-attention {version} is not {'.'.join(map(str, MIN_FLA_VERSION))} or later"
    )


def _load(name: str) -> dict:
    """Return the fields of Kernels for a name of --triton-kernels."""
    return {
        field: getattr(importlib.import_module(f"moe_trainer.{module}"), attribute)
        for field, module, attribute in _SOURCES[name]
    }

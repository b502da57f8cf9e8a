"""Which code the small operations of a model run on: plain torch, or the Triton kernels that --triton-kernels names.

The choice is made once, when the model is built, and handed down with the kit: layers call what they were given. Every kernel has the
signature of the torch function it stands in for, and tests/ops/test_triton.py holds it to the same numbers.
"""

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor

from arguments.model import ModelArgs
from moe_trainer.backends import Backends, import_problem
from moe_trainer.ops import pointwise, rope
from moe_trainer.ops.cross_entropy import PLAIN, LossSteps
from moe_trainer.ops.expert_mlp import Block
from moe_trainer.ops.gated_delta_rule import gated_delta
from moe_trainer.ops.grouped_gemm import GroupedProducts
from moe_trainer.ops.latent_attention import PLAIN as LISTED
from moe_trainer.ops.latent_attention import TileSteps
from moe_trainer.ops.permute import Permutation
from moe_trainer.ops.pointwise import Activation
from moe_trainer.ops.quantize import Quantized, quantize

logger = logging.getLogger(__name__)

INSTALL = "pip install triton"
OLDEST_FLA = (0, 6)
DELTA_RULE, LARGEST_HEAD = "delta-rule", 256
NAMES = ("activation", "norm", "rope", "permute", "router", "cross-entropy", "grouped-gemm", "quantize", "sparse-attention")
# torch's own grouped product is one kernel, too, and was made for each generation of devices
DEFAULT = tuple(name for name in NAMES if name != "grouped-gemm")


class Balancing(NamedTuple):
    """Steps of the balancing losses and what adds their gradient: see ops/triton_router.py."""

    count: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., tuple[Tensor, Tensor]]
    attach: Callable[..., Tensor]


@dataclass(frozen=True)
class Kernels:
    """One function an operation; the defaults are torch's.

    activations: feed-forward activations that have kernels, each with (of x and probs for a dense network, or None; the block functions
    of the experts). products, permutation, fused_topk, balancing: None for the torch versions.
    """

    rms_norm: Callable[..., Tensor] = pointwise.rms_norm
    apply_rope: Callable[..., Tensor] = rope.apply_rope
    loss_steps: LossSteps = PLAIN
    listed: TileSteps = LISTED
    quantize: Callable[..., Quantized] = quantize
    activations: tuple[tuple[Activation, Callable[..., Tensor] | None, Block], ...] = ()
    products: GroupedProducts | None = None
    permutation: Callable[[], Permutation] | None = None
    fused_topk: Callable[..., tuple[Tensor, Tensor]] | None = None
    balancing: Balancing | None = None
    gated_delta: Callable[..., Tensor] = gated_delta

    def dense(self, activation: Activation) -> Callable[..., Tensor]:
        """The activation of a dense feed-forward network."""
        return next((function for kind, function, _ in self.activations if kind == activation and function is not None), activation)

    def block(self, activation: Activation) -> Block | None:
        """The block functions of the experts; None for the torch versions."""
        return next((block for kind, _, block in self.activations if kind == activation), None)


def choose_kernels(names: Sequence[str], backends: Backends = Backends()) -> Kernels:
    """Return the kernels for --triton-kernels; no names: DEFAULT on a CUDA device that has triton.

    Raises: MissingBackend where they cannot be had and may not be done without.
    """
    if "none" in names or not names and not backends.cuda:
        return Kernels()
    asked = names or DEFAULT
    wanted = NAMES if "all" in asked else tuple(name for name in NAMES if name in asked)
    if not wanted:
        return Kernels()
    problem, remedy = None, "Use --triton-kernels none"
    if not backends.cuda:
        problem = "the kernels run on CUDA devices, and this rank computes on a CPU"
    elif missing := import_problem("triton"):
        problem, remedy = missing, f"Install it ({INSTALL})"
    found = backends.use(("triton_kernels",), flag=f"--triton-kernels {' '.join(asked)}", problem=problem, remedy=remedy,
                         instead="plain torch, with the same results")
    if not found:
        return Kernels()
    logger.info("Triton kernels: %s", ", ".join(wanted))
    return Kernels(**{part: value for name in wanted for part, value in _load(name).items()})


def with_delta_rule(kernels: Kernels, names: Sequence[str], model: ModelArgs, dtype: torch.dtype, backends: Backends) -> Kernels:
    """The kernels with those of the delta rule for the layers of a gated DeltaNet: flash-linear-attention's where it is installed, else ours.

    names: --triton-kernels; dtype: of activations. Raises: MissingBackend where they were named and cannot be had.
    """
    if "none" in names or names and not {"all", DELTA_RULE} & set(names) or not backends.cuda and DELTA_RULE not in names:
        return kernels
    problem, remedy = None, f"Install it ({INSTALL}), or leave out {DELTA_RULE}"
    if not backends.cuda:
        problem, remedy = "the kernels run on CUDA devices, and this rank computes on a CPU", f"Leave out {DELTA_RULE}"
    elif missing := import_problem("triton"):
        problem = missing
    elif dtype == torch.float64 or max(model.linear_key_head_dim, model.linear_value_head_dim) > LARGEST_HEAD:
        problem, remedy = f"the kernels take heads up to {LARGEST_HEAD} wide, not in fp64", f"Leave out {DELTA_RULE}"
    named = ("triton_kernels",) if DELTA_RULE in names else ()
    if not backends.use(named, flag=f"--triton-kernels {DELTA_RULE}", problem=problem, remedy=remedy, instead="plain torch, with the same results"):
        return kernels
    module = importlib.import_module("moe_trainer.ops.triton_delta_rule")
    if without := import_problem("fla") or _fla_version_problem():
        logger.info("gated DeltaNet: the delta rule of our own Triton kernels (%s)", without)
        return replace(kernels, gated_delta=module.gated_delta)
    logger.info("gated DeltaNet: the delta rule of flash-linear-attention; of packed documents, that of our own Triton kernels")
    return replace(kernels, gated_delta=module.load_fla())


def _fla_version_problem() -> str | None:
    """Earlier releases take as many key heads as value heads, and some of them do not check it."""
    try:
        version = metadata.version("fla-core")  # which holds its kernels
    except metadata.PackageNotFoundError:
        version = "of no version"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return None if numbers >= OLDEST_FLA else f"the installed flash-linear-attention {version} is not {'.'.join(map(str, OLDEST_FLA))} or later"


def _load(name: str) -> dict:
    """The parts of Kernels that a name stands for."""
    module = importlib.import_module({
        "activation": "moe_trainer.ops.triton_pointwise",
        "norm": "moe_trainer.ops.triton_norm",
        "rope": "moe_trainer.ops.triton_rope",
        "permute": "moe_trainer.ops.triton_permute",
        "router": "moe_trainer.ops.triton_router",
        "cross-entropy": "moe_trainer.ops.triton_cross_entropy",
        "grouped-gemm": "moe_trainer.ops.triton_grouped_gemm",
        "quantize": "moe_trainer.ops.triton_quantize",
        "sparse-attention": "moe_trainer.ops.triton_latent_attention",
    }[name])
    if name == "activation":
        return {"activations": (
            (Activation("silu", gated=True), module.swiglu, Block(module.swiglu_forward, module.swiglu_backward)),
            (Activation("gelu"), None, Block(module.gelu_forward, module.gelu_backward)),
            (Activation("squared_relu"), None, Block(module.squared_relu_forward, module.squared_relu_backward)),
        )}
    if name == "norm":
        return {"rms_norm": module.rms_norm}
    if name == "rope":
        return {"apply_rope": module.apply_rope}
    if name == "cross-entropy":
        return {"loss_steps": LossSteps(module.softmax_in_place, module.gradient_in_place)}
    if name == "quantize":
        return {"quantize": module.quantize_or_define}
    if name == "sparse-attention":
        return {"listed": module.STEPS}
    if name == "permute":
        return {"permutation": module.TritonPermutation}
    if name == "router":
        return {"fused_topk": module.fused_topk, "balancing": Balancing(module.count_choices, module.balancing_gradient, module.attach_gradient)}
    return {"products": GroupedProducts(module.grouped_forward, module.grouped_input_grad, module.grouped_weight_grad)}

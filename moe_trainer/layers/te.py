"""TransformerEngine: loading the package, and its fused kernels for routing and token permutation.

The only file that imports it, and only when asked; `problem` returns why it cannot be used. Layers built on it:
te_layers.py.

Shape letters: T tokens, E experts, R routed tokens (token, expert pairs), H hidden.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from arguments.mechanisms.formats import BY_KEY
from moe_trainer.backends import BackendPolicy
from moe_trainer.ops.permute import Permutation, PermuteMap
from moe_trainer.quantization.fp8_weight import Fp8Weight
from moe_trainer.quantization.quantize import E5M2
from moe_trainer.quantization.recipe import QuantizationRecipe

INSTALL = "pip install --no-build-isolation transformer_engine[pytorch]"
PYTORCH = "transformer_engine.pytorch"


def problem(module: str, *names: str) -> str | None:
    """Return why names of transformer_engine.pytorch.<module> ("": the package) cannot be used; None if they can.

    A package whose parts do not match (its core wheel without the part for torch, wheels of several versions, built for
    another torch or CUDA) fails at import, rarely with ImportError; that is reported too.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer_engine is not installed"
    qualified = f"{PYTORCH}.{module}" if module else PYTORCH
    try:
        found = importlib.import_module(qualified)
    except ModuleNotFoundError as error:
        if error.name is not None and (qualified == error.name or qualified.startswith(f"{error.name}.")):
            return f"the installed transformer_engine has no {error.name}"
        return _broken(error)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return _broken(error)
    missing = [name for name in names if not hasattr(found, name)]
    return f"the installed transformer_engine has no {qualified}.{missing[0]}" if missing else None


def _broken(error: Exception) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"the installed transformer_engine cannot be imported ({type(error).__name__}: {said})"


def should_use_kernels(
    flag: str, dest: str, backends: BackendPolicy, module: str, *names: str, ours: str, limitation: str | None = None
) -> bool:
    """Return whether to use the library's kernels for a flag.

    Args:
        flag: flag as typed.
        dest: its field.
        backends: policy for missing libraries.
        module: the library's module.
        *names: what is needed of it.
        ours: name of our kernel in --triton-kernels.
        limitation: why the kernel cannot be used although it is installed.
    """
    reason: str | None
    if not backends.cuda:
        reason, remedy = "the kernels work on CUDA devices, and this rank computes on a CPU", f"Drop {flag}"
    elif reason := problem(module, *names):
        remedy = f"Install it ({INSTALL}), or use --triton-kernels {ours} instead"
    else:
        reason, remedy = limitation, f"Drop {flag}"
    return backends.should_use(
        (dest,), flag=flag, problem=reason, remedy=remedy, instead="plain torch, with the same results"
    )


def load() -> ModuleType:
    """Import transformer_engine.pytorch; check `problem` first."""
    return importlib.import_module(PYTORCH)


def load_expert_parallel() -> ModuleType:
    """Import transformer_engine.pytorch.ep, NCCL's token exchange; check `problem` first."""
    return importlib.import_module(f"{PYTORCH}.ep")


CUSTOM_ALIGNMENT = 128
"""Multiple of an expert's token count that every quantizer of the library takes."""


def recipe_problem(recipe: QuantizationRecipe) -> str | None:
    """Return why the package or the device cannot run a recipe that the flags allow; None if it can."""
    if recipe.custom is not None and recipe.custom.names_formats():
        return "the factory names formats of this program's own layers"
    kind, available = _find_library_recipe(recipe)
    if missing := problem("", "autocast", available):
        return missing
    if not hasattr(importlib.import_module("transformer_engine.common.recipe"), kind):
        return f"the installed transformer_engine has no transformer_engine.common.recipe.{kind}"
    possible, reason = getattr(load(), available)(return_reason=True)
    return None if possible else reason or f"the device cannot do {recipe.name}"


def autocast(recipe: QuantizationRecipe) -> Callable[[], AbstractContextManager]:
    """Return a factory of contexts in which the library's linears compute by the recipe.

    Only recipes without state, so that entering per layer, and again in recomputation, changes nothing. Check
    `recipe_problem` first.
    """
    return functools.partial(load().autocast, enabled=True, recipe=_made(recipe))


def _find_library_recipe(recipe: QuantizationRecipe) -> tuple[str, str]:
    """Return the library's class of a recipe, and its question whether the device can do it."""
    found = BY_KEY[recipe.name].library
    assert found is not None, recipe.name
    return found


def _made(recipe: QuantizationRecipe) -> object:
    """Build the library's recipe."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    made = getattr(recipes, _find_library_recipe(recipe)[0])
    if recipe.custom is not None:
        return made(qfactory=recipe.custom.factory)
    if len(BY_KEY[recipe.name].flags.values) == 1:
        return made()
    return made(fp8_format=recipes.Format.HYBRID if recipe.grad.fmt == E5M2 else recipes.Format.E4M3)


def weight_tensors(weight: Fp8Weight, dtype: torch.dtype, with_transpose: bool) -> list[Tensor]:
    """Return the matrices of a weight that is stored in fp8 as the library's tensors, which share its bytes.

    Args:
        dtype: what they present themselves as.
        with_transpose: make the transposed copy that a device needs for the gradient of the input.
    """
    library = load()
    kind, device = library.DType.kFloat8E4M3, weight.codes.device
    common = {"fp8_dtype": kind, "dtype": dtype, "requires_grad": False, "device": device}
    if weight.scaling.per_tensor:
        quantizer = library.Float8CurrentScalingQuantizer(kind, device=device, rowwise=True, columnwise=with_transpose)
    else:
        quantizer = library.Float8BlockQuantizer(kind, rowwise=True, columnwise=with_transpose, block_scaling_dim=2)
    made = []
    for index, codes in enumerate(weight.codes):
        options = {**common, "shape": codes.shape, "quantizer": quantizer}
        if weight.scaling.per_tensor:
            inverse = weight.inverse_e[index : index + 1]
            tensor = library.Float8Tensor(data=codes, fp8_scale_inv=inverse, **options)
        else:
            inverse = weight.inverse_e[index]
            rows, columns = quantizer.get_scale_shape(codes.shape, False)
            inverse = F.pad(inverse, (0, columns - inverse.shape[1], 0, rows - inverse.shape[0]))
            tensor = library.Float8BlockwiseQTensor(
                rowwise_data=codes,
                rowwise_scale_inv=inverse,
                columnwise_data=None,
                columnwise_scale_inv=None,
                is_2D_scaled=True,
                **options,
            )
        tensor.update_usage(rowwise_usage=True, columnwise_usage=with_transpose)
        made.append(tensor)
    return made


def pad_multiple(recipe: QuantizationRecipe) -> int:
    """Return the multiple of an expert's token count that the library needs to quantize; ours if it has none.

    Check `recipe_problem` first.
    """
    if recipe.custom is not None:
        return CUSTOM_ALIGNMENT
    name = "get_align_size_for_quantization"
    if problem("quantization", name):
        return recipe.alignment
    return getattr(importlib.import_module(f"{PYTORCH}.quantization"), name)(_made(recipe))


def initialize_userbuffers(
    shape: tuple[int, int],
    tp_size: int,
    dtype: torch.dtype,
    *,
    quantized: bool,
    unquantized: bool,
    config: Mapping[str, object],
    backend: str,
) -> None:
    """Allocate the buffers through which the library's linears overlap tensor-parallel communication. Collective.

    The library has one set for each process, made once.

    Args:
        shape: (tokens of a microbatch, hidden size) before tensor parallelism.
        quantized, unquantized: whether there are linears with and without quantized operands.
        config: settings by GEMM.
        backend: of torch.distributed, to exchange the buffers' addresses.
    """
    base = importlib.import_module(f"{PYTORCH}.module.base")
    modes = base.UserBufferQuantizationMode
    base.initialize_ub(
        list(shape),
        tp_size,
        quantization_modes=[mode for mode, used in ((modes.FP8, quantized), (modes.NONE, unquantized)) if used],
        dtype=dtype,
        ub_cfgs=dict(config),
        bootstrap_backend=backend,
    )


@dataclass(frozen=True)
class FusedMap:
    """The library's permutation map, with token counts per expert on the device."""

    row_id_map: Tensor
    counts_E: Tensor
    shape: torch.Size


class FusedPermutation(Permutation):
    """Permutation by one kernel for tokens and probabilities, and one for the inverse."""

    NAMES = ("moe_permute_with_probs", "moe_unpermute")
    takes_order = False

    def __init__(self) -> None:
        self.library = importlib.import_module("transformer_engine.pytorch.permutation")

    def permute(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, num_rows: int | None = None
    ) -> tuple[Tensor, Tensor, FusedMap | PermuteMap]:
        """Permute like Permutation.permute. Reads the number of rows on the host if it is not given."""
        counts_E = routing_TE.sum(0)
        num_rows = int(counts_E.sum()) if num_rows is None else num_rows
        if num_rows == 0:
            return super().permute(x_TH, probs_TE, routing_TE)
        x_RH, probs_R, row_id_map = self.library.moe_permute_with_probs(x_TH, probs_TE, routing_TE, num_rows)
        return x_RH, probs_R, FusedMap(row_id_map, counts_E, x_TH.shape)

    def unpermute(self, y_RH: Tensor, routes: FusedMap | PermuteMap) -> Tensor:
        """Unpermute like Permutation.unpermute."""
        if isinstance(routes, PermuteMap):
            return super().unpermute(y_RH, routes)
        return self.library.moe_unpermute(y_RH, routes.row_id_map, restore_shape=routes.shape)


FUSED_TOPK = "fused_topk_with_score_function"


def fused_topk() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the kernel that scores and selects experts.

    Its arguments: (logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias);
    its results: probs_TE, routing_TE.
    """
    return getattr(importlib.import_module("transformer_engine.pytorch.router"), FUSED_TOPK)

"""Quantization recipes: how each operand of the three GEMMs of a linear layer is quantized (gemms.py)."""

from dataclasses import dataclass
from typing import Any

from arguments.mechanisms.formats import BY_KEY, QUANTIZED
from moe_trainer.declared_module import load_module
from moe_trainer.quantization.quantize import E4M3, E5M2, NumberFormat, Scaling
from moe_trainer.quantization.stored_weight import StoredWeight


@dataclass(frozen=True)
class DelayedScaling:
    """Options of delayed scaling.

    Args:
        margin: powers of two of headroom.
        history: number of past iterations.
        largest: use the largest amax of the history instead of the most recent one.
    """

    margin: int = 0
    history: int = 1
    largest: bool = False


@dataclass(frozen=True)
class QuantizationRecipe:
    """How each operand of each GEMM is quantized.

    Args:
        x, weight: operands of the output.
        grad, weight_t: operands of the input gradient.
        grad_t, x_t: operands of the weight gradient, which is in high precision without `wgrad`.
        alignment: token counts are padded to a multiple of it.
        custom: chooses the recipe of every linear (custom_recipe.py: CustomRecipe); this one stands for them all.
        weight_class: how weights are stored in the format.
    """

    name: str
    x: Scaling
    weight: Scaling
    grad: Scaling
    weight_t: Scaling
    grad_t: Scaling
    x_t: Scaling
    wgrad: bool = True
    delayed: DelayedScaling | None = None
    alignment: int = 16
    custom: Any = None
    weight_class: type[StoredWeight] | None = None


@dataclass(frozen=True)
class RecipeOptions:
    """What flags say of a format, as far as it has a choice.

    Args:
        grad: format of gradients.
        wgrad: weight gradients are quantized.
    """

    grad: NumberFormat = E4M3
    wgrad: bool = True
    delayed: DelayedScaling = DelayedScaling()


def make_recipe(
    name: str, *, hybrid: bool = False, wgrad: bool = True, delayed: DelayedScaling = DelayedScaling()
) -> QuantizationRecipe:
    """Make the recipe of a format by its key (arguments/mechanisms/formats.py), which is also its module's name.

    Args:
        hybrid: gradients are E5M2, if they have 8 bits.

    Raises:
        ValueError: for another name.
    """
    keys = [each.key for each in QUANTIZED if not each.is_custom]
    if name not in keys:
        raise ValueError(f"no recipe {name!r}: {', '.join(keys[:-1])} or {keys[-1]}")
    return load_module(BY_KEY[name]).make_recipe(RecipeOptions(E5M2 if hybrid else E4M3, wgrad, delayed))

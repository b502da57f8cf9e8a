"""Quantization recipes: how each operand of the three GEMMs of a linear layer is quantized (gemms.py)."""

from dataclasses import dataclass
from typing import Any

from moe_trainer.quantization.quantize import E2M1, E4M3, E5M2, POWER_OF_TWO, TWO_LEVEL, Scaling


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


def make_recipe(
    name: str, *, hybrid: bool = False, wgrad: bool = True, delayed: DelayedScaling = DelayedScaling()
) -> QuantizationRecipe:
    """Make the recipe `delayed`, `tensorwise`, `blockwise`, `mxfp8` or `nvfp4`.

    Args:
        hybrid: gradients are E5M2.

    Raises:
        ValueError: for another name.
    """
    grad = E5M2 if hybrid else E4M3
    if name in ("delayed", "tensorwise"):
        one, two = Scaling(E4M3), Scaling(grad)
        return QuantizationRecipe(name, one, one, two, one, two, one, wgrad, delayed if name == "delayed" else None)
    if name == "blockwise":
        row, square = Scaling(E4M3, 1, 128, POWER_OF_TWO), Scaling(E4M3, 128, 128, POWER_OF_TWO)
        grads = Scaling(grad, 1, 128, POWER_OF_TWO)
        return QuantizationRecipe(name, row, square, grads, square, grads, row, wgrad)
    if name == "mxfp8":
        row, grads = Scaling(E4M3, 1, 32, POWER_OF_TWO), Scaling(grad, 1, 32, POWER_OF_TWO)
        return QuantizationRecipe(name, row, row, grads, row, grads, row, wgrad, alignment=32)
    if name == "nvfp4":
        row, square = Scaling(E2M1, 1, 16, TWO_LEVEL), Scaling(E2M1, 16, 16, TWO_LEVEL)
        grads = Scaling(E2M1, 1, 16, TWO_LEVEL, stochastic=True)
        grads_t = Scaling(E2M1, 1, 16, TWO_LEVEL, stochastic=True, hadamard=True)
        return QuantizationRecipe(
            name,
            row,
            square,
            grads,
            square,
            grads_t,
            Scaling(E2M1, 1, 16, TWO_LEVEL, hadamard=True),
            wgrad,
            alignment=32,
        )
    raise ValueError(f"no recipe {name!r}: delayed, tensorwise, blockwise, mxfp8 or nvfp4")

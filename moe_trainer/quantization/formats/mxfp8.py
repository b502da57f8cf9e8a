"""MXFP8: 8 bits and a scale for 32 elements along the contracted dimension."""

from moe_trainer.quantization.mx_weight import MxWeight
from moe_trainer.quantization.quantize import E4M3, POWER_OF_TWO, Scaling
from moe_trainer.quantization.recipe import QuantizationRecipe, RecipeOptions


def make_recipe(options: RecipeOptions) -> QuantizationRecipe:
    """Return the recipe; scales are powers of two."""
    row, grads = Scaling(E4M3, 1, 32, POWER_OF_TWO), Scaling(options.grad, 1, 32, POWER_OF_TWO)
    return QuantizationRecipe(
        "mxfp8", row, row, grads, row, grads, row, options.wgrad, alignment=32, weight_class=MxWeight
    )

"""8 bits and a scale for 128 elements of a row, of weights for 128 x 128."""

from moe_trainer.quantization.fp8_weight import Fp8Weight
from moe_trainer.quantization.quantize import E4M3, POWER_OF_TWO, Scaling
from moe_trainer.quantization.recipe import QuantizationRecipe, RecipeOptions


def make_recipe(options: RecipeOptions) -> QuantizationRecipe:
    """Return the recipe; scales are powers of two."""
    row, square = Scaling(E4M3, 1, 128, POWER_OF_TWO), Scaling(E4M3, 128, 128, POWER_OF_TWO)
    grads = Scaling(options.grad, 1, 128, POWER_OF_TWO)
    return QuantizationRecipe(
        "blockwise", row, square, grads, square, grads, row, options.wgrad, weight_class=Fp8Weight
    )

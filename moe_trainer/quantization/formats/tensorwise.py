"""8 bits and one scale for a tensor."""

from moe_trainer.quantization.fp8_weight import Fp8Weight
from moe_trainer.quantization.quantize import E4M3, Scaling
from moe_trainer.quantization.recipe import QuantizationRecipe, RecipeOptions


def make_recipe(options: RecipeOptions) -> QuantizationRecipe:
    """Return the recipe; gradients may have fewer digits and a wider range."""
    one, two = Scaling(E4M3), Scaling(options.grad)
    return QuantizationRecipe("tensorwise", one, one, two, one, two, one, options.wgrad, weight_class=Fp8Weight)

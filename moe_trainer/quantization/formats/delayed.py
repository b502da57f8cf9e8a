"""8 bits and one scale for a tensor, from the largest values of earlier iterations."""

from dataclasses import replace

from moe_trainer.quantization.formats import tensorwise
from moe_trainer.quantization.recipe import QuantizationRecipe, RecipeOptions


def make_recipe(options: RecipeOptions) -> QuantizationRecipe:
    """Return the tensorwise recipe with scales that are known before the values."""
    return replace(tensorwise.make_recipe(options), name="delayed", delayed=options.delayed)

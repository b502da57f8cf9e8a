"""Recipes that a function of the user chooses tensor by tensor (--fp8-recipe custom).

The function is what Transformer Engine's CustomRecipe takes: it gets a role with `module_type` ("linear" or
"grouped_linear"), `tensor_type` ("input", "weight" or "grad_output") and `name`. One that returns the name of a format
works with this program's layers, one that returns Transformer Engine's quantizers with that library's (layers/te.py).

    def factory(role):
        if role.name.endswith("linear_fc2"):
            return "high_precision"
        return "blockwise" if role.tensor_type == "weight" else "mxfp8"

Names are those of checkpoints, decoder.layers.7.mlp.experts.linear_fc1: layers count over all pipeline stages, and all
experts of a layer share a name. Operands of a GEMM in different formats are multiplied by definition, in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from arguments.mechanisms.formats import NAMED_BY_LAYER, TOKEN_MULTIPLE
from moe_trainer.errors import UserError
from moe_trainer.quantization.recipe import QuantizationRecipe, make_recipe
from moe_trainer.user_function import import_function

FORMATS = tuple(each.key for each in NAMED_BY_LAYER)
HIGH_PRECISION = "high_precision"
TENSOR_TYPES = ("input", "weight", "grad_output")
ALIGNMENT = TOKEN_MULTIPLE
"""Token counts of experts are padded to it."""

SOME_LINEAR = "decoder.layers.0.self_attention.linear_proj"
"""Name for a question to the factory: one that a model has, since factories take names apart."""

Factory = Callable[[Any], Any]


class QuantizerFactoryError(UserError):
    """The function cannot be imported, or returns what these layers cannot use."""


@dataclass(frozen=True)
class TensorRole:
    """A tensor that needs a format; the fields of Transformer Engine's QuantizerRole."""

    module_type: str
    tensor_type: str
    name: str


@dataclass(frozen=True)
class CustomRecipe:
    """A user's factory and the flag that names it.

    Args:
        hybrid: gradients in fp8 formats are E5M2.
        wgrad: weight gradients are quantized.
    """

    flag: str
    factory: Factory
    hybrid: bool
    wgrad: bool

    @staticmethod
    def load(flag: str, path: str, hybrid: bool, wgrad: bool) -> "CustomRecipe":
        """Import the function at `package.module.function` or `package.module:function`.

        Raises:
            QuantizerFactoryError: if there is no such function.
        """
        where = f"{flag} {path}"
        return CustomRecipe(where, import_function(where, path, QuantizerFactoryError), hybrid, wgrad)

    def names_formats(self) -> bool:
        """Return whether the factory returns names of formats, as this program's layers need."""
        return isinstance(self._call(TensorRole("linear", "weight", SOME_LINEAR)), str)

    def recipe(self, name: str, is_expert: bool) -> QuantizationRecipe | None:
        """Return the recipe of a linear; None for high precision.

        Raises:
            QuantizerFactoryError: if the factory fails or returns something else than a format.
        """
        kind = "grouped_linear" if is_expert else "linear"
        chosen = [self._format(TensorRole(kind, tensor, name)) for tensor in TENSOR_TYPES]
        if HIGH_PRECISION in chosen:
            if set(chosen) != {HIGH_PRECISION}:
                raise QuantizerFactoryError(
                    f"{self.flag}: {name} has {', '.join(map(' '.join, zip(TENSOR_TYPES, chosen)))}; a linear in "
                    f"{HIGH_PRECISION} needs it for all three tensors"
                )
            return None
        x, weight, grad = (self._make(fmt) for fmt in chosen)
        grad_t, x_t = grad.grad_t, x.x_t
        if not (grad_t.hadamard and x_t.hadamard):  # a transform of one operand alone would change the result
            grad_t, x_t = replace(grad_t, hadamard=False), replace(x_t, hadamard=False)
        return QuantizationRecipe(
            "custom",
            x.x,
            weight.weight,
            grad.grad,
            weight.weight_t,
            grad_t,
            x_t,
            self.wgrad,
            alignment=ALIGNMENT,
        )

    def _make(self, fmt: str) -> QuantizationRecipe:
        return make_recipe(fmt, hybrid=self.hybrid, wgrad=self.wgrad)

    def _format(self, role: TensorRole) -> str:
        found = self._call(role)
        if isinstance(found, str) and found in (*FORMATS, HIGH_PRECISION):
            return found
        shown = repr(found) if isinstance(found, str) else f"a {type(found).__name__}"
        raise QuantizerFactoryError(
            f"{self.flag}: {shown} for {role.tensor_type} of {role.name}; these layers take "
            f"{', '.join(FORMATS)} or {HIGH_PRECISION}, and quantizers need TransformerEngine's layers"
        )

    def _call(self, role: TensorRole) -> Any:
        try:
            return self.factory(role)
        except (Exception, SystemExit) as error:  # it is the user's code
            raise QuantizerFactoryError(f"{self.flag}: failed for {role} ({type(error).__name__}: {error})") from error

    def representative(self) -> QuantizationRecipe:
        """Return a recipe that stands for all of the factory's where only name and alignment count."""
        return replace(self._make("mxfp8"), name="custom", alignment=ALIGNMENT, custom=self)

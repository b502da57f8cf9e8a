"""--spec: a function of the user's replaces constructors of layers."""

from collections.abc import Callable, Sequence
from typing import Any

from arguments import Arguments
from moe_trainer.errors import UserError
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.user_function import import_function


def import_spec(spec: Sequence[str]) -> Callable[..., Any]:
    """Import the function that --spec names, as `apply_spec` takes it.

    Raises:
        UserError: if there is no such function.
    """
    return import_function(f"--spec {' '.join(spec)}", ":".join(spec))


def apply_spec(spec: Sequence[str], factory: LayerFactory, args: Arguments) -> LayerFactory:
    """Return what the function that --spec names makes of the layer factory.

    Args:
        spec: "package.module:function", or module and function as two words.

    Raises:
        UserError: if there is no such function, or it does not take two arguments or not return a LayerFactory.
    """
    where, function = f"--spec {' '.join(spec)}", import_spec(spec)
    try:
        result = function(factory, args)
    except Exception as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # in the user's code
        raise UserError(
            f"{where}: the function must take the LayerFactory and the Arguments ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(result, LayerFactory):
        raise UserError(
            f"{where}: the function must return the LayerFactory that it was given, or a changed copy "
            f"(dataclasses.replace), and returned {type(result).__name__}"
        )
    return result

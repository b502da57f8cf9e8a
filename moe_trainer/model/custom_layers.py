"""--spec: a function of the user's replaces constructors of layers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from arguments import Arguments
from moe_trainer.errors import UserError
from moe_trainer.layers.layer_factory import LayerFactory


def apply_spec(spec: Sequence[str], factory: LayerFactory, args: Arguments) -> LayerFactory:
    """Return what the function that --spec names makes of the layer factory.

    The module is imported as Python finds it, or from the current directory.

    Args:
        spec: "package.module:function", or module and function as two words.

    Raises:
        UserError: if there is no such function, or it does not return a LayerFactory.
    """
    text = " ".join(spec)
    module_name, _, function_name = ":".join(spec).partition(":")
    folder = os.getcwd()
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # one that the user's module imports
        raise UserError(
            f"--spec {text}: {error}; a module is needed that Python finds from the current directory or PYTHONPATH"
        ) from error
    finally:
        if is_new:
            sys.path.remove(folder)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"--spec {text}: {module.__file__} has no function {function_name}")
    result = function(factory, args)
    if not isinstance(result, LayerFactory):
        raise UserError(
            f"--spec {text}: the function must return the LayerFactory that it was given, or a changed copy "
            f"(dataclasses.replace), and returned {type(result).__name__}"
        )
    return result

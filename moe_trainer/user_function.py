"""Import a function of the user that a flag names by its Python path."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from moe_trainer.errors import UserError


def import_function(where: str, path: str, error_class: type[UserError] = UserError) -> Callable[..., Any]:
    """Import the function at `package.module.function` or `package.module:function`.

    Its module is imported as Python finds it, or from the current directory.

    Args:
        where: the flag and its value, for messages.

    Raises:
        UserError: if there is no such function.
    """
    if not re.fullmatch(r"(\w+[.:])+\w+", path):
        raise error_class(f"{where}: needs the form package.module.function")
    module, _, name = path.replace(":", ".").rpartition(".")
    folder = os.getcwd()
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # the module is the user's code, and may be a script
        raise error_class(f"{where}: module {module} cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        if is_new:
            sys.path.remove(folder)
    if not callable(found):
        raise error_class(f"{where}: module {module} has no function {name}")
    return found

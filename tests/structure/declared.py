"""The classes and modules of a package, to be compared with declarations, and declarations that are not complete."""

import importlib
import inspect
import pkgutil
from dataclasses import replace
from enum import Enum
from types import ModuleType
from typing import Any


def classes_of(package: ModuleType) -> set[type]:
    """Return the classes that the modules of a package have, imported ones included."""
    modules = [
        importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
    ]
    return {each for module in modules for each in vars(module).values() if inspect.isclass(each)}


def leave_out(declaration: Any, capability: Enum) -> None:
    """Make a declaration again without what it says of a capability, which is an error."""
    replace(
        declaration,
        capabilities={each: said for each, said in declaration.capabilities.items() if each is not capability},
    )

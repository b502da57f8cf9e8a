"""The module of a declared mechanism: what computes it, under the key of the declaration."""

import importlib
from typing import Any

from arguments.mechanisms.support import Mechanism


def load_module(mechanism: Mechanism[Any]) -> Any:
    """Import the module of a mechanism.

    It has the name of the key, so that a mechanism is registered by its declaration only.
    """
    return importlib.import_module(f"{mechanism.modules}.{mechanism.key}")

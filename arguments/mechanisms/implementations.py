"""Implementations of the layers: this program's own or a library's; one declaration each.

An implementation is selected by --transformer-impl; `get_implementation` is the only place that reads it. A
declaration, in implementation_kinds/, states for every `ImplementationCapability` that it acts, that the flags that
demand it are rejected and why, or that they have no effect and why. moe_trainer/layers/layer_factory.py makes the
layers.
"""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from arguments.mechanisms.implementation_kinds.declaration import (
    IMPLEMENTATION,
    ImplementationCapability,
    ImplementationDeclaration,
)
from arguments.mechanisms.implementation_kinds.local import LOCAL_LAYERS
from arguments.mechanisms.implementation_kinds.transformer_engine import TRANSFORMER_ENGINE
from arguments.mechanisms.support import Rejected, keys_with
from arguments.settings import Settings, Violation

IMPLEMENTATIONS: tuple[ImplementationDeclaration, ...] = (
    LOCAL_LAYERS,
    TRANSFORMER_ENGINE,
)
OTHER = ImplementationDeclaration(
    key="other",
    name="other implementations of Megatron-LM",
    capabilities=MappingProxyType(dict.fromkeys(ImplementationCapability, Rejected("it is not supported"))),
)
"""What is said of a value of --transformer-impl that this program rejects, in a command line or a checkpoint."""
UNBUILT = ("inference_optimized",)
"""Values of --transformer-impl that Megatron-LM has and this program rejects."""
NAMES = tuple(each.key for each in IMPLEMENTATIONS) + UNBUILT
"""Values of --transformer-impl."""


def find_implementation(name: Any) -> ImplementationDeclaration:
    """Return the implementation of a value of --transformer-impl, `OTHER` if this program has none."""
    return next((each for each in IMPLEMENTATIONS if each.key == name), OTHER)


def get_implementation(precision: Any) -> ImplementationDeclaration:
    """Return the implementation that the flags ask for, which acts where its package and a CUDA device are.

    Args:
        precision: has the fields of PrecisionArgs.
    """
    return find_implementation(precision.transformer_impl)


def selecting(capability: ImplementationCapability) -> dict[str, str]:
    """Return the value by destination that selects an implementation with which flags that demand a capability act."""
    return next(each.selected_by for each in IMPLEMENTATIONS if each.supports(capability))


def needs_support(capability: ImplementationCapability) -> str:
    """Return the condition, as arguments/needs.py reads it, without which flags that demand a capability do not act."""
    return " or ".join(f"{IMPLEMENTATION}={key}" for key in keys_with(IMPLEMENTATIONS, capability))


def check_support(s: Settings, dest: str, capability: ImplementationCapability) -> Iterator[Violation]:
    """Report a flag, which is set, that demands what the implementation of the layers rejects."""
    if get_implementation(s).rejects(capability):
        accepted = " or ".join(keys_with(IMPLEMENTATIONS, capability))
        yield s.violation(
            "{} needs {transformer_impl:flag} {accepted}, not {transformer_impl:value}.", dest, accepted=accepted
        )

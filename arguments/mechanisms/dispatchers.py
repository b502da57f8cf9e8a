"""Token dispatchers: one declaration each, of everything that other code asks of them.

A dispatcher is selected by --moe-token-dispatcher-type and, if that is flex, --moe-flex-dispatcher-backend; with one
expert rank `LOCAL` runs whatever is selected. `get_dispatcher` is the only place that reads the two flags. Its module
is moe_trainer/moe/dispatch/<key>.py, with `make_dispatcher` and a class whose `declaration` it is.

A declaration, in dispatcher_kinds/, states for every `DispatcherCapability` that it acts, that the flags that
demand it are rejected and why, or that they have no effect and why. Its `traffic` is what the estimate sends over which
link.
"""

from types import MappingProxyType
from typing import Any

from arguments.mechanisms.dispatcher_kinds.allgather import ALLGATHER
from arguments.mechanisms.dispatcher_kinds.alltoall import ALLTOALL
from arguments.mechanisms.dispatcher_kinds.declaration import (
    BACKEND,
    FLEX,
    TYPE,
    DispatcherCapability,
    DispatcherDeclaration,
)
from arguments.mechanisms.dispatcher_kinds.deepep import DEEPEP
from arguments.mechanisms.dispatcher_kinds.hierarchical import HIERARCHICAL
from arguments.mechanisms.dispatcher_kinds.hybridep import HYBRIDEP
from arguments.mechanisms.dispatcher_kinds.local import LOCAL
from arguments.mechanisms.dispatcher_kinds.ncclep import NCCLEP
from arguments.mechanisms.support import keys_with

SELECTING_FLAGS = (TYPE, BACKEND, "moe_enable_deepep")
"""Destinations of the flags that select a dispatcher, the deprecated one included."""

DISPATCHERS: tuple[DispatcherDeclaration, ...] = (
    LOCAL,
    ALLGATHER,
    ALLTOALL,
    DEEPEP,
    HYBRIDEP,
    NCCLEP,
    HIERARCHICAL,
)
SELECTABLE = tuple(dispatcher for dispatcher in DISPATCHERS if dispatcher.type is not None)
"""Those that flags select."""
TYPES = tuple(dict.fromkeys(str(dispatcher.type) for dispatcher in SELECTABLE))
BACKENDS = MappingProxyType(
    {dispatcher.backend: dispatcher for dispatcher in SELECTABLE if dispatcher.backend is not None}
)
OLD_NAMES = MappingProxyType({(each.dest, old): each.key for each in SELECTABLE for old in each.old_names})
"""(destination, old value) -> its new name."""

_BY_TYPE = MappingProxyType({each.type: each for each in SELECTABLE if each.backend is None})


def find_dispatcher(kind: str, backend: str | None = None) -> DispatcherDeclaration:
    """Return the dispatcher of a value of --moe-token-dispatcher-type and, for flex, --moe-flex-dispatcher-backend."""
    return BACKENDS[backend] if kind == FLEX and backend is not None else _BY_TYPE[kind]


def get_dispatcher(moe: Any) -> DispatcherDeclaration:
    """Return the dispatcher that the flags select, which runs if there is more than one expert rank.

    Args:
        moe: has the fields of MoEArgs.
    """
    return find_dispatcher(moe.moe_token_dispatcher_type, moe.moe_flex_dispatcher_backend)


def types_with(capability: DispatcherCapability) -> tuple[str, ...]:
    """Return the values of --moe-token-dispatcher-type with which no flag that demands a capability is rejected."""
    return tuple(dict.fromkeys(str(each.type) for each in SELECTABLE if not each.rejects(capability)))


def backends_with(capability: DispatcherCapability) -> tuple[str, ...]:
    """Return the values of --moe-flex-dispatcher-backend with which flags that demand a capability act."""
    return keys_with(BACKENDS.values(), capability)

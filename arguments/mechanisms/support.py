"""Whether a mechanism has what a flag demands, and why not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar


@dataclass(frozen=True)
class Rejected:
    """Why flags that demand a capability are rejected; `kind` is that of the violation (settings.KINDS)."""

    reason: str
    kind: Literal["rule", "later"] = "rule"


@dataclass(frozen=True)
class NoEffect:
    """Why flags that demand a capability are accepted and have no effect."""

    reason: str


FOR_WHO_ASKS = Rejected("")
"""Rejected for the reason that the declaration has which asks for the capability."""
Support = Literal[True] | Rejected | NoEffect
C = TypeVar("C", bound=Enum)
M = TypeVar("M", bound="Mechanism[Any]")


class Mechanism(Generic[C]):
    """What declarations of all kinds of mechanisms have.

    Attributes:
        modules: package of the modules of its kind.
        key: unlike that of all others of the kind; name of its module.
        name: name in messages and in the manual.
        mention: the flag that asks for it, with its value, as a template of Settings.violation.
        dest: destination of the flag that asks for it, alone or with a value; None if none does.
        capabilities: for each whether it acts, or why not.
        asked_by: the capability of others that flags demand when they ask for it, which is then up to both.
        asked_because: why they demand it, which is the reason of a mechanism that rejects it FOR_WHO_ASKS.
    """

    modules: ClassVar[str]
    key: str
    name: str
    mention: str
    dest: str | None = None
    capabilities: Mapping[C, Support]
    asked_by: C | None = None
    asked_because: str = ""

    def check_declares_all(self, capabilities: type[C]) -> None:
        """Check that it says of every capability whether it acts.

        Raises:
            TypeError: it leaves some out.
        """
        if missing := [each.name for each in capabilities if each not in self.capabilities]:
            raise TypeError(f"the declaration of {self.name} leaves out {', '.join(missing)}")

    def supports(self, capability: C) -> bool:
        """Return whether flags that demand a capability act."""
        return self.capabilities[capability] is True

    def rejects(self, capability: C) -> bool:
        return isinstance(self.capabilities[capability], Rejected)

    def ignores(self, capability: C) -> bool:
        """Return whether flags that demand a capability are accepted and have no effect."""
        return isinstance(self.capabilities[capability], NoEffect)

    def reason(self, capability: C) -> str:
        """Return why a capability does not act; "" if it does."""
        support = self.capabilities[capability]
        return "" if support is True else support.reason


def rejecting(mechanisms: Iterable[M], capability: Enum) -> tuple[tuple[M, Rejected], ...]:
    """Return the mechanisms with which flags that demand a capability are rejected, and why."""
    found = ((each, each.capabilities[capability]) for each in mechanisms)
    return tuple((each, support) for each, support in found if isinstance(support, Rejected))


def rejected_flags(mechanisms: Iterable[Mechanism[C]], capability: C) -> tuple[tuple[str, str], ...]:
    """Return destinations of flags that ask for a mechanism which rejects a capability, each reason of a flag once."""
    found = rejecting(mechanisms, capability)
    return tuple(dict.fromkeys((each.dest, rejected.reason) for each, rejected in found if each.dest is not None))


def keys_with(mechanisms: Iterable[Mechanism[C]], capability: C) -> tuple[str, ...]:
    """Return the keys of the mechanisms with which flags that demand a capability act."""
    return tuple(each.key for each in mechanisms if each.supports(capability))


def keys_rejecting(mechanisms: Iterable[Mechanism[C]], capability: C) -> tuple[str, ...]:
    """Return the keys of the mechanisms with which flags that demand a capability are rejected."""
    return tuple(each.key for each in mechanisms if each.rejects(capability))


def reason_among(mechanisms: Sequence[Mechanism[C]], mechanism: Mechanism[C], capability: C) -> str:
    """Return why a capability does not act with a mechanism, whichever of two declarations says so; "" if it does."""
    support = support_among(mechanisms, mechanism, capability)
    return "" if support is True else support.reason


def support_among(mechanisms: Sequence[Mechanism[C]], mechanism: Mechanism[C], capability: C) -> Support:
    """Return what a mechanism says of a capability, or what the one that it asks for says of the mechanism."""
    own = mechanism.capabilities[capability]
    other = next((each for each in mechanisms if each.asked_by is capability), mechanism)
    if own is FOR_WHO_ASKS:
        return Rejected(other.asked_because)
    if own is True and mechanism.asked_by is not None and other.rejects(mechanism.asked_by):
        return other.capabilities[mechanism.asked_by]
    return own

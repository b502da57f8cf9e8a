"""Whether a mechanism has what a flag demands, and why not."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Literal


@dataclass(frozen=True)
class Rejected:
    """Why flags that demand a capability are rejected; `kind` is that of the violation (settings.KINDS)."""

    reason: str
    kind: Literal["rule", "later"] = "rule"


@dataclass(frozen=True)
class NoEffect:
    """Why flags that demand a capability are accepted and have no effect."""

    reason: str


Support = Literal[True] | Rejected | NoEffect


def check_declares_all(owner: str, capabilities: type[Enum], declared: Collection[Enum]) -> None:
    """Check that a declaration says of every capability whether it acts.

    Raises:
        TypeError: it leaves some out.
    """
    if missing := [each.name for each in capabilities if each not in declared]:
        raise TypeError(f"the declaration of the {owner} leaves out {', '.join(missing)}")

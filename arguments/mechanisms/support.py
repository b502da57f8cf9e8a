"""Whether a mechanism has what a flag demands, and why not."""

from dataclasses import dataclass
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

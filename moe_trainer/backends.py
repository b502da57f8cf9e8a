"""Optional libraries: use the one that was asked for, fall back, or stop. One decision for all choosers."""

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import Literal

from moe_trainer.errors import InputError

logger = logging.getLogger(__name__)


class MissingBackend(InputError):
    """A library that was asked for cannot be used here, and nobody allowed to do without it."""


def import_problem(name: str) -> str | None:
    """What stands in the way of importing a package, which is imported; None if nothing does.

    One that is built against another torch or CUDA fails as it is imported, rarely with ImportError.
    """
    try:
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    except ValueError:  # it is loaded, and was found in some other way
        return None
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        return f"the installed {name} cannot be imported ({type(error).__name__}: {said})"
    return None


@dataclass(frozen=True)
class Backends:
    """What --on-missing-backend says, and what its default depends on.

    on_missing: None stands for "error" where this rank has a CUDA device and the user typed the backend's flag, and for
    "fallback" everywhere else: Megatron's own defaults and ranks on a CPU never stop a run.
    typed: destinations of the flags on the command line. cuda: whether this rank computes on a CUDA device. capability: of that device.
    missing: gathers what stops the run until `check`, so that all of it is told at once; None: the first one raises.
    """

    on_missing: Literal["error", "fallback"] | None = None
    typed: frozenset[str] = frozenset()
    cuda: bool = False
    missing: list[str] | None = None
    capability: tuple[int, int] = (0, 0)

    def use(self, dests: tuple[str, ...], *, flag: str, problem: str | None, remedy: str, instead: str, loud: bool = False) -> bool:
        """Whether to use a backend. Called once per model and backend: a fallback is one line in the log, loud: a warning.

        dests: destinations of the flags that ask for it. flag: as the user would write it. problem: what stands in the way
        ("the package deep_ep is not installed"), None if nothing does. remedy: what to do about it, with the install line.
        instead: what runs if it cannot be used.
        Raises: MissingBackend, unless these are gathered.
        """
        if problem is None:
            return True
        stop = self.cuda and not self.typed.isdisjoint(dests) if self.on_missing is None else self.on_missing == "error"
        if stop:
            text = f"{flag}: {problem}. {remedy}, or add --on-missing-backend fallback to use {instead}."
            if self.missing is None:
                raise MissingBackend(text)
            self.missing.append(text)
            return False
        logger.log(logging.WARNING if loud else logging.INFO, "%s: %s; using %s", flag, problem, instead)
        return False

    def check(self) -> None:
        """Stop if anything was gathered that stops the run.

        Raises: MissingBackend naming all of it.
        """
        if self.missing:
            raise MissingBackend("\n  ".join(self.missing))

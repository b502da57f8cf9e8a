"""Policy for optional libraries: use the requested one, fall back, or stop."""

import ctypes
import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import Literal

from moe_trainer.errors import UserError

logger = logging.getLogger(__name__)


class MissingBackendError(UserError):
    """A requested library cannot be used, and --on-missing-backend does not allow a fallback."""


def import_problem(name: str) -> str | None:
    """Import a package and return why it cannot be imported; None if it can.

    A package built against another version of torch or CUDA fails during the import, rarely with ImportError.
    """
    try:
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    except ValueError:  # loaded already, without a module spec
        return None
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        return f"the installed {name} cannot be imported ({type(error).__name__}: {reason})"
    return None


def nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL library that this process uses; None if there is none, or it cannot be found.

    torch.cuda.nccl.version() is that of the headers with which torch was compiled; another library may be loaded.
    """
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def nccl_problem(minimum: tuple[int, int, int]) -> str | None:
    """Return why the NCCL library is too old; None if it is not, or its version is not known."""
    version = nccl_version()
    if version is None or version >= minimum:
        return None
    found, needed = (".".join(map(str, numbers)) for numbers in (version, minimum))
    return f"the library needs NCCL {needed} or later, and this process has {found} (libnccl.so.2)"


@dataclass(frozen=True)
class BackendPolicy:
    """Whether a missing optional library is an error (--on-missing-backend), and what the default depends on.

    Attributes:
        on_missing: None means "error" if this rank has a CUDA device and the user typed the backend's flag, and
            "fallback" otherwise: Megatron's own defaults and CPU ranks never stop a run.
        typed: destinations of the flags on the command line.
        cuda: whether this rank computes on a CUDA device.
        missing: collects the errors until `check`, so that all of them are reported at once; None: the first one
            raises.
        capability: compute capability of the CUDA device.
    """

    on_missing: Literal["error", "fallback"] | None = None
    typed: frozenset[str] = frozenset()
    cuda: bool = False
    missing: list[str] | None = None
    capability: tuple[int, int] = (0, 0)

    def should_use(
        self, dests: tuple[str, ...], *, flag: str, problem: str | None, remedy: str, instead: str, loud: bool = False
    ) -> bool:
        """Return whether to use a backend, and log a fallback. Called once per model and backend.

        Args:
            dests: destinations of the flags that request the backend.
            flag: the flag as the user would write it.
            problem: why the backend cannot be used ("the package deep_ep is not installed"); None if it can.
            remedy: what to do about it, including the install command.
            instead: what runs as the fallback.
            loud: log the fallback as a warning.

        Raises:
            MissingBackendError: if the policy is "error" and errors are not collected in `missing`.
        """
        if problem is None:
            return True
        stop = self.cuda and not self.typed.isdisjoint(dests) if self.on_missing is None else self.on_missing == "error"
        if stop:
            text = f"{flag}: {problem}. {remedy}, or add --on-missing-backend fallback to use {instead}."
            if self.missing is None:
                raise MissingBackendError(text)
            self.missing.append(text)
            return False
        logger.log(logging.WARNING if loud else logging.INFO, "%s: %s; using %s", flag, problem, instead)
        return False

    def check(self) -> None:
        """Raise the collected errors, if any.

        Raises:
            MissingBackendError: naming every backend that is missing.
        """
        if self.missing:
            raise MissingBackendError("\n  ".join(self.missing))

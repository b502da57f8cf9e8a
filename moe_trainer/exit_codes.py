"""Exit codes of the program and its scripts. `arguments/`, which imports nothing of this package, returns USER_ERROR as 2."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a process ended."""

    OK = 0
    FAILED = 1
    """An error of the program, a rejected result with --rerun-mode disabled, or something that was compared differs."""
    USER_ERROR = 2
    """Flags, files or folders that the user can correct; a message says which."""
    COMMUNICATION_FAILED = 3
    """Another rank ended or is stuck."""
    DOES_NOT_FIT = 3
    """Of --dry-run, which meets no other rank: the plan needs more memory than a device has."""
    RESUME_ELSEWHERE = 16
    """A rejected result: resume on other machines to tell whether the model, the data or a machine is to blame."""
    RESULT_NOT_VALID = 17
    """A rejected result that the model or the data made."""
    RESTART = 75
    """Saved, and to be started again: EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """Ctrl-C."""

"""Exit codes of the program and its scripts. `arguments/`, which imports none of this package, returns 2."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes. Two programs may use one value for different outcomes: a second name is an alias of the first."""

    OK = 0
    FAILED = 1
    """An internal error, a rejected result with --rerun-mode disabled, or a comparison that found differences."""
    USER_ERROR = 2
    """A flag, file or directory that the user can correct; a message names it."""
    COMMUNICATION_FAILED = 3
    """Another rank exited or is stuck."""
    DOES_NOT_FIT = 3
    """Only with --dry-run: the plan needs more memory than a device has."""
    FILES_LEFT_TO_WRITE = 3
    """Only scripts/convert.py: other ranks have files left to write."""
    RESUME_ELSEWHERE = 16
    """A rejected result; resuming on other nodes shows whether the hardware caused it. Same code as in Megatron-LM."""
    RESULT_NOT_VALID = 17
    """A rejected result caused by the model or the data, or without an attribution. Same code as in Megatron-LM."""
    RESTART = 75
    """A checkpoint was saved and the same command continues from it. EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """Ctrl-C."""
    READER_LEFT = 141
    """Whatever read the output has ended, as in `| head`. 128 + SIGPIPE, as of other programs."""

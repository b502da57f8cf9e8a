"""The error that a user can mend: flags, files, folders. The command line turns it into exit code 2 without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Something given to the program is wrong; the message says what, where, and what is needed."""


@contextmanager
def user_input(what: str) -> Iterator[None]:
    """Turn a ValueError or OSError of the enclosed step, which reads what the user gave, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise InputError(f"{what}: {error}") from error

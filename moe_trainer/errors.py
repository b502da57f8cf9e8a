"""The error that a user can mend: flags, files, folders, packages. The command line turns it into exit code 2 without a traceback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class InputError(ValueError):
    """Something given to the program is wrong; the message says what, where, and what is needed.

    told: whether another rank prints the same words; None where the ranks had not met yet.
    """

    told: bool | None = None


def need_packages(*names: str) -> None:
    """Raises: InputError naming the packages that this Python cannot import. To be asked before the first import of one of them."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InputError(f"{sys.executable} has no {', '.join(missing)}: use the environment that scripts/quickstart.sh makes "
                         "(. .venv/bin/activate), or pip install -e . (scripts/doctor.py tells what is there)")


@contextmanager
def user_input(what: str) -> Iterator[None]:
    """Turn a ValueError or OSError of the enclosed step, which reads what the user gave, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise InputError(f"{what}: {error}") from error


@contextmanager
def told_once(count: Callable[[str], int] | None) -> Iterator[None]:
    """Of the ranks that raise the same InputError let the first one print it. count: the how many-th rank says these words; None
    with one rank. Where nobody answers any more every rank prints."""
    try:
        yield
    except InputError as error:
        try:
            error.told = count is not None and count(str(error)) > 1
        except RuntimeError:  # the store went with its host
            error.told = False
        raise

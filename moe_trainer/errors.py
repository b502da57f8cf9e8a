"""User errors: wrong flags, files or directories, missing packages. The CLI exits with code 2, without a traceback."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


class UserError(ValueError):
    """An error that the user can correct. The message says what is wrong, where, and what is needed.

    Attributes:
        reported_elsewhere: whether another rank prints the same message; None if the ranks have not connected yet.
    """

    reported_elsewhere: bool | None = None


def require_packages(*names: str) -> None:
    """Check that packages are installed, without importing them.

    Raises:
        UserError: naming the missing packages.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{sys.executable} has no {', '.join(missing)}: use the environment that scripts/quickstart.sh makes "
            "(. .venv/bin/activate), or pip install -e . (scripts/doctor.py, or `moe-trainer doctor` once it is "
            "installed, lists what there is)"
        )


@contextmanager
def as_user_error(context: str) -> Iterator[None]:
    """Turn a ValueError or OSError of the block into a UserError whose message starts with `context`."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"{context}: {error}") from error


@contextmanager
def name_write_errors(flag: str, target: str | Path | None) -> Iterator[None]:
    """Turn an OSError of the block, such as a full disk, into a UserError that names the flag and the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag}: cannot write {target}: {error.strerror or error}") from error


@contextmanager
def report_once_per_job(count: Callable[[str], int] | None) -> Iterator[None]:
    """Mark a UserError that another rank has already reported, so that the job prints it once.

    If the rendezvous store is unreachable, every rank prints the error.

    Args:
        count: returns how many ranks, this one included, have raised an error with this message; None with one rank.
    """
    try:
        yield
    except UserError as error:
        try:
            error.reported_elsewhere = count is not None and count(str(error)) > 1
        except RuntimeError:  # the store went down with its host
            error.reported_elsewhere = False
        raise

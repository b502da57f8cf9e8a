"""Paths on the command lines of all programs: local ones, as the shell has expanded them."""

import re
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_UNEXPANDED = re.compile(r"~|.*\$[A-Za-z_{(]", re.DOTALL)


def find_path_problem(text: str, *, may_be_url: bool = False, may_have_variables: bool = False) -> str | None:
    """Return why a text is no local path (a folder of that name would be made silently), or None."""
    if not may_be_url and _URL.match(text):
        return "this is a URL, and a local path is needed"
    if not may_have_variables and _UNEXPANDED.match(text):
        return "the shell has not expanded ~ or a variable in it (single quotes prevent that, and = before ~)"
    return None


def local_prefix(text: str) -> str:
    """Return the beginning of local paths as it stands, as the `type` of an argparse option.

    Raises:
        ArgumentTypeError: for an empty text, a URL, and ~ and variables that are not expanded.
    """
    problem = find_path_problem(text) if text else "the value is empty (an unset variable?)"
    if problem is not None:
        from argparse import ArgumentTypeError  # (only now: the trainer's command line needs no argparse)

        raise ArgumentTypeError(f"{text or repr(text)}: {problem}")
    return text


def local_path(text: str) -> Path:
    """Read a local path, as `local_prefix` does."""
    return Path(local_prefix(text))

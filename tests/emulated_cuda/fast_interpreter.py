"""Triton's interpreter replaces the functions of triton.language at every launch, and at every call of one function of a kernel by another:
some milliseconds a time. `patch_once` has it do so once for each function of this process."""

from collections.abc import Callable
from types import SimpleNamespace

from triton.runtime import interpreter


def patch_once() -> None:
    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function: Callable) -> SimpleNamespace:
        if function not in patched:
            patch(function)
            patched.add(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang

"""Let Triton's interpreter replace the functions of triton.language once per function and process.

It does so at every launch, and at every call of one function of a kernel by another, which takes some milliseconds.
"""

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

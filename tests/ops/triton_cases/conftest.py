"""Patches of Triton's interpreter. Collected without Triton, too, where there is nothing to patch."""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from emulated_cuda import bf16_gemms, fast_interpreter, kernel_addresses

    bf16_gemms.correct()
    fast_interpreter.patch_once()
    kernel_addresses.check()

"""Patches of Triton's interpreter. Collected without Triton, too, where there is nothing to patch."""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from emulated_cuda import bf16_gemms, device_maxima, fast_interpreter, kernel_addresses

    bf16_gemms.correct()
    device_maxima.use()
    fast_interpreter.patch_once()
    kernel_addresses.check()

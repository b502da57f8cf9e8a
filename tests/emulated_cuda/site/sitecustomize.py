"""Give every Python process that finds this on its path emulated devices, where EMULATED_CUDA says how many."""

import os
import sys

if os.environ.get("EMULATED_CUDA"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import emulation
    import operators
    import process_groups

    major, minor = os.environ.get("EMULATED_CUDA_CAPABILITY", "9.0").split(".")
    device = emulation.start(int(os.environ["EMULATED_CUDA"]), (int(major), int(minor)))
    operators.register(device)
    process_groups.use_gloo()
    if os.environ.get("EMULATED_CUDA_RACES") == "1":
        device.watch(True)  # so that errors name source lines
        device.lib.ec_check_races(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton_kernels

        triton_kernels.use_interpreter(device)

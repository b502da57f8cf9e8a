"""Give every Python process that finds this on its path emulated devices, where EMULATED_CUDA says how many."""

import os
import sys

if os.environ.get("EMULATED_CUDA"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import emulation
    import operators
    import process_groups

    major, minor = os.environ.get("EMULATED_CUDA_CAPABILITY", "9.0").split(".")
    operators.register(emulation.start(int(os.environ["EMULATED_CUDA"]), (int(major), int(minor))))
    process_groups.use_gloo()

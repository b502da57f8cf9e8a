"""Give every Python process that finds this on its path emulated devices, as many as EMULATED_CUDA sets."""

import os
import re
import sys

if os.environ.get("EMULATED_CUDA"):
    count, capability, library = (
        os.environ.get(name, "") for name in ("EMULATED_CUDA", "EMULATED_CUDA_CAPABILITY", "EMULATED_CUDA_LIBRARY")
    )
    capability = capability or "9.0"
    problem = None
    if not count.isdecimal() or not 1 <= int(count) <= 8:
        problem = f"EMULATED_CUDA={count}: a number of devices from 1 to 8 is needed"
    elif not re.fullmatch(r"\d+\.\d", capability):
        problem = f"EMULATED_CUDA_CAPABILITY={capability}: a compute capability such as 9.0 is needed"
    elif not os.path.isfile(library):
        problem = f"EMULATED_CUDA_LIBRARY={library}: no such file; python tests/emulated_cuda/build.py makes it and prints its name"
    if problem:  # Python would continue after an error, without devices
        print(problem, file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import emulation
    import operators
    import process_groups

    device = emulation.start(int(count), tuple(map(int, capability.split("."))))
    operators.register(device)
    process_groups.use_gloo()
    if os.environ.get("EMULATED_CUDA_RACES") == "1":
        device.watch(True)  # so that errors name source lines
        device.lib.ec_check_races(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton_kernels

        triton_kernels.use_interpreter(device)

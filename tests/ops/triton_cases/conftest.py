from emulated_cuda import bf16_gemms, fast_interpreter, kernel_addresses

bf16_gemms.correct()
fast_interpreter.patch_once()
kernel_addresses.check()

from emulated_cuda import bf16_products, fast_interpreter, kernel_addresses

bf16_products.correct()
fast_interpreter.patch_once()
kernel_addresses.check()

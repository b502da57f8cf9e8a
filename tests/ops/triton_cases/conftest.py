from emulated_cuda import bf16_products, fast_interpreter

bf16_products.correct()
fast_interpreter.patch_once()

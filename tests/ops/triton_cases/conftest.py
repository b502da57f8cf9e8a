from emulated_cuda import bf16_products

bf16_products.correct()

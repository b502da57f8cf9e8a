"""Compile every Triton kernel, in the variants that runs use, for a GPU that is not here.

Run by tests/ops/test_triton.py.

A variant is a list of arguments: "*bf16" a pointer, "i32" and "fp32" numbers, anything in Const(...) a constant.
"""

import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

HALF, FP32, INT, I32, LONG, BYTES, E4M3 = "*bf16", "*fp32", "i32", "*i32", "*i64", "*u8", "*fp8e4nv"


class Const(NamedTuple):
    """A compile-time constant."""

    value: object


def blocks():
    for partial, out in ((FP32, HALF), (FP32, FP32), ("*fp64", "*fp64")):
        yield "sum_partials_kernel", [partial, out, INT, INT, Const(32), Const(32)]


def pointwise():
    for kind, weighed in (("swiglu", True), ("gelu", True), ("squared_relu", False)):
        probs = FP32 if weighed else Const(None)
        yield "forward_kernel", [HALF, probs, HALF, INT, INT, Const(kind), Const(1024)]
        yield "backward_kernel", [HALF, probs, HALF, HALF, HALF, probs, INT, INT, INT, Const(kind), Const(2048)]


def norm():
    for data, rows, block in ((HALF, 1, 4096), (HALF, 32, 128), ("*fp64", 4, 1024)):
        kept = "*fp64" if data == "*fp64" else FP32
        rest = [Const(False), Const(rows), Const(block)]
        yield "forward_kernel", [data, data, data, kept, INT, INT, INT, "fp32", *rest]
        yield "backward_kernel", [data, data, data, kept, data, kept, INT, INT, INT, INT, *rest]


def rope():
    for interleaved, partial in ((True, True), (False, False)):
        yield (
            "rotate_kernel",
            [HALF, FP32, FP32, HALF, *[INT] * 9, Const(interleaved), Const(partial), Const(16), Const(32), Const(256)],
        )


def permute():
    tile = [Const(128), Const(64)]
    yield "count_kernel", [BYTES, I32, *[INT] * 4, *tile], {"num_warps": 8}
    yield "earlier_kernel", [I32, I32, LONG, INT, INT, Const(64), Const(16)]
    yield "place_kernel", [BYTES, I32, LONG, I32, I32, I32, I32, BYTES, *[INT] * 5, *tile], {"num_warps": 8}
    for probs in (FP32, Const(None)):
        yield "gather_kernel", [HALF, I32, probs, I32, HALF, probs, INT, INT, Const(2048)]
        yield "sum_kernel", [HALF, I32, I32, I32, probs, HALF, probs, INT, INT, INT, Const(2048), Const(256)]


def paged_copy():
    yield "allocate_kernel", [BYTES, LONG, LONG, I32, INT, INT, INT, Const(4096)], {"num_warps": 8}
    for host in (BYTES, Const(None)):
        yield "copy_out_kernel", [BYTES, BYTES, host, LONG, INT, INT, INT, "i64", Const(8192)]
        yield "copy_back_kernel", [BYTES, BYTES, host, LONG, LONG, *[INT] * 4, "i64", INT, Const(8192)]


def router():
    deepseek = {
        "bias": FP32,
        "groups": [Const(8), Const(32), Const(4), Const(2)],
        "tile": [Const(8), Const(256)],
        "k": Const(8),
    }
    mixtral = {
        "bias": Const(None),
        "groups": [Const(1), Const(8), Const(0), Const(2)],
        "tile": [Const(256), Const(8)],
        "k": Const(2),
    }
    for size, score, pre in (
        (deepseek, "sigmoid", False),
        (mixtral, "softmax", False),
        (mixtral, "softmax", True),
        (mixtral, "sqrtsoftplus", False),
    ):
        how = [size["k"], Const(score), Const(pre)]
        yield (
            "choose_kernel",
            [FP32, size["bias"], FP32, BYTES, *[INT] * 3, "fp32", *how, *size["groups"], *size["tile"]],
        )
        yield "backward_kernel", [FP32, FP32, BYTES, FP32, *[INT] * 4, "fp32", *how, *size["tile"]]
        yield "count_kernel", [FP32, FP32, INT, INT, *how[:2], *size["tile"]]
        yield (
            "gradient_kernel",
            [*[FP32] * 7, *[INT] * 3, *["fp32"] * 8, how[1], Const(True), *size["tile"]],
        )
    for scale in (FP32, Const(None)):
        yield "attach_kernel", [HALF, FP32, scale, HALF, INT, "fp32", Const(1024)]


def cross_entropy():
    for data in (HALF, FP32):
        yield "pieces_kernel", [data, LONG, FP32, FP32, FP32, INT, INT, Const(4096)]
        yield "softmax_kernel", [data, LONG, FP32, FP32, INT, INT, "fp32", Const(4096)]
        for mine in (BYTES, Const(None)):
            yield "gradient_kernel", [data, LONG, FP32, FP32, mine, INT, INT, "fp32", Const(2048)]


def grouped_gemm():
    for data, sizes, (warps, stages), precision in (
        (HALF, (128, 128, 64), (8, 3), "ieee"),
        (FP32, (64, 64, 32), (4, 2), "ieee"),
        (FP32, (64, 64, 32), (4, 2), "tf32"),
    ):
        options = {"num_warps": warps, "num_stages": stages}
        one, other, depth = (Const(size) for size in sizes)
        # strides of 1 are constants, as they are at a launch: column by column for the forward, row by row for the gradient
        for strides in ([Const(1), INT], [INT, Const(1)]):
            yield (
                "rows_kernel",
                [data, data, data, "*i32", *[INT] * 6, *strides, INT, Const(precision), one, other, depth, Const(64)],
                options,
            )
        for total, beta in ((data, Const(None)), (FP32, "fp32")):
            yield (
                "weight_kernel",
                [data, data, total, "*i32", *[INT] * 4, "fp32", beta, Const(precision), depth, one, other],
                options,
            )


def quantize():
    fmt = Const((448.0, 3, 2.0**-6))
    for power, square, rows, columns, warps in (
        (True, False, 32, 128, 4),
        (False, True, 128, 128, 16),
        (True, False, 128, 32, 4),
    ):
        yield (
            "block_kernel",
            [HALF, BYTES, FP32, *[INT] * 4, fmt, Const(power), Const(square), Const(rows), Const(columns)],
            {"num_warps": warps},
        )
    for block, columns, warps in ((128, 128, 16), (32, 64, 8)):
        tile = [Const(block), Const(128), Const(columns)]
        yield (
            "both_kernel",
            [HALF, BYTES, FP32, BYTES, FP32, *[INT] * 4, fmt, Const(True), *tile],
            {"num_warps": warps},
        )
    yield "scale_kernel", [HALF, BYTES, FP32, *[INT] * 4, fmt, Const(8), Const(512)]
    yield "amax_kernel", [HALF, FP32, *[INT] * 4, Const(8), Const(512)]
    yield "e8m0_kernel", [HALF, BYTES, BYTES, *[INT] * 6, fmt, Const(128), Const(32)], {"num_warps": 4}
    for scales, e8m0 in ((BYTES, True), (FP32, False)):
        tile = [Const(e8m0), Const(False), Const(128), Const(32)]
        yield "dequantize_kernel", [BYTES, scales, HALF, *[INT] * 4, fmt, *tile], {"num_warps": 4}


def block_gemm():
    options, sizes = {"num_warps": 8, "num_stages": 3}, [Const(128), Const(128)]
    yield (
        "block_rows_kernel",
        [E4M3, E4M3, HALF, FP32, FP32, I32, *[INT] * 4, Const(128), Const(8)],
        options,
    )
    yield "block_weight_kernel", [E4M3, E4M3, HALF, FP32, FP32, I32, *[INT] * 3, *sizes], options


def latent_attention():
    for data, keys, precision in ((HALF, 32, "ieee"), (FP32, 16, "ieee")):
        tile = [Const(precision), Const(keys), Const(512), Const(64)]
        options = {"num_warps": 8, "num_stages": 1}
        yield "forward_kernel", [data, data, I32, data, FP32, *[INT] * 4, "fp32", *tile], options
        yield "query_kernel", [data, data, I32, data, FP32, FP32, data, data, *[INT] * 6, "fp32", *tile], options
        yield "key_kernel", [data, data, I32, data, FP32, FP32, FP32, *[INT] * 6, "fp32", *tile], options


def delta_rule():
    for documents in (False, True):
        ids = I32 if documents else Const(None)
        yield "convolve_kernel", [HALF, HALF, ids, HALF, *[INT] * 4, Const(4)]
        yield "gradient_kernel", [HALF, HALF, ids, HALF, HALF, FP32, *[INT] * 6, Const(4)], {"num_warps": 8}


def delta_chunks():
    """Heads of Qwen3-Next, and the widest; in fp32 the kernels that take most."""
    numbers, eight = [INT] * 4, {"num_warps": 8}
    for data, width in ((HALF, 128), (HALF, 256), (FP32, 128)):
        size = [Const("tf32x3"), Const(width), Const(width)]
        walk = {} if (data, width) == (HALF, 128) else {"num_stages": 2, **eight}
        yield "states_kernel", [data, FP32, *[data] * 4, *numbers, *size, Const(width), Const(32)], walk
        yield "grad_states_kernel", [data, FP32, *[data] * 4, *numbers, *size, Const(width), Const(32)], walk
        yield (
            "chunk_kernel",
            [*[data] * 5, FP32, *[data] * 11, *[FP32] * 4, data, *numbers, *[INT] * 4, *size, Const(64), Const(32)],
            eight,
        )
        if data == FP32:
            continue
        for ids, inverse in ((I32, Const(None)), (Const(None), data)):
            kept = [FP32, inverse, data, data]
            yield "prepare_kernel", [*[data] * 5, ids, *kept, *numbers, *[INT] * 4, *size, Const(64)], eight
        yield "outputs_kernel", [data, FP32, *[data] * 3, *numbers, *size, Const(64)]
        yield "scores_kernel", [data, FP32, *[data] * 4, FP32, *numbers, *size, Const(64)]
        yield "keys_kernel", [data, FP32, FP32, FP32, *[data] * 3, INT, *numbers, *size, Const(width)], eight


MODULES = (
    blocks,
    pointwise,
    norm,
    rope,
    permute,
    paged_copy,
    router,
    cross_entropy,
    grouped_gemm,
    quantize,
    block_gemm,
    latent_attention,
    delta_rule,
    delta_chunks,
)


def of_ones(arguments: list) -> list:
    """The same with every size and stride 1: a launch makes constants of those, which is other code to the compiler."""
    return [Const(1) if argument == INT else argument for argument in arguments]


def make_source(kernel, arguments: list) -> ASTSource:
    names = list(inspect.signature(kernel.fn).parameters)
    assert len(names) == len(arguments), (kernel.fn.__name__, names, arguments)
    signature, constants, attributes = {}, {}, {}
    for place, (name, argument) in enumerate(zip(names, arguments, strict=True)):
        if isinstance(argument, Const):
            signature[name], constants[name] = "constexpr", argument.value
        else:
            signature[name] = argument
            # what a launch finds out about its arguments: aligned pointers and sizes
            if argument != "fp32" and not argument.startswith("f"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def lower(source: ASTSource, target: GPUTarget) -> None:
    """Run Triton's frontend only: in it a constant has other methods than a value; the backend sees no difference."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({})
    functions = backend.get_codegen_implementation(options)
    assert source.make_ir(target, options, functions, backend.get_module_map(), context).verify()


def resources(made) -> dict[str, int]:
    """Of a compiled kernel.

    Bytes of shared memory, registers of a thread, bytes of its stack (where registers are spilled to).
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        output = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", output).group(1)) for name in ("REG", "STACK"))
    return {"shared": made.metadata.shared, "warps": made.metadata.num_warps, "registers": registers, "stack": stack}


def main(capability: int) -> None:
    """Print the resources of every kernel, as JSON."""
    # the recorded names are older than the modules' names
    modules = {
        "quantize": "moe_trainer.quantization.triton_quantize",
        "block_gemm": "moe_trainer.quantization.triton_block_gemm",
        "latent_attention": "moe_trainer.ops.triton_absorbed_mla",
    }
    found, target = {}, GPUTarget("cuda", capability, 32)
    for make in MODULES:
        if capability == 103 and make is delta_chunks:  # half of the time; the PTX is that of sm_100
            continue
        module = importlib.import_module(modules.get(make.__name__, f"moe_trainer.ops.triton_{make.__name__}"))
        known = {name for name in vars(module) if name.endswith("_kernel")}
        used = set()
        for name, arguments, *options in make():
            if capability != 90 and name in used and make is not grouped_gemm:
                continue  # one variant of each determines whether the backend takes the kernel
            kernel = getattr(module, name)
            made = triton.compile(make_source(kernel, arguments), target, options[0] if options else {})
            assert made.asm["cubin"], name
            if name not in used and capability == 90:
                lower(make_source(kernel, of_ones(arguments)), target)
            used.add(name)
            key = f"{make.__name__} {name} {arguments[0]}"
            number = sum(other.startswith(key) for other in found)
            units = [unit for unit in ("wgmma", "tcgen05", "mma.sync") if unit in made.asm["ptx"]]
            found[f"{key} {number}"] = resources(made) | ({"tensor cores": units[0]} if units else {})
        assert used == known, (make.__name__, known ^ used)
    assert not torch.cuda.is_initialized()
    sys.stdout.write(json.dumps({"triton": triton.__version__, "kernels": found}))

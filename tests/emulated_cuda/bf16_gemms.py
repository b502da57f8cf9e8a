"""Triton's interpreter stores bf16 as 16-bit integers and multiplies those: `correct` makes it multiply the values."""

from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder


def correct() -> None:
    create_dot = InterpreterBuilder.create_dot

    def create(builder, a, b, *rest):
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(builder, a, b, *rest)

    InterpreterBuilder.create_dot = create

"""Triton's interpreter finds maxima by numpy, in which NaN is the largest; `use` makes it find them as devices do.

There tl.maximum and tl.minimum return the other number, and tl.argmax and tl.argmin compare pairs, which NaN always loses
or wins by its place. Before, a kernel that loses NaN on devices only passed every test.
"""

import numpy as np
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps


def use() -> None:
    min_max = ReduceOps.min_max

    def with_index(ops: ReduceOps, x, val_reduce_op, idx_reduce_op=None):
        data = (x[0] if isinstance(x, tuple) else x).handle.data
        if idx_reduce_op is None or data.dtype.kind != "f" or not np.isnan(data).any():
            return min_max(ops, x, val_reduce_op, idx_reduce_op)
        is_better = np.greater if idx_reduce_op is np.argmax else np.less
        first, *others = np.moveaxis(data, ops.axis, 0)
        best, place = first, np.zeros(first.shape, np.int32)
        for number, other in enumerate(others, 1):  # as the combination of triton/language/standard.py
            stays = is_better(best, other) | (best == other)
            best, place = np.where(stays, best, other), np.where(stays, place, np.int32(number))
        if ops.keep_dims:
            best, place = (np.expand_dims(each, ops.axis) for each in (best, place))
        return ops.to_tensor(best, x.dtype), ops.to_tensor(place, tl.int32)

    ReduceOps.min_max = with_index
    InterpreterBuilder.create_maxnumf = lambda builder, a, b: builder.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda builder, a, b: builder.binary_op(a, b, np.fmin)

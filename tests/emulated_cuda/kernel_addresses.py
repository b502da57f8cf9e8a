"""`check` makes Triton's interpreter refuse addresses outside the tensors given to the launch."""

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def check() -> None:
    """From now on a load or store of elements that are not masked must stay inside the storage of one of the launch's tensors."""
    init, load, store = (
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )
    launched, storages = "", []

    def init_args(executor: GridExecutor, args: tuple, kwargs: dict) -> tuple[list, dict]:
        nonlocal launched, storages
        given = init(executor, args, kwargs)
        tensors = [each.untyped_storage() for each in (*given[0], *given[1].values()) if hasattr(each, "data_ptr")]
        launched, storages = (
            executor.fn.__name__,
            sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in tensors}),
        )
        return given

    def check_addresses(ptrs: TensorHandle, mask: TensorHandle, access: str) -> None:
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)]
        if addresses.size:
            first, last = (
                int(addresses.min()),
                int(addresses.max()) + max(1, ptrs.get_element_ty().primitive_bitwidth // 8),
            )
            if not any(start <= first and last <= stop for start, stop in storages):
                raise IndexError(f"{launched}: {access} outside of its tensors")

    def checked_load(builder: InterpreterBuilder, ptrs: TensorHandle, mask: TensorHandle, *rest) -> TensorHandle:
        check_addresses(ptrs, mask, "a load")
        return load(builder, ptrs, mask, *rest)

    def checked_store(
        builder: InterpreterBuilder, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest
    ) -> None:
        check_addresses(ptrs, mask, "a store")
        return store(builder, ptrs, value, mask, *rest)

    GridExecutor._init_args_hst = init_args
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store

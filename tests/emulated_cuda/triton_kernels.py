"""Triton's kernels on the emulated device, by Triton's interpreter (TRITON_INTERPRET=1)."""

from types import SimpleNamespace

import torch
from emulation import Device


def use_interpreter(device: Device) -> None:
    """Have the interpreter work on the device's own bytes, and count each launch."""
    import bf16_gemms
    import device_maxima
    import fast_interpreter
    import triton
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def call(executor: GridExecutor, *args, **kwargs) -> None:
        names = [*range(len(args)), *kwargs]
        arguments = {**dict(enumerate(args)), **kwargs}
        on_device = [name for name in names if isinstance(arguments[name], torch.Tensor) and arguments[name].is_cuda]

        def run(*aliases: torch.Tensor) -> None:
            now = {**arguments, **dict(zip(on_device, aliases, strict=True))}
            launch(executor, *(now[index] for index in range(len(args))), **{name: now[name] for name in kwargs})

        device.kernel(f"triton::{executor.fn.__name__}", [arguments[name] for name in on_device], run)

    GridExecutor.__call__ = call
    bf16_gemms.correct()
    device_maxima.use()
    fast_interpreter.patch_once()
    # nothing is copied: tensors of the host, whose bytes are the device's
    GridExecutor._init_args_hst = lambda executor, args, kwargs: (args, kwargs)
    GridExecutor._restore_args_dev = lambda executor, *unused: None
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: triton.backends.compiler.GPUTarget(
                "cuda", int("{}{}".format(*device.capability)), 32
            ),
            get_active_torch_device=lambda: torch.device("cuda"),
            get_device_interface=lambda: torch.cuda,
            get_current_device=torch.cuda.current_device,
            get_current_stream=lambda index: 0,
        )
    )

"""Run by tests/ops/test_fla.py in a separate process, whose Triton interprets."""

import builtins
import sys
from collections.abc import Iterator

import torch
from emulated_cuda import bf16_gemms
from triton import language as tl
from triton.runtime.autotuner import Autotuner

from moe_trainer.ops import gated_delta_rule, triton_delta_rule
from moe_trainer.ops.gated_delta_rule import Heads


def first_configuration(tuner: Autotuner, *args, **named):
    """There is no device on which an autotuner could measure."""
    tuner.nargs = dict(zip(tuner.arg_names, args))
    return tuner.fn.run(*args, **named, **tuner.configs[0].all_kwargs())


def of_tensors(*bounds) -> Iterator[tl.tensor]:
    """`range` in a kernel gives tensors to a compiler, and numbers to the interpreter."""
    for number in builtins.range(
        *(int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else int(bound) for bound in bounds)
    ):
        yield tl.full([], number, tl.int32)


def main() -> None:
    """Two chunks, the second one not full, and two value heads for a key head: forward and backward."""
    Autotuner.run = first_configuration
    bf16_gemms.correct()
    ours = triton_delta_rule.load_fla()
    for name in [name for name in sys.modules if name.startswith(("fla.ops.common", "fla.ops.gated_delta_rule"))]:
        sys.modules[name].range = of_tensors
    heads, results = Heads(1, 2, 16, 16), []
    for function in (ours, gated_delta_rule.gated_delta):
        torch.manual_seed(2)
        leaves = [
            torch.randn(shape, requires_grad=True)
            for shape in ((80, 1, 64), (80, 1, 2), (80, 1, 2), (64, 4), (2,), (2,))
        ]
        y = function(*leaves, heads)
        y.square().sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()

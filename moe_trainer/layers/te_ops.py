"""The experts' MLP as one pipeline of TransformerEngine's operations (--use-transformer-engine-op-fuser).

fc1, SwiGLU times the probability, and fc2 become one `ops.Sequential`, which the library may replace by fused kernels.
From compute capability 9.0 (bf16) and 10.0 (small blocks) it reads token counts on the device, so the host waits for
none. Its kernel for all three in one needs --moe-mlp-glu-interleave-size 32, then fc1's gate and up alternate in blocks
of that many rows: ours are [gate; up], so the weight is rearranged in every call.

Between forward and backward its tensors can be stored in pages (--moe-paged-stash). The library flattens what it
saves: data of tokens, and with small blocks also scales, whose blocks follow each other expert by expert. So what
belongs to the first tokens comes first, and every token has an equal part if counts are multiples of PAD_MULTIPLE.

The operations take a weight per expert; ours are one parameter. A call shows them views of the stack as parameters,
and makes the pipeline of them, which notes its parameters when it is made. Casts of
weights are repeated with every microbatch, since operations know no first one.

Shape letters: R tokens sorted by expert, e local experts, H hidden, F expert FFN width, G = 2F.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter

from moe_trainer.layers.te_experts import LibraryGemms, give_main_grads, unstacked
from moe_trainer.memory.host_read import integer_tensor
from moe_trainer.ops.expert_mlp import compute_or_defer
from moe_trainer.ops.main_grad import set_main_grad
from moe_trainer.parallel.weight_grads import WeightGradQueue

NAMES = ("Sequential", "GroupedLinear", "ScaledSwiGLU")
"""What the pipeline takes from transformer_engine.pytorch.ops."""

PAD_MULTIPLE = 256
"""Multiple of a quantized expert's tokens that its fused kernels need, as in Megatron-Core."""


def interleave(w_eNK: Tensor, size: int | None) -> Tensor:
    """Reorder rows from [gate; up] to alternating blocks of gate and up; the same tensor without a size."""
    return w_eNK if size is None else w_eNK.unflatten(1, (2, -1, size)).transpose(1, 2).flatten(1, 3)


def separate(w_eNK: Tensor, size: int | None) -> Tensor:
    """Invert `interleave`."""
    return w_eNK if size is None else w_eNK.unflatten(1, (-1, 2, size)).transpose(1, 2).flatten(1, 3)


class _Pipeline(nn.Module):
    """fc1, activation and fc2, as one Sequential that is made when its parameters are known."""

    def __init__(self, library: ModuleType, *operations: nn.Module):
        super().__init__()
        self.make, self.operations = library.ops.Sequential, nn.ModuleList(operations)

    def forward(self, x_RH: Tensor, counts_e: Tensor, probs_R: Tensor) -> Tensor:
        return self.make(*self.operations)(x_RH, counts_e, probs_R, counts_e)


class FusedExpertMLP(nn.Module):
    """fc2(SwiGLU(fc1(x)) * probability) for the tokens of every expert, without biases.

    Args:
        context: in which the GEMMs run.
        queue: of the chunk; None if no weight gradient is deferred.
        pad_multiple: of token counts.
        interleave_size: rows of gate and up that alternate in the library's weight; None: all of gate come first.
        host_problem: why the library reads token counts on the host; None if it does not.
    """

    def __init__(
        self,
        num_experts: int,
        sizes: tuple[int, int, int],
        gemms: LibraryGemms,
        *,
        queue: WeightGradQueue | None = None,
        interleave_size: int | None = None,
        host_problem: str | None = None,
    ):
        """`sizes` are the widths H, F of this rank and the output's."""
        super().__init__()
        library, self.context, self.pad_multiple, _ = gemms
        self.queue = queue
        self.interleave_size, self.host_problem = interleave_size, host_problem
        hidden, ffn, output = sizes
        fc1, fc2 = (
            library.ops.GroupedLinear(
                num_experts,
                reads,
                makes,
                bias=False,
                device="meta",
                dtype=torch.float32,
                accumulate_into_main_grad=True,
                delay_wgrad_compute=queue is not None,
            )
            for reads, makes in ((hidden, 2 * ffn), (ffn, output))
        )
        pipeline = _Pipeline(library, fc1, library.ops.ScaledSwiGLU(interleave_size), fc2)
        self._hidden = pipeline, fc1, fc2  # a tuple: the model has no parameters of theirs
        self._deferred: tuple[list[Tensor], list[Tensor]] = [], []  # results of the library's queues, in their order

    def forward(
        self,
        x_RH: Tensor,
        probs_R: Tensor,
        w1_eGH: Parameter,
        w2_eHF: Parameter,
        counts_e: Sequence[int] | Tensor,
        *,
        stash_scope: Callable[[int, Callable[[Tensor], bool]], AbstractContextManager] = lambda *_: nullcontext(),
    ) -> Tensor:
        """Return y_RH. Counts are multiples of pad_multiple; rows after the last expert's are undefined.

        Args:
            stash_scope: see ActivationPolicy.library_stash_scope.
        """
        if not isinstance(counts_e, Tensor):
            counts_e = integer_tensor(counts_e, x_RH.device)
        pipeline, fc1, fc2 = self._hidden
        weights: dict[str, Tensor] = {}
        opened, addresses = [], set()
        for index, (linear, weight) in enumerate(((fc1, w1_eGH), (fc2, w2_eHF))):
            placeholders = _set_placeholders(linear, weight)
            size = self.interleave_size if linear is fc1 else None
            sums = [] if self.queue is None else self._deferred[index]
            views = unstacked(
                weight,
                self._collector(linear, weight, size, sums, placeholders),
                interleave(weight.detach(), size).unbind(0),
            )
            # that there is one is checked here; backward reads placeholders
            set_main_grad(views[0], weight.new_empty(0))
            weights |= {f"operations.{2 * index}.weight{expert}": view for expert, view in enumerate(views)}
            addresses |= {view.untyped_storage()._cdata for view in views}
            if weight.requires_grad:
                opened.append((sums, placeholders, weight))

        def open_sums(_: Tensor) -> None:
            for sums, placeholders, weight in opened:
                sums.append(give_main_grads(placeholders, weight))

        def is_of_tokens(x: Tensor) -> bool:
            return _is_of_tokens(x, x_RH) and x.untyped_storage()._cdata not in addresses

        with self.context(), stash_scope(len(x_RH), is_of_tokens):
            y_RH = functional_call(pipeline, weights, (x_RH, counts_e, probs_R))
        if y_RH.requires_grad:
            y_RH.register_hook(open_sums)  # when its backward begins
        return y_RH

    def _collector(
        self,
        linear: Any,
        weight: Parameter,
        size: int | None,
        sums: list[Tensor],
        placeholders: Sequence[Parameter],
    ) -> Callable[[], Tensor | None]:
        """Return a function that returns or defers the gradient that backward has written, or deferred, in `sums`.

        `linear` is an operation of the library.
        """

        def take() -> Tensor:
            if self.queue is not None:
                linear.backward_dw()  # the oldest one
            return separate(sums.pop(0), size)

        def collect() -> Tensor | None:
            for placeholder in placeholders:
                del placeholder.main_grad  # type: ignore[attr-defined]  # of give_main_grads
            return compute_or_defer(self.queue, weight, take)

        return collect


def _is_of_tokens(x: Tensor, x_RH: Tensor) -> bool:
    """Return whether a saved tensor that shares no memory with weights holds something of every token.

    The library marks those of its fused kernels. Those of other operations are flat, or have the dtype of the tokens;
    casts of weights are neither. Numbers of each expert are wider than a byte, and of another dtype.
    """
    if x.numel() < len(x_RH) or x.numel() % len(x_RH):
        return False
    if hasattr(x, "grouped_tensor_scale_inv"):
        return True
    return x.dtype == x_RH.dtype or (x.dim() == 1 and x.element_size() == 1)


def _set_placeholders(linear: nn.Module, weight_eNK: Tensor) -> list[Parameter]:
    """Return an operation's parameters without contents, from which its backward takes device and `main_grad`."""
    names = [f"weight{expert}" for expert in range(len(weight_eNK))]
    if linear.weight0.device != weight_eNK.device:
        for name in names:
            linear.register_parameter(name, Parameter(weight_eNK.new_empty(0)))
    return [getattr(linear, name) for name in names]

"""One linear of all local experts by TransformerEngine's GroupedLinear, on our stack of weights.

The library wants a tensor per expert; ours are one parameter [e, N, K]. So its module loses the parameters it was made with and is shown
views of the stack, for the time of a call. Their gradients reach the stack's parameter as one tensor: without a copy where the library
has laid them out one behind the other, else with one. Biases are not its business: they enter between the products (moe/grouped_experts.py).

Weight gradients that may wait are put off by the library in every pass (its delay_wgrad_compute), first in, first out. Passes that do
not wait take theirs at once; that it may be another pass's is no matter, for each pass takes one and all of them are added.

Rows of an expert come in multiples of `row_multiple`, for that is what the recipes' units take.

Shape letters: R rows sorted by expert, e local experts, N output width, K input width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.ops.expert_mlp import now_or_later
from moe_trainer.parallel.weight_grads import WeightGradQueue


class CastOnce:
    """When a module of the library casts its weights to 8 bits, in its words is_first_microbatch: where they do not change (precision.py:
    casting_once) in the first call, which keeps the result for the others; elsewhere, as None, in every call."""

    due: bool | None = None

    def is_first(self) -> bool | None:
        first = self.due
        if first:
            self.due = False
        return first


class _Unstacked(torch.autograd.Function):
    """A stack of weights as views, one an expert; backward: their gradients as a stack, or what `collect` returns for them."""

    @staticmethod
    def forward(ctx, weight_eNK: Tensor, collect: Callable[[], Tensor | None] | None):
        ctx.set_materialize_grads(False)
        ctx.collect, ctx.shape = collect, weight_eNK.shape[1:]
        ctx.none = weight_eNK.new_empty(0)
        return weight_eNK.unbind(0)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        if ctx.collect is not None:
            return ctx.collect(), None
        return stacked([ctx.none.new_zeros(ctx.shape) if grad is None else grad for grad in grads]), None


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one, [e, ...]: a view where they lie one behind the other already."""
    first, step = parts[0], parts[0].numel()
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(part.is_contiguous() and part.untyped_storage().data_ptr() == storage and part.storage_offset() == start + index * step
           for index, part in enumerate(parts)):
        return first.as_strided((len(parts), *first.shape), (step, *first.stride()), start)
    return torch.stack(list(parts))


class FusedGroupedLinear(nn.Module):
    """y = x W_e^T for the rows of every expert e, without bias.

    context: in which products are computed. queue: of the chunk; None where no weight gradient waits. row_multiple: see above.
    keeps_input: what is saved for backward is x itself, not what the recipe made of it; so that x may be computed again instead.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, library: ModuleType,
                 context: Callable[[], AbstractContextManager], queue: WeightGradQueue | None = None, row_multiple: int = 1,
                 keeps_input: bool = False):
        super().__init__()
        self.context, self.queue, self.row_multiple, self.casts = context, queue, row_multiple, CastOnce()
        self.fused = library.GroupedLinear(
            num_experts, in_features, out_features, bias=False, params_dtype=torch.float32, device="meta",
            delay_wgrad_compute=queue is not None, save_original_input=keeps_input)
        self._names = [f"weight{expert}" for expert in range(num_experts)]
        for name in self._names:
            delattr(self.fused, name)

    def forward(self, x_RK: Tensor, weight_eNK: Parameter, counts_e: Sequence[int]) -> Tensor:
        """counts_e: host integers, multiples of row_multiple that add up to R > 0. Returns: y_RN."""
        collect = None if self.queue is None else lambda: now_or_later(self.queue, weight_eNK, lambda: self._put_off(weight_eNK))
        with self.context(), self._showing(_Unstacked.apply(weight_eNK, collect)):
            return self.fused(x_RK, list(counts_e), is_first_microbatch=self.casts.is_first())

    def _put_off(self, weight_eNK: Parameter) -> Tensor:
        """Compute what the library has put off for longest."""
        views = weight_eNK.detach().unbind(0)
        with self._showing(views):
            self.fused.backward_dw()
        return stacked([view.grad for view in views])

    @contextmanager
    def _showing(self, weights: Sequence[Tensor]) -> Iterator[None]:
        for name, weight in zip(self._names, weights, strict=True):
            setattr(self.fused, name, weight)
        try:
            yield
        finally:
            for name in self._names:
                delattr(self.fused, name)

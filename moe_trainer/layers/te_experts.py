"""One linear of all local experts by TransformerEngine's GroupedLinear, on our stacked weight.

The library wants a tensor per expert; ours are one parameter [e, N, K]. The module loses its own parameters and gets
views of the stack during a call. Its GEMMs write their gradients to `give_main_grads`: in fp32 where these are added to
an fp32 main gradient, which then no rounding to bf16 precedes.
Where the stack is stored in a form that the library takes, it gets tensors of the library that share the stack's bytes.
Biases are added between the GEMMs (moe/grouped_experts.py). Deferred weight gradients use the library's
delay_wgrad_compute, a first-in first-out queue; a pass that does not defer runs one entry, and since all are summed it
may be another pass's. Token counts are multiples of `pad_multiple`.

Shape letters: R tokens sorted by expert, e local experts, N output width, K input width.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.layers import te
from moe_trainer.ops.expert_mlp import compute_or_defer
from moe_trainer.ops.main_grad import gradient_dtype, set_main_grad
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.iteration import WeightCastCache


class _Unstacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_eNK: Tensor, collect, tensors: Sequence[Tensor] | None):
        ctx.set_materialize_grads(False)
        ctx.collect = collect
        ctx.none, ctx.shape = weight_eNK.new_empty(0), weight_eNK.shape[1:]
        return weight_eNK.unbind(0) if tensors is None else tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        if ctx.collect is not None:
            return ctx.collect(), None, None
        return stacked([ctx.none.new_zeros(ctx.shape) if grad is None else grad for grad in grads]), None, None


def unstacked(
    weight_eNK: Tensor, collect: Callable[[], Tensor | None] | None, tensors: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Return per-expert views of a stacked weight for the library. Differentiable.

    Args:
        collect: returns the gradient of the stack, or None, instead of the sum over the views.
        tensors: of the library, instead of views.
    """
    shown = _Unstacked.apply(weight_eNK, collect, tensors)
    if tensors is not None and weight_eNK.requires_grad and torch.is_grad_enabled():
        for tensor in shown:
            tensor.requires_grad_()  # the library's tensors remember what they were made with
    return shown


def give_main_grad(shown: Tensor, weight: Tensor) -> Tensor:
    """Give the library's tensor of a weight a tensor to which it adds the gradient, and return that: zeros."""
    total = torch.zeros(weight.shape, dtype=gradient_dtype(weight), device=weight.device)
    set_main_grad(shown, total)
    return total


def give_main_grads(weights: Sequence[Tensor], weight_eNK: Tensor, make: Callable[..., Tensor] = torch.zeros) -> Tensor:
    """Give the weights of all experts the tensors, made by `make`, to which the library adds their gradients.

    Not slices of the parameter's main gradient: there the gradient is added times a factor, or replaces an old one.

    Returns:
        All of them, [e, N, K].
    """
    sums_eNK = make(weight_eNK.shape, dtype=gradient_dtype(weight_eNK), device=weight_eNK.device)
    for weight, total in zip(weights, sums_eNK, strict=True):
        set_main_grad(weight, total)
    return sums_eNK


class LibraryWeight:
    """The library's tensors of a stored weight; kept as long as casts are.

    They share the weight's bytes. Their transposes do not, so they are new after every change of the weight.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def tensors(self, weight: Parameter, is_first: bool | None, training: bool) -> list[Tensor] | None:
        """Return the tensors, in training with transposes; None if the weight is not stored so.

        is_first: see WeightCastCache.
        """
        stored = getattr(weight, "stored_weight", None)
        if stored is None:
            return None
        if is_first is not False:
            self._kept = te.weight_tensors(stored, weight.dtype, training)
        found = self._kept
        if is_first is None:
            self._kept = []
        return found


@contextmanager
def showing(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a module attributes in this scope."""
    for name, weight in weights.items():
        setattr(module, name, weight)
    try:
        yield
    finally:
        for name in weights:
            delattr(module, name)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape, [e, ...]; a view if they are contiguous in one storage."""
    first, step = parts[0], parts[0].numel()
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        part.is_contiguous()
        and part.untyped_storage().data_ptr() == storage
        and part.storage_offset() == start + index * step
        for index, part in enumerate(parts)
    ):
        return first.as_strided((len(parts), *first.shape), (step, *first.stride()), start)
    return torch.stack(list(parts))


class LibraryGemms(NamedTuple):
    """The library, and how it multiplies for experts.

    Args:
        context: in which the GEMMs run.
        pad_multiple: of token counts.
        stores: weights are stored in a form that the library takes.
    """

    library: ModuleType
    context: Callable[[], AbstractContextManager] = nullcontext
    pad_multiple: int = 1
    stores: bool = False


class FusedGroupedLinear(nn.Module):
    """y = x W_e^T for the tokens of every expert e, without bias.

    Args:
        queue: of the chunk; None if no weight gradient is deferred.
        save_original_input: save x itself for backward, not its quantized form, so that it can be recomputed.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        gemms: LibraryGemms,
        *,
        queue: WeightGradQueue | None = None,
        save_original_input: bool = False,
    ):
        super().__init__()
        library, self.context, self.pad_multiple, self.stores = gemms
        self.queue, self.casts, self.stored = queue, WeightCastCache(), LibraryWeight()
        self.fused = library.GroupedLinear(
            num_experts,
            in_features,
            out_features,
            bias=False,
            params_dtype=torch.float32,
            device="meta",
            fuse_wgrad_accumulation=True,
            delay_wgrad_compute=queue is not None,
            save_original_input=save_original_input,
        )
        self._deferred: list[Tensor] = []  # results of the library's queue, in its order, without memory until then
        declared = inspect.signature(library.GroupedLinear.forward).parameters.get("m_splits")
        self._takes_tensor = declared is not None and declared.annotation is Tensor
        self._names = [f"weight{expert}" for expert in range(num_experts)]
        for name in self._names:
            delattr(self.fused, name)

    def forward(self, x_RK: Tensor, weight_eNK: Parameter, counts_e: Sequence[int]) -> Tensor:
        """Return y_RN.

        Args:
            counts_e: host integers, multiples of pad_multiple that add up to R > 0.
        """
        sums = [] if self.queue is None else self._deferred

        def collect() -> Tensor | None:
            grad_eNK = compute_or_defer(self.queue, weight_eNK, lambda: self._take(weight_eNK, sums))
            if self._deferred:  # the library writes to it when its queue runs: 4 bytes per parameter until then
                self._deferred[-1].untyped_storage().resize_(0)
            return grad_eNK

        is_first = self.casts.is_first()
        tensors = self.stored.tensors(weight_eNK, is_first, self.training)
        views = unstacked(weight_eNK, collect, tensors)
        with self.context(), self._showing(views):
            y_RN = self.fused(x_RK, self._splits(counts_e), is_first_microbatch=is_first)
        if y_RN.requires_grad and weight_eNK.requires_grad:  # when its backward begins
            # deferred ones are filled when they get their memory again
            make = torch.zeros if self.queue is None else torch.empty
            y_RN.register_hook(lambda _: sums.append(give_main_grads(views, weight_eNK, make)))
        return y_RN

    def _splits(self, counts_e: Sequence[int]) -> list[int] | Tensor:
        """Return the counts as the library declares them: a tensor on the host since 2.17, a list before."""
        return torch.tensor(counts_e, dtype=torch.int64) if self._takes_tensor else list(counts_e)

    def _take(self, weight_eNK: Parameter, sums: list[Tensor]) -> Tensor:
        """Return the gradient; with a queue, the oldest one that the library has deferred."""
        total_eNK = sums.pop(0)
        if self.queue is not None:
            self._compute_deferred(weight_eNK, total_eNK)
        return total_eNK

    def _compute_deferred(self, weight_eNK: Parameter, total_eNK: Tensor) -> None:
        """Give the oldest deferred weight gradient of the library its memory, and compute it."""
        total_eNK.untyped_storage().resize_(total_eNK.nbytes)
        total_eNK.zero_()
        with self._showing(weight_eNK.detach().unbind(0)):
            self.fused.backward_dw()

    def _showing(self, weights: Sequence[Tensor]) -> AbstractContextManager[None]:
        return showing(self.fused, dict(zip(self._names, weights, strict=True)))

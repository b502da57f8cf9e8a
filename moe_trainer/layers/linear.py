"""Linear layers over the tensor-parallel group, with their communication.

Weights are [out_features, in_features], as in torch. Column: the output features are cut, each rank gets its part of y.
Row: the input features are cut, partial results are summed. Replicated: every rank holds the whole weight.

Sequence parallelism: between blocks the rows (dimension 0) of an activation are cut over the group. A column linear then
gathers its input and a row linear scatters the sum; without it the input is replicated and the sum is all-reduced.

| | forward | backward |
|---|---|---|
| column | - | all-reduce of the input's gradient |
| column, sequence parallel | all-gather of x | all-gather of x again, reduce-scatter of the input's gradient |
| row | all-reduce | - |
| row, sequence parallel | reduce-scatter | all-gather of the output's gradient |

What is kept for backward is this rank's rows of x, never the gathered ones: they are gathered again while the input's
gradient is being computed, and the input's gradient travels while the weight's is being computed. So all but the forward's
communication hides behind products; the price is one more all-gather.

A layer built with a WeightGradQueue hands the weight's product over while the queue is active (the gathered input stays
alive until it runs). It names the parameter itself: what comes out of `saved_tensors` may be another object, whose gradient nobody
reads, where saved tensors pass through hooks (memory/activations.py). A layer built with `quantize` has its three products computed in fewer bits (ops/fp8.py), of operands as they
are when the product begins: what travels does so in high precision, and gathered rows are quantised together. Plain products
add weights' gradients to where they add up, where they may (ops/main_grad.py). With one rank and none of these a layer is torch's own linear.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.layers.init import Init, make_parameter
from moe_trainer.ops import main_grad
from moe_trainer.ops.fp8 import QuantizedProducts
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.mappings import columns_to_rows, gather_last_dim_replicated, gather_rows, reduce_scatter_rows
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group
from moe_trainer.parallel.weight_grads import WeightGradQueue


class Products(main_grad.Products, Protocol):
    """The three products of a linear layer; leading dimensions are rows."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T."""

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad W."""


class PlainProducts:
    """Products in the dtype of their operands."""

    plain = True

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def weight_grad_later(self, grad: Tensor, x: Tensor) -> Callable[[], Tensor]:
        return lambda: grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _weight_grad(weight: Parameter, grad: Tensor, x: Tensor, queue: WeightGradQueue | None, products: Products) -> Tensor | None:
    """The gradient of a weight; None where it is deferred, or added to the main gradient already."""
    if queue is not None and queue.active:
        queue.defer(weight, products.weight_grad_later(grad, x))
        return None
    return main_grad.weight_grad(weight, grad, x, products)


def column_grads(grad: Tensor, x: Tensor, weight: Parameter, group: Group, *, sequence_parallel: bool,
                 needs: tuple[bool, bool], queue: WeightGradQueue | None = None,
                 products: Products | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of (x, weight) of y = x W^T, W cut along its output features; communication beside the products.

    Shapes: grad [..., out / size] of y; x as the layer received it: this rank's rows when sequence_parallel.
    needs: which of the two are wanted. Returns: None for what is not wanted or was deferred.
    """
    needs_x, needs_weight = needs
    products = products or PlainProducts()
    whole, gathered, grad_x, reduced = x, None, None, None
    if sequence_parallel and needs_weight:
        whole, gathered = gather_rows(x, group, async_op=True)
    if needs_x:
        grad_whole = products.input_grad(grad, weight)
        if sequence_parallel:
            grad_x, reduced = reduce_scatter_rows(grad_whole, group, async_op=True)
        else:
            grad_x, reduced = grad_whole, all_reduce(grad_whole, group, async_op=True)
    grad_weight = None
    if gathered is not None:
        gathered.wait()
    if needs_weight:
        grad_weight = _weight_grad(weight, grad, whole, queue, products)
    if reduced is not None:
        reduced.wait()
    return grad_x, grad_weight


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel, queue, products):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.plan = group, sequence_parallel, queue, products
        whole = gather_rows(x, group)[0] if sequence_parallel else x
        if products is None:
            return F.linear(whole, weight, bias)
        y = products.output(whole, weight)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        (x, _), weight = ctx.saved_tensors, ctx.weight
        group, sequence_parallel, queue, products = ctx.plan
        grad_x, grad_weight = column_grads(grad, x, weight, group, sequence_parallel=sequence_parallel,
                                           needs=ctx.needs_input_grad[:2], queue=queue, products=products)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def column(x: Tensor, weight: Parameter, group: Group, *, sequence_parallel: bool, products: Products) -> Tensor:
    """y = x W^T by other products than torch's own, W cut along its output features. Shapes: as ColumnParallelLinear."""
    return _Column.apply(x, weight, None, group, sequence_parallel, None, products)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group, sequence_parallel, queue, products):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.plan = group, sequence_parallel, queue, products
        partial = products.output(x, weight)
        return reduce_scatter_rows(partial, group)[0] if sequence_parallel else all_reduce(partial, group)

    @staticmethod
    def backward(ctx, grad):
        (x, _), weight = ctx.saved_tensors, ctx.weight
        group, sequence_parallel, queue, products = ctx.plan
        if sequence_parallel:
            grad = gather_rows(grad, group)[0]
        grad_weight = _weight_grad(weight, grad, x, queue, products) if ctx.needs_input_grad[1] else None
        return products.input_grad(grad, weight) if ctx.needs_input_grad[0] else None, grad_weight, None, None, None, None


class _Linear(nn.Module):
    """What the three have in common: parameters with their global names and cuts.

    name: global name of the layer; its parameters are `<name>.weight` and `<name>.bias`.
    sequence_parallel: the activations between blocks are cut by rows; without effect in a group of one.
    queue: where weight gradients go while it is active. quantize: makes its products in fewer bits, of (name, cut=...).
    """

    sharded_dim: int | None = None

    def __init__(self, in_features: int, out_features: int, *, name: str, group: Group, init: Init, bias: bool = False,
                 sequence_parallel: bool = False, parts: int = 1, queue: WeightGradQueue | None = None,
                 quantize: Callable[..., QuantizedProducts] | None = None):
        super().__init__()
        self.group, self.queue = group, queue
        self.sequence_parallel = sequence_parallel and group.size > 1
        shape = [out_features, in_features]
        cut = {}
        if self.sharded_dim is not None:
            features, what = shape[self.sharded_dim], ("output", "input")[self.sharded_dim]
            if features % (group.size * parts):
                raise ValueError(f"{name}: {features} {what} features do not divide over {group.size} ranks of {group.name}"
                                 + (f" in {parts} equal parts" if parts > 1 else ""))
            shape[self.sharded_dim] = features // group.size
            cut = {"sharded_dim": self.sharded_dim, "shard_rank": group.rank, "shard_count": group.size, "parts": parts}
        self.weight = make_parameter(tuple(shape), ParamInfo(
            (f"{name}.weight",), init=init.kind, init_std=init.std, partial=self.sharded_dim is None and self.sequence_parallel,
            **cut))
        self.bias = None
        if bias:
            # only a column linear's bias is cut; the others are added to this rank's rows
            cut = cut if self.sharded_dim == 0 else {"partial": self.sequence_parallel}
            self.bias = make_parameter((shape[0],), ParamInfo((f"{name}.bias",), init="zeros", **cut))
        self.quantized = quantize(name, cut=self.sharded_dim is not None or self.sequence_parallel) if quantize is not None else None

    def _without_ranks(self, x: Tensor) -> Tensor:
        if self.queue is None and self.quantized is None and not hasattr(self.weight, "main_grad_sum"):
            return F.linear(x, self.weight, self.bias)
        return _Column.apply(x, self.weight, self.bias, Group.single(self.group.name), False, self.queue, self.quantized)

    def quantized_weights(self) -> Iterator[tuple[Parameter, QuantizedProducts]]:
        """The weight with its products, if these are quantised here."""
        if self.quantized is not None:
            yield self.weight, self.quantized

    def extra_repr(self) -> str:
        cut = "" if self.group.size == 1 else f", 1 of {self.group.size} ranks, sequence_parallel={self.sequence_parallel}"
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, bias={self.bias is not None}{cut}"


class ColumnParallelLinear(_Linear):
    """y = x W^T + b with W cut along its output features: every rank gets its part of y.

    parts: the output is so many equal parts, each of which is cut (a gated fc1: [gate; up]).
    gather_output: every rank gets all features instead, of its own rows when sequence_parallel.
    """

    sharded_dim = 0

    def __init__(self, in_features: int, out_features: int, *, gather_output: bool = False, **options):
        super().__init__(in_features, out_features, **options)
        self.gather_output = gather_output
        assert not gather_output or self.weight.info.parts == 1, "gathering parts would leave them interleaved"

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [S, ..., in] (S / size rows when sequence_parallel) -> y [S, ..., out / size]."""
        if self.group.size == 1:
            return self._without_ranks(x)
        y = _Column.apply(x, self.weight, self.bias, self.group, self.sequence_parallel, self.queue, self.quantized)
        return self.gathered(y) if self.gather_output else y

    def gathered(self, y: Tensor) -> Tensor:
        """All features of y, of this rank's rows when sequence_parallel."""
        return columns_to_rows(y, self.group) if self.sequence_parallel else gather_last_dim_replicated(y, self.group)


class RowParallelLinear(_Linear):
    """y = x W^T + b with W cut along its input features: partial results are summed over the group, then b is added."""

    sharded_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [S, ..., in / size] -> y [S, ..., out], or [S / size, ..., out] when sequence_parallel."""
        if self.group.size == 1:
            return self._without_ranks(x)
        y = _Row.apply(x, self.weight, self.group, self.sequence_parallel, self.queue, self.quantized or PlainProducts())
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(_Linear):
    """y = x W^T + b on the rows this rank has; without communication.

    When sequence_parallel these are its own, and the gradients of W and b are partial over the group.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [..., in] -> y [..., out]."""
        return self._without_ranks(x)

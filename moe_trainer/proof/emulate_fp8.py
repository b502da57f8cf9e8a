"""Quantised linears in one process, cut as many ranks would cut them.

A scale for a whole tensor is that of what a rank holds, and blocks begin with it. So every linear is computed piece by piece, for the
rows of every context rank and the features of every tensor rank, each piece quantised by itself; experts for the features of every rank
of etp; the output layer for the rows of every context rank and the vocabulary of every tensor rank. With delayed scaling all pieces have
the same scale, and nothing has to be cut. Which rows an expert gets together is not emulated: low_precision.py keeps to cases where that
does not matter.

What is replaced are methods of QuantizedProducts, each product by itself. Experts pass them by where the device multiplies all of them in
one call (QuantizedProducts._of_experts), which it does for bf16 only: proofs with 8 bits compute in fp64.

Gradients inside a backward pass are larger on many ranks than in one process: the loss is divided by the microbatches of a rank (and
multiplied by the context ranks), the rest of the mean is taken where gradients are reduced. Formats notice how large a number is, so
the one process quantises its gradients as large as the ranks'.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_trainer.ops.fp8 import QuantizedProducts
from moe_trainer.parallel.params import ParamInfo, info_of, part_lengths
from moe_trainer.proof.mapping import Mapping
from moe_trainer.proof.topology import Topology
from moe_trainer.run import Run


def emulate_fp8(run: Run, mapping: Mapping, sequence_parallel: bool) -> None:
    """Make a run on whole tensors quantise them as the ranks of a mapping do. Call it before the first step."""
    length = run.args.data.seq_length
    for chunk in run.chunks:
        for module in chunk.modules():
            if module is chunk.output_layer:
                emulate_head(module.quantized, run.padded_vocab_size, mapping, length)
            elif isinstance(getattr(module, "quantized", None), QuantizedProducts) and module.quantized.recipe.delayed is None:
                replicated = info_of(module.weight).sharded_dim is None
                of_own_rows = sequence_parallel or "_latent_proj." in info_of(module.weight).names[0]  # as a MoE layer's are in any case
                rows = Topology(mapping.tp if replicated and of_own_rows else 1, mapping.cp)
                held = [rows.positions(index, length) for index in range(rows.shards)]
                module._without_ranks = in_pieces(module, held, 1 if replicated else mapping.tp)
        for layer in chunk.moe_layers():
            if layer.experts.quantized is not None and layer.experts.quantized[0].recipe.delayed is None and mapping.etp > 1:
                fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
                cut_outputs(layer.experts.quantized[0], features(info_of(fc1), fc1.shape[1], mapping.etp))
                cut_inputs(layer.experts.quantized[1], features(info_of(fc2), fc2.shape[2], mapping.etp))
    factor = 1.0 if run.per_token else mapping.dp * mapping.cp / run.ps.dp_cp.size
    for products in quantized_products(run):
        products.input_grad = enlarged(products.input_grad, factor)
        products.weight_grad_later = later_enlarged(products.weight_grad_later, factor)


def emulate_head(products: QuantizedProducts | None, vocab_size: int, mapping: Mapping, length: int) -> None:
    """Have an output layer quantise the vocabulary of every tensor rank and the positions of every context rank by themselves."""
    if products is None or products.recipe.delayed is not None:
        return
    if mapping.tp > 1:
        cut_outputs(products, list(torch.arange(vocab_size).chunk(mapping.tp)))
    rows = Topology(1, mapping.cp)
    if rows.shards > 1:
        cut_rows(products, [rows.positions(index, length) for index in range(rows.shards)], length)


def quantized_products(run: Run) -> list[QuantizedProducts]:
    """Those of all layers."""
    return [module for chunk in run.chunks for module in chunk.modules() if isinstance(module, QuantizedProducts)]


def enlarged(compute: Callable, factor: float) -> Callable:
    """A product with a gradient, of one that is `factor` times as large."""
    return lambda grad, other: compute(grad * factor, other) / factor


def later_enlarged(prepare: Callable, factor: float) -> Callable:
    """The same for a product that may be computed later."""

    def prepared(grad: Tensor, x: Tensor) -> Callable[[], Tensor]:
        compute = prepare(grad * factor, x)
        return lambda: compute() / factor

    return prepared


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, products):
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.output(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return ctx.products.input_grad(grad, weight), ctx.products.weight_grad(grad, x), None


def features(info: ParamInfo, size: int, count: int) -> list[Tensor]:
    """Of a dimension of `size` features: those of every rank, in its order."""
    parts = [part.chunk(count) for part in torch.arange(size).split(part_lengths(info, size))]
    return [torch.cat([part[rank] for part in parts]) for rank in range(count)]


def in_pieces(linear: nn.Module, held: list[Tensor], count: int) -> Callable[[Tensor], Tensor]:
    """The forward pass of a linear over x [S, B, in]; held: rows of x that are quantised together; count: ranks that share its features."""
    info, weight, products = info_of(linear.weight), linear.weight, linear.quantized
    cut = features(info, weight.shape[info.sharded_dim], count) if count > 1 else []
    order = torch.argsort(torch.cat(held))

    def piece(x: Tensor) -> Tensor:
        if count == 1:
            return _Product.apply(x, weight, products)
        if info.sharded_dim == 0:
            return torch.cat([_Product.apply(x, weight[own], products) for own in cut], -1)[..., torch.argsort(torch.cat(cut))]
        return sum(_Product.apply(x[..., own], weight[:, own], products) for own in cut)

    def forward(x: Tensor) -> Tensor:
        y = torch.cat([piece(x[rows]) for rows in held])[order]
        return y if linear.bias is None else y + linear.bias

    return forward


def cut_outputs(products: QuantizedProducts, cut: list[Tensor]) -> None:
    """Have products computed for parts of the output features, each quantised by itself; cut: the features of every part."""
    output, input_grad, weight_grad_later, order = products.output, products.input_grad, products.weight_grad_later, torch.argsort(torch.cat(cut))

    def later(grad: Tensor, x: Tensor) -> Callable[[], Tensor]:
        parts = [weight_grad_later(grad[..., own], x) for own in cut]
        return lambda: torch.cat([compute() for compute in parts])[order]

    products.output = lambda x, weight, *dtype: torch.cat([output(x, weight[own], *dtype) for own in cut], -1)[..., order]
    products.input_grad = lambda grad, weight: sum(input_grad(grad[..., own], weight[own]) for own in cut)
    products.weight_grad_later = later


def cut_rows(products: QuantizedProducts, held: list[Tensor], length: int) -> None:
    """The same for parts of the rows, which are positions times sequences; held: the positions, of `length`, of every part."""
    output, input_grad, weight_grad_later, order = products.output, products.input_grad, products.weight_grad_later, torch.argsort(torch.cat(held))

    def pieces(x: Tensor) -> list[Tensor]:
        by_position = x.unflatten(0, (length, -1))
        return [by_position[rows].flatten(0, 1) for rows in held]

    def together(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (len(rows), -1)) for part, rows in zip(parts, held)])[order].flatten(0, 1)

    def later(grad: Tensor, x: Tensor) -> Callable[[], Tensor]:
        parts = [weight_grad_later(*part) for part in zip(pieces(grad), pieces(x))]
        return lambda: sum(compute() for compute in parts)

    products.output = lambda x, weight, *dtype: together([output(part, weight, *dtype) for part in pieces(x)])
    products.input_grad = lambda grad, weight: together([input_grad(part, weight) for part in pieces(grad)])
    products.weight_grad_later = later


def cut_inputs(products: QuantizedProducts, cut: list[Tensor]) -> None:
    """The same for parts of the input features."""
    output, input_grad, weight_grad_later, order = products.output, products.input_grad, products.weight_grad_later, torch.argsort(torch.cat(cut))

    def later(grad: Tensor, x: Tensor) -> Callable[[], Tensor]:
        parts = [weight_grad_later(grad, x[..., own]) for own in cut]
        return lambda: torch.cat([compute() for compute in parts], 1)[:, order]

    products.output = lambda x, weight, *dtype: sum(output(x[..., own], weight[:, own], *dtype) for own in cut)
    products.input_grad = lambda grad, weight: torch.cat([input_grad(grad, weight[:, own]) for own in cut], -1)[..., order]
    products.weight_grad_later = later

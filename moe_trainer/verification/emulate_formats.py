"""Quantized linears in one process, sharded as many ranks would shard them.

A scale per tensor covers a rank's shard, and blocks start with the shard. So every linear is computed shard by shard,
for the tokens of every context rank and the features of every tensor rank, each shard quantized separately; experts
for the features of every rank of etp; the output layer for the tokens of every context rank and the vocabulary of
every tensor rank. With delayed scaling all shards have the same scale and nothing is sharded. Which tokens an expert
receives together is not emulated: low_precision.py keeps to cases in which that does not matter.

Methods of QuantizedGemms are replaced, one for each GEMM. Experts bypass them if the device computes all in one grouped
call (QuantizedGemms._of_experts), which happens for bf16 only: these checks compute in fp64.

Gradients within a backward pass are larger on many ranks than in one process: the loss is divided by the microbatches
of a rank (and multiplied by the context ranks), and the rest of the mean is taken when gradients are reduced. Formats
depend on the magnitude of a number, so the one process quantizes gradients of the same magnitude as the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TypeGuard

import torch
from torch import Tensor, nn

from moe_trainer.ops.gemms import WgradFn
from moe_trainer.parallel.params import ParamInfo, get_param_info, part_lengths
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.training.run import TrainRun
from moe_trainer.verification.mapping import ParallelMapping
from moe_trainer.verification.sequence_sharding import SequenceSharding


def emulate_formats(run: TrainRun, mapping: ParallelMapping, sequence_parallel: bool) -> None:
    """Make a run on full tensors quantize them as the ranks of a mapping do. Call it before the first step."""
    length = run.args.data.seq_length
    for chunk in run.chunks:
        for module in chunk.modules():
            if module is chunk.output_layer:
                emulate_output_layer(module.quantized, run.padded_vocab_size, mapping, length)
            elif _has_own_scales(getattr(module, "quantized", None)):
                info = get_param_info(module.get_parameter("weight"))
                is_replicated = info.sharded_dim is None
                # a MoE layer has sequence shards in any case
                has_sequence_shards = sequence_parallel or "_latent_proj." in info.names[0]
                sharding = SequenceSharding(mapping.tp if is_replicated and has_sequence_shards else 1, mapping.cp)
                positions = [sharding.positions(index, (length,)) for index in range(sharding.num_shards)]
                forward = make_sharded_forward(module, positions, 1 if is_replicated else mapping.tp)
                vars(module).update(_forward_local=forward)
        for layer in chunk.moe_layers():
            experts = layer.experts
            if mapping.etp == 1 or experts.quantized is None:
                continue
            fc1, fc2 = experts.linear_fc1.weight, experts.linear_fc2.weight
            first, second = experts.quantized
            if _has_own_scales(first):
                split_outputs(first, feature_shards(get_param_info(fc1), fc1.shape[1], mapping.etp))
            if _has_own_scales(second):
                split_inputs(second, feature_shards(get_param_info(fc2), fc2.shape[2], mapping.etp))
    factor = 1.0 if run.per_token else mapping.dp * mapping.cp / run.ps.dp_cp.size
    for gemms in list_quantized_gemms(run):
        vars(gemms).update(
            input_grad=with_scaled_grad(gemms.input_grad, factor),
            make_wgrad_fn=with_scaled_wgrad(gemms.make_wgrad_fn, factor),
        )


def emulate_output_layer(gemms: QuantizedGemms | None, vocab_size: int, mapping: ParallelMapping, length: int) -> None:
    """Quantize the vocabulary of every tensor rank and the positions of every context rank separately."""
    if not _has_own_scales(gemms):
        return
    if mapping.tp > 1:
        split_outputs(gemms, list(torch.arange(vocab_size).chunk(mapping.tp)))
    sharding = SequenceSharding(1, mapping.cp)
    if sharding.num_shards > 1:
        split_tokens(gemms, [sharding.positions(index, (length,)) for index in range(sharding.num_shards)], length)


def _has_own_scales(gemms: object) -> TypeGuard[QuantizedGemms]:
    """Return whether these are GEMMs whose shards have separate scales: every recipe except delayed scaling."""
    return isinstance(gemms, QuantizedGemms) and gemms.recipe.delayed is None


def list_quantized_gemms(run: TrainRun) -> list[QuantizedGemms]:
    return [module for chunk in run.chunks for module in chunk.modules() if isinstance(module, QuantizedGemms)]


def with_scaled_grad(compute: Callable, factor: float) -> Callable:
    """Return a GEMM of a gradient that is quantized at `factor` times its magnitude."""
    return lambda grad, other: compute(grad * factor, other) / factor


def with_scaled_wgrad(make_wgrad_fn: Callable, factor: float) -> Callable:
    """Return the same for the gradient of a weight, which may be computed later."""

    def make_scaled_wgrad_fn(grad: Tensor, x: Tensor) -> WgradFn:
        compute = make_wgrad_fn(grad * factor, x)
        return lambda *dtype: compute(*dtype) / factor

    return make_scaled_wgrad_fn


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gemms):
        ctx.save_for_backward(x, weight)
        ctx.gemms = gemms
        return gemms.output(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return ctx.gemms.input_grad(grad, weight), ctx.gemms.weight_grad(grad, x), None


def feature_shards(info: ParamInfo, size: int, count: int) -> list[Tensor]:
    """Return the features of every rank, in its order, of a dimension of `size` features."""
    sections = [section.chunk(count) for section in torch.arange(size).split(part_lengths(info, size))]
    return [torch.cat([section[rank] for section in sections]) for rank in range(count)]


def make_sharded_forward(linear: nn.Module, positions: list[Tensor], count: int) -> Callable[[Tensor], Tensor]:
    """Return a forward pass of a linear over x [S, B, in] that quantizes each shard separately.

    `positions` are those of x that are quantized together; `count` ranks share the features.
    """
    weight, gemms, bias = linear.get_parameter("weight"), linear.quantized, getattr(linear, "bias", None)
    info = get_param_info(weight)
    dim = info.sharded_dim
    shards = [] if dim is None or count == 1 else feature_shards(info, weight.shape[dim], count)
    order = torch.argsort(torch.cat(positions))

    def compute(x: Tensor) -> Tensor:
        if not shards:
            return _QuantizedLinear.apply(x, weight, gemms)
        if dim == 0:
            parts = [_QuantizedLinear.apply(x, weight[shard], gemms) for shard in shards]
            return torch.cat(parts, -1)[..., torch.argsort(torch.cat(shards))]
        return reduce(torch.add, [_QuantizedLinear.apply(x[..., shard], weight[:, shard], gemms) for shard in shards])

    def forward(x: Tensor) -> Tensor:
        y = torch.cat([compute(x[index]) for index in positions])[order]
        return y if bias is None else y + bias

    return forward


def split_outputs(gemms: QuantizedGemms, shards: list[Tensor]) -> None:
    """Quantize shards of the output features separately."""
    output, input_grad, make_wgrad_fn = gemms.output, gemms.input_grad, gemms.make_wgrad_fn
    order = torch.argsort(torch.cat(shards))

    def make_split_wgrad_fn(grad: Tensor, x: Tensor) -> WgradFn:
        wgrad_fns = [make_wgrad_fn(grad[..., shard], x) for shard in shards]
        return lambda *dtype: torch.cat([compute(*dtype) for compute in wgrad_fns])[order]

    def compute_output(x: Tensor, weight: Tensor, *dtype: torch.dtype) -> Tensor:
        return torch.cat([output(x, weight[shard], *dtype) for shard in shards], -1)[..., order]

    def compute_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
        return reduce(torch.add, [input_grad(grad[..., shard], weight[shard]) for shard in shards])

    vars(gemms).update(output=compute_output, input_grad=compute_input_grad, make_wgrad_fn=make_split_wgrad_fn)


def split_tokens(gemms: QuantizedGemms, positions: list[Tensor], length: int) -> None:
    """Quantize the tokens at given positions (of `length`) separately."""
    output, input_grad, make_wgrad_fn = gemms.output, gemms.input_grad, gemms.make_wgrad_fn
    order = torch.argsort(torch.cat(positions))

    def split(x: Tensor) -> list[Tensor]:
        by_position = x.unflatten(0, (length, -1))
        return [by_position[index].flatten(0, 1) for index in positions]

    def join(parts: list[Tensor]) -> Tensor:
        by_position = [part.unflatten(0, (len(index), -1)) for part, index in zip(parts, positions)]
        return torch.cat(by_position)[order].flatten(0, 1)

    def make_split_wgrad_fn(grad: Tensor, x: Tensor) -> WgradFn:
        wgrad_fns = [make_wgrad_fn(*pair) for pair in zip(split(grad), split(x))]
        return lambda *dtype: reduce(torch.add, [compute(*dtype) for compute in wgrad_fns])

    vars(gemms).update(
        output=lambda x, weight, *dtype: join([output(part, weight, *dtype) for part in split(x)]),
        input_grad=lambda grad, weight: join([input_grad(part, weight) for part in split(grad)]),
        make_wgrad_fn=make_split_wgrad_fn,
    )


def split_inputs(gemms: QuantizedGemms, shards: list[Tensor]) -> None:
    """Quantize shards of the input features separately."""
    output, input_grad, make_wgrad_fn = gemms.output, gemms.input_grad, gemms.make_wgrad_fn
    order = torch.argsort(torch.cat(shards))

    def make_split_wgrad_fn(grad: Tensor, x: Tensor) -> WgradFn:
        wgrad_fns = [make_wgrad_fn(grad, x[..., shard]) for shard in shards]
        return lambda *dtype: torch.cat([compute(*dtype) for compute in wgrad_fns], 1)[:, order]

    def compute_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([input_grad(grad, weight[:, shard]) for shard in shards], -1)[..., order]

    def compute_output(x: Tensor, weight: Tensor, *dtype: torch.dtype) -> Tensor:
        return reduce(torch.add, [output(x[..., shard], weight[:, shard], *dtype) for shard in shards])

    vars(gemms).update(output=compute_output, input_grad=compute_input_grad, make_wgrad_fn=make_split_wgrad_fn)

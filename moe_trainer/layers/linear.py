"""Linear layers over the tensor-parallel group, with their communication.

Weights are [out_features, in_features]. Column linears shard the output features, row linears the input features.

| | forward | backward |
|---|---|---|
| column | - | all-reduce of the input gradient |
| column, sequence parallel | all-gather of x | all-gather of x again, reduce-scatter of the input gradient |
| row | all-reduce | - |
| row, sequence parallel | reduce-scatter | all-gather of the output gradient |

Backward's communication overlaps GEMMs, but for the last row. With --tp-comm-overlap the collectives of the rows with
sequence parallelism are chunked, so that all of them overlap (tp_overlap.py).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.layers.init import Init, make_parameter
from moe_trainer.layers.tp_overlap import LinearOverlap, TpOverlap, gather_and_multiply, multiply_and_scatter
from moe_trainer.ops import main_grad
from moe_trainer.ops.gemms import LinearGemms, UnquantizedGemms
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.mappings import columns_to_rows, gather_last_dim_replicated, gather_rows, reduce_scatter_rows
from moe_trainer.parallel.params import ParamInfo, get_param_info
from moe_trainer.parallel.state import Group
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.saved_input import SavedInput


class LinearPass(NamedTuple):
    """How one pass of a linear computes.

    Attributes:
        group: ranks that share the weight.
        sequence_parallel: a column linear reads, and a row linear returns, the local tokens.
        gemms: unquantized ones are torch's own linear.
        queue: takes weight gradients while it is active.
        saves_quantized: save the input for backward as the GEMMs quantize it.
        overlap: chunks of communication next to the GEMMs.
    """

    group: Group
    sequence_parallel: bool
    gemms: LinearGemms = UnquantizedGemms()
    queue: WeightGradQueue | None = None
    saves_quantized: bool = False
    overlap: LinearOverlap = LinearOverlap()


def _weight_grad(weight: Parameter, grad: Tensor, x: Tensor | SavedInput, how: LinearPass) -> Tensor | None:
    """Return a weight gradient; None if it is deferred or already in the main gradient."""
    # GEMMs take what they have saved
    compute = main_grad.weight_grad_fn(weight, grad, cast(Tensor, x), how.gemms)
    if how.queue is not None and how.queue.active:
        how.queue.defer(weight, compute)
        return None
    return compute()


def column_grads(
    grad: Tensor,
    x: Tensor | SavedInput,
    weight: Parameter,
    how: LinearPass,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weight of y = x W^T, W sharded along its output features.

    Communication overlaps the GEMMs.

    Args:
        grad: [..., out / size], of y.
        x: as the layer received it, or quantized: the local tokens with sequence_parallel.
        needs: which of the two gradients to compute.

    Returns:
        Two gradients; None where not needed or deferred.
    """
    needs_x, needs_weight = needs
    group, chunks = how.group, how.overlap.input_grad_chunks
    grad_x: Tensor | None
    reduced: Any
    whole, gathered, grad_x, reduced = x, None, None, None
    if how.sequence_parallel and needs_weight:
        gathered = _start_gather(x, group)
    if needs_x and chunks > 1:
        grad_x, reduced = multiply_and_scatter(grad, weight, group, chunks, transposed=True)
    elif needs_x:
        grad_whole = how.gemms.input_grad(grad, weight)
        if how.sequence_parallel:
            grad_x, reduced = reduce_scatter_rows(grad_whole, group, async_op=True)
        else:
            grad_x, reduced = grad_whole, all_reduce(grad_whole, group, async_op=True)
    grad_weight = None
    if gathered is not None:
        whole = gathered()
    if needs_weight:
        grad_weight = _weight_grad(weight, grad, whole, how)
    if reduced is not None:
        reduced.wait()
    return grad_x, grad_weight


def _start_gather(x: Tensor | SavedInput, group: Group) -> Callable[[], Tensor | SavedInput]:
    """Start to gather the tokens of all ranks; return a function that waits for them."""
    if isinstance(x, Tensor):
        whole, work = gather_rows(x, group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return whole

        return wait
    gathers = [gather_rows(table, group, async_op=True) for table in x.token_tables]

    def wait_for_tables() -> SavedInput:
        for _, work in gathers:
            work.wait()
        return x.joined([table.unflatten(0, (group.size, -1)) for table, _ in gathers])

    return wait_for_tables


def _save(ctx: Any, x: Tensor, quantized: SavedInput | None, weight: Parameter) -> None:
    """Save the input for the weight gradient, quantized where it is given so."""
    tables = (x,) if quantized is None else (quantized.values, quantized.inverse)
    ctx.save_for_backward(weight, *tables)
    ctx.input_format = None if quantized is None else quantized.form


def _quantized(ctx: Any, x: Tensor, how: LinearPass) -> SavedInput | None:
    """Return the input as it is saved for a weight gradient that is needed; None if it is not quantized."""
    gemms = how.gemms
    saves = how.saves_quantized and ctx.needs_input_grad[1]
    return gemms.saved_input(x) if saves and isinstance(gemms, QuantizedGemms) else None


def _saved(ctx: Any) -> Tensor | SavedInput:
    _, values, *inverse = ctx.saved_tensors
    return values if ctx.input_format is None else SavedInput(values, inverse[0], ctx.input_format)


# Saved for backward are the local tokens of x, never the gathered ones: they are gathered again while the input
# gradient is computed, and the input gradient is reduced while the weight gradient is computed. Gradients go to the
# weight object that forward was given: `saved_tensors` may return another object where saved tensors pass through hooks
# (memory/activations.py). Quantized GEMMs take operands as they are at the GEMM: communication is in high precision,
# except for inputs that are saved quantized (quantization/saved_input.py).


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, how: LinearPass):
        ctx.weight, ctx.how = weight, how
        group = how.group
        if how.overlap.gathers:
            _save(ctx, x, None, weight)
            y = gather_and_multiply(x, weight, group)[0]
            return y if bias is None else y.add_(bias)
        whole = gather_rows(x, group)[0] if how.sequence_parallel else x
        quantized = _quantized(ctx, whole, how)
        if quantized is not None and how.sequence_parallel:
            quantized = quantized.shard(group.rank, group.size)
        _save(ctx, x, quantized, weight)
        if isinstance(how.gemms, UnquantizedGemms):
            return F.linear(whole, weight, bias)
        y = how.gemms.output(whole, weight)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad
        grad_x, grad_weight = column_grads(grad, _saved(ctx), ctx.weight, ctx.how, needs[:2])
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs[2] else None
        return grad_x, grad_weight, grad_bias, None


def column_parallel_gemm(
    x: Tensor, weight: Tensor, group: Group, *, sequence_parallel: bool, gemms: LinearGemms
) -> Tensor:
    """Return y = x W^T with the given GEMMs, W sharded along its output features."""
    return _Column.apply(x, weight, None, LinearPass(group, sequence_parallel, gemms))


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, how: LinearPass):
        _save(ctx, x, _quantized(ctx, x, how), weight)
        ctx.weight, ctx.how = weight, how
        if how.overlap.output_chunks > 1:
            y, reduced = multiply_and_scatter(x, weight, how.group, how.overlap.output_chunks)
            reduced.wait()
            return y
        partial = how.gemms.output(x, weight)
        return reduce_scatter_rows(partial, how.group)[0] if how.sequence_parallel else all_reduce(partial, how.group)

    @staticmethod
    def backward(ctx, grad):
        x, weight, how = _saved(ctx), ctx.weight, ctx.how
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = None
        if how.overlap.gathers and needs_x:
            grad_x, grad = gather_and_multiply(grad, weight, how.group, transposed=True, keep_rows=True)
        elif how.sequence_parallel:
            grad = gather_rows(grad, how.group)[0]
        grad_weight = _weight_grad(weight, grad, x, how) if needs_weight else None
        if needs_x and grad_x is None:
            grad_x = how.gemms.input_grad(grad, weight)
        return grad_x, grad_weight, None


class ParallelLinear(nn.Module):
    """Base of the three linears: parameters with their global names and shards.

    Args:
        name: global name of the layer; parameters are `<name>.weight` and `<name>.bias`.
        sequence_parallel: activations between blocks are sharded by tokens; no effect in a group of one.
        queue: receives weight gradients while it is active.
        quantize: makes quantized GEMMs from (name, is_sharded=).
        overlap: chunks of communication next to the GEMMs, under sequence parallelism. Quantized GEMMs are not divided:
            every chunk would quantize the weight again.
        save_original_input: save the input itself for backward, not its quantized form: it is recomputed, or something
            else keeps it anyway.
    """

    sharded_dim: int | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        group: Group,
        init: Init,
        bias: bool = False,
        sequence_parallel: bool = False,
        parts: int = 1,
        queue: WeightGradQueue | None = None,
        quantize: Callable[..., QuantizedGemms | None] | None = None,
        overlap: TpOverlap | None = None,
        save_original_input: bool = False,
    ):
        super().__init__()
        self.group, self.queue = group, queue
        self._local_group = group if group.size == 1 else Group.single(group.name)
        self.sequence_parallel = sequence_parallel and group.size > 1
        shape = [out_features, in_features]
        cut: dict[str, Any] = {}
        if self.sharded_dim is not None:
            features, what = shape[self.sharded_dim], ("output", "input")[self.sharded_dim]
            if features % (group.size * parts):
                raise ValueError(
                    f"{name}: {features} {what} features do not divide over {group.size} ranks of {group.name}"
                    + (f" in {parts} equal parts" if parts > 1 else "")
                )
            shape[self.sharded_dim] = features // group.size
            cut = {"sharded_dim": self.sharded_dim, "shard_rank": group.rank, "shard_count": group.size, "parts": parts}
        self.weight = make_parameter(
            tuple(shape),
            ParamInfo(
                (f"{name}.weight",),
                init=init.kind,
                init_std=init.std,
                is_grad_partial=self.sharded_dim is None and self.sequence_parallel,
                **cut,
            ),
        )
        self.bias = None
        if bias:
            # only a column linear's bias is sharded; the others are added to this rank's tokens
            cut = cut if self.sharded_dim == 0 else {"is_grad_partial": self.sequence_parallel}
            self.bias = make_parameter((shape[0],), ParamInfo((f"{name}.bias",), init="zeros", **cut))
        is_sharded = self.sharded_dim is not None or self.sequence_parallel
        self.quantized = None if quantize is None else quantize(name, is_sharded=is_sharded)
        is_chunked = overlap is not None and self.sequence_parallel and self.quantized is None
        self.overlap = overlap.for_linear(name, group.size) if overlap is not None and is_chunked else LinearOverlap()
        self.saves_quantized = self.quantized is not None and not save_original_input

    def _pass(self, group: Group, sequence_parallel: bool, overlap: LinearOverlap) -> LinearPass:
        saves = self.saves_quantized and torch.is_grad_enabled()
        gemms = UnquantizedGemms() if self.quantized is None else self.quantized
        return LinearPass(group, sequence_parallel, gemms, self.queue, saves, overlap)

    def _forward_local(self, x: Tensor) -> Tensor:
        if self.queue is None and self.quantized is None and not hasattr(self.weight, "main_grad_sum"):
            return F.linear(x, self.weight, self.bias)
        return _Column.apply(x, self.weight, self.bias, self._pass(self._local_group, False, LinearOverlap()))

    def quantized_weights(self) -> Iterator[tuple[Parameter, QuantizedGemms]]:
        """Yield the weight with its GEMMs, if they are quantized here."""
        if self.quantized is not None:
            yield self.weight, self.quantized

    def extra_repr(self) -> str:
        size = self.group.size
        cut = "" if size == 1 else f", 1 of {size} ranks, sequence_parallel={self.sequence_parallel}"
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, bias={self.bias is not None}{cut}"


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with W sharded along its output features.

    Args:
        parts: the output has so many equal parts, each sharded separately (a gated fc1: [gate; up]).
        gather_output: every rank gets all features, of its local tokens with sequence_parallel.
    """

    sharded_dim = 0

    def __init__(self, in_features: int, out_features: int, *, gather_output: bool = False, **options):
        super().__init__(in_features, out_features, **options)
        self.gather_output = gather_output
        parts = get_param_info(self.weight).parts
        assert not gather_output or parts == 1, "gathering parts would leave them interleaved"

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S, ..., in] (S / size tokens with sequence_parallel) to y [S, ..., out / size]."""
        if self.group.size == 1:
            return self._forward_local(x)
        y = _Column.apply(x, self.weight, self.bias, self._pass(self.group, self.sequence_parallel, self.overlap))
        return self.gathered(y) if self.gather_output else y

    def gathered(self, y: Tensor) -> Tensor:
        """Gather all features of y, of the local tokens with sequence_parallel."""
        return columns_to_rows(y, self.group) if self.sequence_parallel else gather_last_dim_replicated(y, self.group)


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with W sharded along its input features; partial results are summed, then b is added."""

    sharded_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S, ..., in / size] to y [S, ..., out], or [S / size, ..., out] with sequence_parallel."""
        if self.group.size == 1:
            return self._forward_local(x)
        y = _Row.apply(x, self.weight, self._pass(self.group, self.sequence_parallel, self.overlap))
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(ParallelLinear):
    """y = x W^T + b on the local tokens, without communication.

    With sequence_parallel the gradients of W and b are partial over the group.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to y [..., out]."""
        return self._forward_local(x)

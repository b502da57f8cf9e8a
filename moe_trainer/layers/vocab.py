"""Token embedding, output projection with its loss, and learned positions.

Tensor parallelism shards the rows of both tables. A rank looks up the tokens it holds, others give zeros, and the
embedding is the sum. For the loss each rank takes the softmax of its columns (ops/cross_entropy.py); two all-reduces of
[T] and [2, T] combine them, so logits are never communicated. Every rank of the group gets the full per-token loss.
Backward is that of a column linear.

Shapes: S sequence, B microbatch, T = S * B tokens, H hidden, V padded vocabulary of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from arguments.model import ModelArgs
from moe_trainer.layers.init import Init, make_parameter, output_init
from moe_trainer.layers.linear import LinearPass, column_grads, column_parallel_gemm
from moe_trainer.ops.cross_entropy import (
    TORCH_LOGIT_KERNELS,
    BackwardTwiceError,
    LinearLossGrads,
    LogitKernels,
    common_factor,
    linear_cross_entropy,
    needs_grad,
    tokens_per_chunk,
)
from moe_trainer.ops.gemms import LMHeadGemms
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.mappings import (
    gather_last_dim_replicated,
    gather_rows,
    local_rows,
    reduce_from_group,
    reduce_scatter_rows,
    reduce_scatter_rows_to_group,
)
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.gemms import QuantizedGemms

_BIAS_COLUMNS = 8  # the bias, and zeros up to what the GEMMs of GPUs are fast with


def _rows_of(group: Group, num_rows: int, name: str) -> tuple[int, dict[str, Any]]:
    """Return the number of rows of a table on this rank, and the sharding fields of ParamInfo."""
    if num_rows % group.size:
        raise ValueError(f"{name}: {num_rows} rows do not divide over {group.size} ranks of {group.name}")
    return num_rows // group.size, {"sharded_dim": 0, "shard_rank": group.rank, "shard_count": group.size}


def _local_rows(ids: Tensor, group: Group, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return row numbers in the local table of `num_rows` rows (0 for other ranks' rows), and whether they are local.

    An id outside of the vocabulary is an error on all ranks (on CUDA asynchronously), as with one rank: it would look
    like a row of zeros.
    """
    total = group.size * num_rows
    torch._assert_async(
        ((ids >= 0) & (ids < total)).all(), f"a token or label is not one of the vocabulary's {total} rows"
    )
    local = ids - group.rank * num_rows
    mine = (local >= 0) & (local < num_rows)
    return local.masked_fill(~mine, 0), mine


class VocabParallelEmbedding(nn.Module):
    """Token embedding with rows sharded over the group. tied, copy: see ParamInfo."""

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        *,
        name: str,
        group: Group,
        init: Init,
        tied: bool = False,
        copy: bool = False,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.num_rows, cut = _rows_of(group, num_rows, name)
        self.weight = make_parameter(
            (self.num_rows, hidden_size),
            ParamInfo((f"{name}.weight",), init=init.kind, init_std=init.std, tied=tied, is_replica=copy, **cut),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [S, ...], equal on every rank, to [S, ..., H], or to the local tokens with sequence_parallel."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        rows, mine = _local_rows(ids, self.group, self.num_rows)
        partial = F.embedding(rows, self.weight).masked_fill(~mine.unsqueeze(-1), 0.0)
        return (reduce_scatter_rows_to_group if self.sequence_parallel else reduce_from_group)(partial, self.group)


class PositionEmbedding(nn.Module):
    """Learned positions: a replicated table."""

    def __init__(
        self, num_rows: int, hidden_size: int, *, name: str, group: Group, init: Init, sequence_parallel: bool = False
    ):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel and group.size > 1
        self.weight = make_parameter(
            (num_rows, hidden_size),
            ParamInfo((f"{name}.weight",), init=init.kind, init_std=init.std, is_grad_partial=self.sequence_parallel),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [S, ...] to [S, ..., H], or to the local tokens with sequence_parallel."""
        return F.embedding(local_rows(ids, self.group) if self.sequence_parallel else ids, self.weight)


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels_T, how: LinearPass, kernels):
        whole = gather_rows(x, how.group)[0] if how.sequence_parallel else x
        probs_TV = how.gemms.output(whole.reshape(-1, whole.shape[-1]), weight)
        rows_T, mine_T = _local_rows(labels_T, how.group, weight.shape[0])
        loss_T, share_T = _loss_of_columns(probs_TV, rows_T, mine_T, how.group, kernels)
        ctx.save_for_backward(x, weight, rows_T, mine_T, loss_T, share_T)
        ctx.probs_TV, ctx.how, ctx.kernels = probs_TV, how, kernels
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        x, weight, rows_T, mine_T, loss_T, share_T = ctx.saved_tensors
        grad_TV, ctx.probs_TV = ctx.probs_TV, None
        if grad_TV is None:
            raise BackwardTwiceError
        ctx.kernels.gradient(grad_TV, rows_T, grad_T * share_T, torch.expm1(-loss_T).mul_(grad_T), mine_T)
        grad_TV = ctx.how.gemms.cast_grad(grad_TV, weight)
        grad_x, grad_weight = column_grads(grad_TV, x, weight, ctx.how, ctx.needs_input_grad[:2])
        return None if grad_x is None else grad_x.view(x.shape), grad_weight, None, None, None


class _ChunkedVocabParallelLoss(torch.autograd.Function):
    """Loss in chunks of tokens whose loss weights are known: see docs/design/cross_entropy.md."""

    @staticmethod
    def forward(ctx, x, weight, labels_T, weights_T, how: LinearPass, kernels, step, with_grads):
        group = how.group
        whole = gather_rows(x, group)[0] if how.sequence_parallel else x
        whole_TH = whole.reshape(-1, whole.shape[-1])
        all_rows_T, all_mine_T = _local_rows(labels_T, group, weight.shape[0])
        grads, losses = LinearLossGrads(whole_TH, weight) if with_grads else None, []
        for start in range(0, len(labels_T), step):
            here = slice(start, start + step)
            probs_TV = how.gemms.output(whole_TH[here], weight)
            loss_T, share_T = _loss_of_columns(probs_TV, all_rows_T[here], all_mine_T[here], group, kernels)
            losses.append(loss_T)
            if grads is not None:
                weights = weights_T[here].to(loss_T.dtype)
                kernels.gradient(
                    probs_TV, all_rows_T[here], weights * share_T, torch.expm1(-loss_T).mul_(weights), all_mine_T[here]
                )
                grads.add(here, whole_TH[here], probs_TV)
        ctx.save_for_backward(weights_T.to(losses[0].dtype))
        ctx.grads, ctx.shapes, ctx.how = grads, (x.shape, whole.shape), how
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, grad_T):
        (own_shape, shape), how, grads, ctx.grads = ctx.shapes, ctx.how, ctx.grads, None
        if grads is None:
            raise BackwardTwiceError
        factor = common_factor(grad_T, *ctx.saved_tensors)
        grad_whole = grads.take_x_grad(factor).view(shape)
        if how.sequence_parallel:
            grad_x, reduced = reduce_scatter_rows(grad_whole, how.group, async_op=True)
        else:
            grad_x, reduced = grad_whole, all_reduce(grad_whole, how.group, async_op=True)
        grad_weight = grads.take_weight_grad(factor)  # next to the reduction
        reduced.wait()
        return grad_x.view(own_shape), grad_weight, None, None, None, None, None, None


def _loss_of_columns(
    logits_TV: Tensor, rows_T: Tensor, mine_T: Tensor, group: Group, kernels: LogitKernels
) -> tuple[Tensor, Tensor]:
    """Replace the local logits by the softmax over them.

    Returns:
        The loss, and the factor that makes it the softmax over all ranks' columns.
    """
    own_T, target_T = kernels.softmax(logits_TV, rows_T)
    largest_T = all_reduce(own_T.clone(), group, op="max")
    sums_2T = all_reduce(torch.stack([(own_T - largest_T).exp_(), target_T.masked_fill_(~mine_T, 0.0)]), group)
    all_T = largest_T.add_(sums_2T[0].log())
    return all_T - sums_2T[1], own_T.sub_(all_T).exp_()


class OutputHead(nn.Module):
    """The model's "output_layer": logits and per-token loss of hidden states.

    It has its own [V, H] weight, or the embedding's.

    A tied weight is passed to the methods; its gradient is never deferred, because the embedding's part is not. Inputs
    are the local tokens with sequence_parallel.

    Args:
        model: with its multiplier of the logits (muP, Granite), and its bias, a number per row of the vocabulary that
            is added before.
        vocab_size: padded.
        sequence_parallel, queue, quantize: see layers/linear.py.
        kernels: passes over the logits.
        logit_dtype: of the logits; None for the weight's.
    """

    def __init__(
        self,
        model: ModelArgs,
        vocab_size: int,
        group: Group,
        *,
        sequence_parallel: bool = False,
        queue: WeightGradQueue | None = None,
        kernels: LogitKernels = TORCH_LOGIT_KERNELS,
        logit_dtype: torch.dtype | None = None,
        quantize: Callable[..., QuantizedGemms | None] | None = None,
    ):
        super().__init__()
        name, init = "output_layer", output_init(model)
        tied, bias = not model.untie_embeddings_and_output_weights, model.add_output_layer_bias
        self.multiplier = model.logit_scale
        self.kernels = kernels if self.multiplier == 1.0 else kernels.with_logit_scale(self.multiplier)
        self.quantized = None if quantize is None else quantize(name, is_sharded=True)
        self.gemms = LMHeadGemms(logit_dtype, self.quantized)
        self.group, self.queue = group, None if tied or bias else queue
        self.sequence_parallel = sequence_parallel and group.size > 1
        num_rows, cut = _rows_of(group, vocab_size, name)
        info = ParamInfo((f"{name}.weight",), init=init.kind, init_std=init.std, **cut)
        self.weight = None if tied else make_parameter((num_rows, model.hidden_size), info)
        bias_info = ParamInfo((f"{name}.bias",), init="zeros", **cut)
        self.bias = make_parameter((num_rows,), bias_info) if bias else None

    def _operands(self, x_SBH: Tensor, tied_weight: Parameter | None) -> tuple[Tensor, Tensor]:
        """Return hidden states and weight, with the bias as a further column of the weight.

        Every form of the loss then has its value and its gradient. The copy of the weight is cheap next to a GEMM.

        Raises:
            ValueError: if there is neither a weight of this layer nor a tied one.
        """
        weight = self.weight if tied_weight is None else tied_weight
        if weight is None:
            raise ValueError("a tied output layer needs the weight of the embedding")
        if self.bias is None:
            return x_SBH, weight
        bias_V = self.bias if weight.requires_grad else self.bias.detach()
        columns_VC = F.pad(bias_V.unsqueeze(1), (0, _BIAS_COLUMNS - 1))
        ones_SBC = F.pad(x_SBH.new_ones(*x_SBH.shape[:-1], 1), (0, _BIAS_COLUMNS - 1))
        return torch.cat((x_SBH, ones_SBC), -1), torch.cat((weight, columns_VC.to(weight.dtype)), 1)

    def loss(
        self, x_SBH: Tensor, labels_BS: Tensor, tied_weight: Parameter | None = None, weights_BS: Tensor | None = None
    ) -> Tensor:
        """Return the cross entropy of every token, fp32 [B, S], on every rank.

        Args:
            labels_BS: of the full sequence.
            weights_BS: a promise that the gradient of the result will be these times one number; it saves the memory of
                the logits.
        """
        x_SBH, weight = self._operands(x_SBH, tied_weight)
        # the queue wants the logits' gradient itself
        weights = None if weights_BS is None or self.queue is not None else weights_BS.t()
        if self.group.size == 1 and self.queue is None:
            loss_SB = linear_cross_entropy(x_SBH, weight, labels_BS.t(), weights, self.kernels, self.gemms)
            return loss_SB.t().contiguous()
        labels_T, step = labels_BS.t().reshape(-1), labels_BS.numel()
        if weights is not None and self.quantized is None:
            rows, width = weight.shape
            step = tokens_per_chunk(step, rows, width, weight.dtype, x_SBH.device, self.gemms.logit_dtype(weight))
        inputs, how = (x_SBH, weight, labels_T), LinearPass(self.group, self.sequence_parallel, self.gemms, self.queue)
        if weights is not None and step < len(labels_T):
            chunks = step, needs_grad(x_SBH, weight)
            loss_T = _ChunkedVocabParallelLoss.apply(*inputs, weights.reshape(-1), how, self.kernels, *chunks)
        else:
            loss_T = _VocabParallelLoss.apply(*inputs, how, self.kernels)
        return loss_T.view(labels_BS.shape[::-1]).t().contiguous()

    def logits(self, x_SBH: Tensor, tied_weight: Parameter | None = None) -> Tensor:
        """Return the logits of the full vocabulary, in the dtype of the logits, on every rank."""
        x_SBH, weight = self._operands(x_SBH, tied_weight)
        logits_SBV = column_parallel_gemm(
            x_SBH, weight, self.group, sequence_parallel=self.sequence_parallel, gemms=self.gemms
        )
        if self.multiplier != 1.0:
            logits_SBV = logits_SBV * self.multiplier
        return gather_last_dim_replicated(logits_SBV.transpose(0, 1).contiguous(), self.group)

"""Scores of experts, and the weights of the chosen ones: one class per score function, made when a router is built.

Numerics as Megatron-Core since 0.18: scores, selection and normalization in fp32 (fp64 for fp64 logits), weights
rounded to the dtype of the logits at the end.

Shape letters: T tokens, E experts, K top-k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide_dtype(logits_TE: Tensor) -> torch.dtype:
    """Return the dtype of scores: fp32, or that of the logits if it is wider."""
    return torch.promote_types(logits_TE.dtype, torch.float32)


class Scores:
    """How logits become scores and weights.

    Attributes:
        function: value of --moe-router-score-function.
        pre_softmax: value of --moe-router-pre-softmax, where it matters.
        has_kernel: fused kernels compute them too.
        factor: of the weights; None for 1.
    """

    function: str
    pre_softmax = False
    has_kernel = True

    def __init__(self, factor: float | None = None):
        self.factor = factor

    def score(self, logits_TE: Tensor) -> Tensor:
        """Return what the weights are made of; it orders the experts if there is no bias."""
        raise NotImplementedError

    def add_bias(self, logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
        """Return what orders the experts with a bias; the weights are those without."""
        raise NotImplementedError

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, routing_TE: Tensor) -> Tensor:
        """Return probs_TE in the dtype of the logits, zero if not chosen."""
        raise NotImplementedError

    def _to_table(self, logits_TE: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.factor:
            weights_TK = weights_TK * self.factor
        return torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK.to(logits_TE.dtype))


class SharesOfChosen(Scores):
    """A softmax over the chosen experts."""

    function = "softmax"

    def score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE

    def add_bias(self, logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
        # as ERNIE 4.5: a bias of shares of all experts, whatever the weights are
        return torch.softmax(logits_TE.detach(), dim=-1, dtype=wide_dtype(logits_TE)) + bias_E

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, routing_TE: Tensor) -> Tensor:
        if logits_TE.is_cuda:
            # a pass over all experts is fewer kernels than gather and scatter of the selected ones
            return _NormalizeSelected.apply(logits_TE, None, routing_TE, self.factor or 1.0)
        weights_TK = torch.softmax(scores_TE.gather(1, chosen_TK), dim=-1, dtype=wide_dtype(logits_TE))
        return self._to_table(logits_TE, chosen_TK, weights_TK)


class SharesOfAll(SharesOfChosen):
    """A softmax over all experts, before the choice."""

    pre_softmax = True

    def score(self, logits_TE: Tensor) -> Tensor:
        return torch.softmax(logits_TE, dim=-1, dtype=wide_dtype(logits_TE))

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, routing_TE: Tensor) -> Tensor:
        return self._to_table(logits_TE, chosen_TK, scores_TE.gather(1, chosen_TK))


class SqrtSoftplus(Scores):
    """sqrt(softplus(logit)), divided by its sum over the chosen experts if there are several."""

    function = "sqrtsoftplus"

    def score(self, logits_TE: Tensor) -> Tensor:
        return F.softplus(logits_TE.to(wide_dtype(logits_TE))).sqrt()

    def add_bias(self, logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor) -> Tensor:
        return scores_TE + bias_E

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, routing_TE: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, chosen_TK)
        if chosen_TK.shape[1] > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return self._to_table(logits_TE, chosen_TK, weights_TK)


class Sigmoid(SqrtSoftplus):
    """sigmoid(logit), divided by its sum over the chosen experts if there are several."""

    function = "sigmoid"

    def score(self, logits_TE: Tensor) -> Tensor:
        return torch.sigmoid(logits_TE.to(wide_dtype(logits_TE)))

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, routing_TE: Tensor) -> Tensor:
        if logits_TE.is_cuda and chosen_TK.shape[1] > 1:
            return _NormalizeSelected.apply(logits_TE, scores_TE.detach(), routing_TE, self.factor or 1.0)
        return super().weigh(logits_TE, scores_TE, chosen_TK, routing_TE)


def make_scores(function: str, pre_softmax: bool = False, factor: float | None = None) -> Scores:
    """Return the scores of --moe-router-score-function; `factor`: of the weights, None for 1."""
    if function == "softmax":
        return SharesOfAll(factor) if pre_softmax else SharesOfChosen(factor)
    return (Sigmoid if function == "sigmoid" else SqrtSoftplus)(factor)


class _NormalizeSelected(torch.autograd.Function):
    """Softmax or normalized sigmoid over the selected experts, times a factor; 0 for the others."""

    @staticmethod
    def forward(ctx, logits_TE: Tensor, sigmoid_TE: Tensor | None, routing_TE: Tensor, factor: float) -> Tensor:
        if sigmoid_TE is None:
            wide = torch.promote_types(logits_TE.dtype, torch.float32)
            share_TE = torch.where(routing_TE, logits_TE, float("-inf")).softmax(-1, dtype=wide)
        else:
            share_TE = sigmoid_TE * routing_TE
            share_TE /= share_TE.sum(-1, keepdim=True).add_(1e-20)
        ctx.save_for_backward(sigmoid_TE, share_TE)
        ctx.factor, ctx.dtype = factor, logits_TE.dtype
        return share_TE.to(ctx.dtype) if factor == 1.0 else torch.mul(share_TE, factor, out=torch.empty_like(logits_TE))

    @staticmethod
    def backward(ctx, grad_TE: Tensor):
        sigmoid_TE, share_TE = ctx.saved_tensors
        grad_TE = (
            grad_TE.to(share_TE.dtype)
            if ctx.factor == 1.0
            else torch.mul(grad_TE, ctx.factor, out=torch.empty_like(share_TE))
        )
        # both have softmax's gradient in the logarithm of the score; that of log(sigmoid) is 1 - sigmoid
        grad_TE = torch._softmax_backward_data(
            grad_TE, share_TE, -1, share_TE.dtype
        )  # CUDA's writes no bf16 of an fp32 gradient
        return (grad_TE if sigmoid_TE is None else grad_TE * (1.0 - sigmoid_TE)).to(ctx.dtype), None, None, None

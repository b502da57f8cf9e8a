"""Quantile balancing: a bias per expert instead of a loss (--moe-router-load-balancing-type quantile_balancing).

Experts are selected by logits minus bias; weights come from the score function. In training every microbatch, over
all ranks of tp and cp, yields an estimate of the bias: for each expert the value with which an even share of the
tokens would select it, given each token's best logit that is not selected. After a global batch the bias moves to the
mean of the estimates over microbatches and data ranks (`end_iteration`).

Source: Megatron-Core, qb_dual_update (moe_utils.py) and _update_router_qb_beta (finalize_model_grads.py).

Shape letters: T tokens of this rank, M tokens of the microbatch, E experts, K top-k, L routers.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from arguments.mechanisms.selection_kinds.quantile_balancing import QUANTILE_BALANCING
from moe_trainer.moe.selections.margin import compute_routing_margin
from moe_trainer.moe.selections.selection import ExpertSelection, RoutingInputs, ScoredSelection, SelectionContext
from moe_trainer.parallel.collectives import all_gather_flat, all_reduce
from moe_trainer.parallel.state import ParallelState


def choose_and_estimate(logits_ME: Tensor, topk: int, bias_E: Tensor, estimate: bool) -> tuple[Tensor, Tensor | None]:
    """Return indices_MK by biased logits, and with `estimate` the bias [E] that would balance the experts."""
    best = (logits_ME - bias_E).topk(topk + 1, dim=1)
    indices_MK = best.indices[:, :topk].contiguous()
    if not estimate:
        return indices_MK, None
    share = logits_ME.shape[0] * topk // logits_ME.shape[1]
    return indices_MK, (logits_ME - best.values[:, topk:]).topk(share + 1, dim=0).values[-1]


class QuantileBalancing(ScoredSelection, nn.Module):
    """The experts of the largest logits minus a bias.

    Buffers: bias_E, which is checkpointed as qb_beta, and the sum and number of this global batch's estimates.
    """

    declaration = QUANTILE_BALANCING
    bias_E: Tensor
    sum_E: Tensor
    count: Tensor

    def __init__(self, context: SelectionContext):
        moe, num_experts = context.moe, context.moe.expert_count
        super().__init__(moe.moe_router_topk, context.make_scores(moe.moe_router_pre_softmax), context.cache_fn)
        self._tp_cp, self._ema = context.ps.tp_cp, moe.moe_router_quantile_balancing_ema
        self.register_buffer("bias_E", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("sum_E", torch.zeros(num_experts, dtype=torch.float32), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.float32), persistent=False)

    def _apply(self, fn, recurse=True):
        # fp32 whatever the model is cast to
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, buffer.float())
        return self

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RoutingInputs) -> Tensor:
        return self.cache_fn(lambda: self._choose(logits_TE.detach(), inputs.active))

    @torch.no_grad()
    def _choose(self, logits_TE: Tensor, estimate: bool) -> Tensor:
        """Return indices_TK; with `estimate` accumulate an estimate, for which logits are all-gathered over tp_cp."""
        logits_ME = logits_TE.float()
        if self._tp_cp.size > 1 and estimate:
            local_TE = logits_ME.contiguous()
            gathered = local_TE.new_empty(self._tp_cp.size * local_TE.numel())
            logits_ME = all_gather_flat(gathered, local_TE.flatten(), self._tp_cp).view(-1, local_TE.shape[1])
        indices_MK, estimate_E = choose_and_estimate(logits_ME, self.topk, self.bias_E, estimate)
        if estimate_E is None:
            return indices_MK
        self.sum_E += estimate_E
        self.count += 1
        first = self._tp_cp.rank * logits_TE.shape[0] if self._tp_cp.size > 1 else 0
        return indices_MK[first : first + logits_TE.shape[0]]

    def margin(self, logits_TE: Tensor, expert_bias_E: Tensor | None) -> Tensor | None:
        # biased logits order the experts, whatever the score function
        return compute_routing_margin(logits_TE.float() - self.bias_E, self.topk, "softmax")

    def balancing_bias(self, expert_bias_E: Tensor | None) -> Tensor | None:
        return self.bias_E

    def state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield "qb_beta", self.bias_E

    def reset(self) -> None:
        self.sum_E.zero_()
        self.count.zero_()

    @staticmethod
    @torch.no_grad()
    def end_iteration(selections: Iterable["QuantileBalancing"], ps: ParallelState, frozen: bool) -> None:
        """Move the biases to the centered mean estimate of the global batch; `frozen` only discards the estimates.

        Communication: one all-reduce over dp_cp.
        """
        selections = list(selections)
        if not frozen:
            mean_LE = torch.stack([each.sum_E / each.count.clamp(min=1.0) for each in selections])
            mean_LE = all_reduce(mean_LE, ps.dp_cp) / ps.dp_cp.size
            ema = selections[0]._ema  # the weight of the old bias
            new_LE = ema * torch.stack([each.bias_E for each in selections]) + (1.0 - ema) * mean_LE
            for each, new_E in zip(selections, new_LE - new_LE.mean(-1, keepdim=True)):
                each.bias_E.copy_(new_E)
        for each in selections:
            each.reset()


def make_selection(context: SelectionContext) -> ExpertSelection:
    return QuantileBalancing(context)

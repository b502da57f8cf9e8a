"""Quantile balancing (--moe-router-load-balancing-type quantile_balancing): a bias per expert instead of a balancing loss.

A token chooses the experts with the largest logits minus bias. While it trains, every microbatch yields a new
estimate of the bias: per expert the value that exactly an even share of the microbatch's tokens exceed by more than
their own threshold, which is the best logit that they did not choose. After a global batch the bias moves to the mean
of these estimates (`update_quantile_bias`). The bias chooses only: weights come from the score function, as in any
other routing.

The tokens of a microbatch are those of all ranks of tp and cp, so the estimates do not depend on tp, cp, ep, etp and
pp; their mean over the microbatches of all data ranks does not depend on dp. The micro-batch size is part of the
definition.
Source: Megatron-Core, qb_dual_update (moe_utils.py) and _update_router_qb_beta (finalize_model_grads.py).

Shape letters: T tokens of this rank, M tokens of the microbatch, E experts, K top-k, L routers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moe_trainer.parallel.collectives import all_gather_flat, all_reduce
from moe_trainer.parallel.state import Group, ParallelState

KIND = "quantile_balancing"


def choose_and_estimate(logits_ME: Tensor, topk: int, bias_E: Tensor, estimate: bool) -> tuple[Tensor, Tensor | None]:
    """Choose experts by biased logits, and estimate the bias that would have balanced them.

    Returns: indices_MK; the estimate [E], None without `estimate`. M * topk must be a multiple of E for an estimate.
    """
    best = (logits_ME - bias_E).topk(topk + 1, dim=1)
    indices_MK = best.indices[:, :topk].contiguous()
    if not estimate:
        return indices_MK, None
    share = logits_ME.shape[0] * topk // logits_ME.shape[1]
    return indices_MK, (logits_ME - best.values[:, topk:]).topk(share + 1, dim=0).values[-1]


class QuantileBias(nn.Module):
    """The bias of one router. Buffers: bias_E, which a checkpoint keeps; the sum and the number of this global batch's estimates."""

    def __init__(self, num_experts: int, tp_cp: Group):
        super().__init__()
        self._tp_cp = tp_cp
        self.register_buffer("bias_E", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("sum_E", torch.zeros(num_experts, dtype=torch.float32), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.float32), persistent=False)

    def _apply(self, fn, recurse=True):
        # fp32 whatever the model is cast to, as the router's other buffers
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, buffer.float())
        return self

    @torch.no_grad()
    def choose(self, logits_TE: Tensor, topk: int, estimate: bool) -> Tensor:
        """Choose experts for this rank's tokens; with `estimate` also take the microbatch's estimate into account.

        Returns: indices_TK. Communication: T*E fp32 gathered over tp_cp.
        """
        logits_ME = logits_TE.float()
        if self._tp_cp.size > 1 and estimate:
            local_TE = logits_ME.contiguous()
            gathered = local_TE.new_empty(self._tp_cp.size * local_TE.numel())
            logits_ME = all_gather_flat(gathered, local_TE.flatten(), self._tp_cp).view(-1, local_TE.shape[1])
        indices_MK, estimate_E = choose_and_estimate(logits_ME, topk, self.bias_E, estimate)
        if estimate_E is None:
            return indices_MK
        self.sum_E += estimate_E
        self.count += 1
        first = self._tp_cp.rank * logits_TE.shape[0] if self._tp_cp.size > 1 else 0
        return indices_MK[first : first + logits_TE.shape[0]]

    def reset(self) -> None:
        """Drop the estimates of this global batch."""
        self.sum_E.zero_()
        self.count.zero_()


@torch.no_grad()
def update_quantile_bias(biases: Iterable[QuantileBias], ps: ParallelState, ema: float, frozen: bool = False) -> None:
    """Move the biases to the mean estimate of the global batch, centered; once per global batch. frozen: they stay.

    Args:
        biases: of this rank's routers.
        ema: share of the old bias in the new one.

    Communication: all routers' estimates in one all-reduce over dp_cp.
    """
    biases = list(biases)
    if biases and not frozen:
        mean_LE = torch.stack([bias.sum_E / bias.count.clamp(min=1.0) for bias in biases])
        mean_LE = all_reduce(mean_LE, ps.dp_cp) / ps.dp_cp.size
        new_LE = ema * torch.stack([bias.bias_E for bias in biases]) + (1.0 - ema) * mean_LE
        for bias, new_E in zip(biases, new_LE - new_LE.mean(-1, keepdim=True)):
            bias.bias_E.copy_(new_E)
    for bias in biases:
        bias.reset()

"""QK-clip: shrink query and key weights of heads whose attention logits exceed a threshold, after the step.

If the largest logit of a head over all microbatches and data-parallel ranks is M > t, its logits are scaled by eta = t
/ M: query rows by eta^alpha, key rows by eta^(1 - alpha). Query heads that share a key use their smallest eta. In
latent attention the rotary key belongs to all heads, so the query takes all of eta there. Biases are scaled with their
rows (Megatron-Core leaves them, so its logits do not shrink by eta).

Source: Kimi K2 (arXiv 2507.20534), as in Megatron-Core.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from arguments.model import ModelArgs
from moe_trainer.layers.attention import SelfAttention
from moe_trainer.layers.mla import MultiLatentAttention
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState
from moe_trainer.participant import Participant, StepMetrics

Attention = SelfAttention | MultiLatentAttention


def track_max_logits(chunks: Sequence[nn.Module]) -> None:
    """Let all attentions track their largest logits."""
    for attention in attentions(chunks):
        attention.max_logits.enabled = True


def reset_max_logits(chunks: Sequence[nn.Module]) -> None:
    """Forget the largest logits, at the beginning of an iteration."""
    for attention in attentions(chunks):
        attention.max_logits.reset()


def attentions(chunks: Sequence[nn.Module]) -> Iterator[Attention]:
    """Yield all attentions, those of multi-token prediction included."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Attention))


def reduce_max_logits(chunks: Sequence[nn.Module], ps: ParallelState, device: torch.device) -> dict[Attention, Tensor]:
    """Return the largest logit of every head, fp32 [N], over all ranks that share it.

    Communication: one all-reduce over ps.dp_cp of a number per head.
    """
    watched = [attention for attention in attentions(chunks) if attention.max_logits.enabled]
    if not watched:
        return {}
    peaks = collectives.all_reduce(
        torch.cat([a.max_logits.value(a.num_heads, device) for a in watched]), ps.dp_cp, "max"
    )
    return dict(zip(watched, peaks.split([attention.num_heads for attention in watched])))


def global_max_logit(peaks: dict[Attention, Tensor], ps: ParallelState, device: torch.device) -> float:
    """Return the largest logit of the model on every rank. Communication: one number over the world."""
    most = (
        torch.stack([peak.max() for peak in peaks.values()]).max()
        if peaks
        else torch.full((), float("-inf"), device=device)
    )
    return float(collectives.all_reduce(most.clone(), ps.world, "max"))


def qk_clip_factors(
    peaks: dict[Attention, Tensor], ps: ParallelState, threshold: float, alpha: float
) -> dict[Parameter, Tensor]:
    """Return the factors on rows of the local parameters, for parameters that shrink.

    Communication: an all-gather over ps.tp per attention with grouped queries, whose groups ranks may share.
    """
    factors: dict[Parameter, Tensor] = {}
    for attention, peaks_N in peaks.items():
        eta_N = torch.where((peaks_N > threshold) & peaks_N.isfinite(), threshold / peaks_N, 1.0)
        if isinstance(attention, MultiLatentAttention):
            factors.update(_of_latent(attention, eta_N, alpha))
        else:
            factors.update(_of_grouped(attention, eta_N, alpha, ps))
    return {param: rows for param, rows in factors.items() if (rows < 1.0).any()}


def _of_grouped(
    attention: SelfAttention, eta_N: Tensor, alpha: float, ps: ParallelState
) -> Iterator[tuple[Parameter, Tensor]]:
    linear = attention.linear_qkv
    *queries, key, value = get_param_info(linear.weight).row_blocks
    every = collectives.all_gather_flat(eta_N.new_empty(eta_N.numel() * ps.tp.size), eta_N.contiguous(), ps.tp)
    eta_G = every.view(-1, queries[0] // attention.head_dim).amin(1)
    ones = torch.ones_like(eta_G)
    columns = [
        (eta_G**alpha, queries[0]),
        *((ones, gates) for gates in queries[1:]),
        (eta_G ** (1 - alpha), key),
        (ones, value),
    ]
    rows = (
        torch.cat([factor[:, None].expand(-1, count) for factor, count in columns], dim=1)
        .flatten()
        .chunk(ps.tp.size)[ps.tp.rank]
    )
    yield linear.weight, rows
    if linear.bias is not None:
        yield linear.bias, rows


def _of_latent(attention: MultiLatentAttention, eta_N: Tensor, alpha: float) -> Iterator[tuple[Parameter, Tensor]]:
    nope, rope, value = attention.nope_dim, attention.rope_dim, attention.value_dim
    query = attention.linear_q_proj if attention.linear_q_proj is not None else attention.linear_q_up_proj
    eta_N1 = eta_N[:, None]
    yield query.weight, torch.cat([(eta_N1**alpha).expand(-1, nope), eta_N1.expand(-1, rope)], dim=1).flatten()
    yield (
        attention.linear_kv_up_proj.weight,
        torch.cat(
            [(eta_N1 ** (1 - alpha)).expand(-1, nope), torch.ones_like(eta_N1).expand(-1, value)], dim=1
        ).flatten(),
    )


class MaxLogits(Participant):
    """The largest attention logits of a model: reported, and clipped by the factors of QK-clip."""

    def __init__(
        self, chunks: Sequence[nn.Module], ps: ParallelState, model: ModelArgs, device: torch.device, is_logged: bool
    ):
        self._chunks, self._ps, self._model, self._device, self._is_logged = chunks, ps, model, device, is_logged

    def begin_step(self, iteration: int) -> None:
        reset_max_logits(self._chunks)

    def end_step(self, sums: Sequence[float], num_microbatches: int) -> StepMetrics:
        ps, model = self._ps, self._model
        peaks = reduce_max_logits(self._chunks, ps, self._device)
        factors = qk_clip_factors(peaks, ps, model.qk_clip_threshold, model.qk_clip_alpha) if model.qk_clip else {}
        details = {}
        if self._is_logged:
            details["max_attention_logit"] = global_max_logit(peaks, ps, self._device)
        return StepMetrics(details=details, row_factors=factors)

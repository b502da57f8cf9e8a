"""Balancing losses, z-loss, expert bias and their metrics.

With normalized scores s_te (softmax, or sigmoid / sqrt-softplus divided by their sum over experts) and constant counts
n, every balancing loss is linear in s:

    L = sum_te c_e * s_te,      c_e = coeff * E / (k * N^2) * n_e

For aux_loss, n and the number of tokens N are of the microbatch (all tp x cp ranks), for seq_aux_loss of each sequence
(of packed sequences with a weight in proportion to their length);
for global_aux_loss n / N are frequencies over the iteration's microbatches so far and tp x dp x cp, so that packs of
different lengths count by their tokens. The sum of the losses has a closed gradient with respect to the logits,

    softmax: s * (c - <s, c>),      others: r'(logit) / sum(r) * (c - <s, c>)

so no autograd graph is built: forward computes a [T, E] gradient, with the z-loss's, and backward adds it times
grad_scale (`attach_gradient`). Counts are those of a plain top-k of the scores, without expert bias, groups and drops,
except for selections that count their own choice (`counted`). Every rank computes the losses of its own tokens. Over tp
they are summed in the router's gradient (ParamInfo.is_grad_partial), over cp because grad_scale contains cp, which the
mean over dp_cp removes.

By Megatron-Core's definition these results depend on the layout, and the reference of one process emulates them
(verification/emulate_topology.py):

* --moe-expert-capacity-factor: capacity and drops are per rank (sequence shard over cp and tp) and microbatch;
* aux_loss: the mean over microbatches and data ranks of a quadratic function of their counts;
* global_aux_loss: counts are those so far, so the order of microbatches and the number of data ranks matter;
* selections that choose by other tokens too (`counts` of their declarations): by those of a rank, or of a microbatch;
* multi-token prediction under cp (model/mtp.py): each cp rank divides by its own number of valid tokens;
* --moe-input-jitter-eps, forced routing, stochastic rounding: every rank has its own random numbers;
* quantized GEMMs (quantization/gemms.py): scales are of a rank's shard of a tensor, and blocks start with it or with
  an expert's tokens on the rank. Gradients are quantized at their magnitude in backward, which depends on cp and the
  number of microbatches. Padded routing is per rank. Delayed scaling does not depend on the layout.

Shape letters: S sequence, B sequences of the microbatch, T tokens (= S*B, token s*B + b), E experts, K top-k.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arguments.mechanisms.selections import SELECTING
from arguments.moe import MoEArgs
from moe_trainer.moe.selections.selection import ExpertSelection
from moe_trainer.ops.attach_loss import Balancing
from moe_trainer.ops.packed_sequences import ValidTokens
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import Group, ParallelState

# order of the log line; positions in `loss_sums` of every router
LOSS_NAMES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")
BALANCING_TYPES = (
    ("aux_loss", "load_balancing_loss"),
    ("seq_aux_loss", "seq_load_balancing_loss"),
    ("global_aux_loss", "global_load_balancing_loss"),
)


def loss_coefficients(moe: MoEArgs) -> dict[str, float]:
    """Return the coefficient of each balancing loss by its logged name; 0.0 if unused.

    Raises:
        ValueError: if --moe-router-load-balancing-type and --moe-aux-loss-coeff do not match.
    """
    kinds, coeffs = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    coeffs = [coeffs] if isinstance(coeffs, (int, float)) else list(coeffs)
    if len(kinds) != len(coeffs):
        raise ValueError(
            f"--moe-router-load-balancing-type {' '.join(kinds)} needs as many --moe-aux-loss-coeff values; "
            f"{len(coeffs)} given: {' '.join(map(str, coeffs))}"
        )
    for kind in SELECTING:
        if kind in kinds and (len(kinds) > 1 or any(coeffs)):
            raise ValueError(
                f"--moe-router-load-balancing-type {kind} cannot be combined with others and needs "
                "--moe-aux-loss-coeff 0"
            )
    by_kind = dict(zip(kinds, coeffs))
    return {name: float(by_kind.get(kind, 0.0)) for kind, name in BALANCING_TYPES}


class _AttachGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE: Tensor, grad_TE: Tensor, grad_scale: float | Tensor) -> Tensor:
        ctx.grad_TE, ctx.grad_scale = grad_TE, grad_scale
        return logits_TE.view_as(logits_TE)

    @staticmethod
    def backward(ctx, grad_TE: Tensor):
        out = torch.empty_like(grad_TE)
        if isinstance(ctx.grad_scale, Tensor):
            return torch.addcmul(grad_TE, ctx.grad_TE, ctx.grad_scale, out=out), None, None
        return torch.add(grad_TE, ctx.grad_TE, alpha=ctx.grad_scale, out=out), None, None


def attach_gradient(logits_TE: Tensor, grad_TE: Tensor, grad_scale: float | Tensor) -> Tensor:
    """Return the logits; in backward add grad_TE * grad_scale to their gradient."""
    return _AttachGradient.apply(logits_TE, grad_TE, grad_scale)


@dataclass(frozen=True)
class BalancingLosses:
    """This rank's losses [4] (order LOSS_NAMES), without coefficients, and the gradient of their weighted sum."""

    values: Tensor
    grad_TE: Tensor


def normalized_scores(logits_TE: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    """Return scores r / sum(r), which sum to one over the experts, and r'(logit) / sum(r) (softmax: r = exp)."""
    if score_function == "softmax":
        scores_TE = torch.softmax(logits_TE, dim=-1)
        return scores_TE, scores_TE
    sigmoid_TE = torch.sigmoid(logits_TE)
    if score_function == "sigmoid":
        raw_TE, slope_TE = sigmoid_TE, sigmoid_TE * (1 - sigmoid_TE)
    else:
        raw_TE = F.softplus(logits_TE).sqrt()
        slope_TE = sigmoid_TE / (2 * raw_TE)
    total_T1 = raw_TE.sum(-1, keepdim=True) + 1e-20
    return raw_TE / total_T1, slope_TE / total_T1


def scores_and_counts(
    logits_TE: Tensor,
    topk: int,
    score_function: str,
    num_sequences: int,
    valid: ValidTokens | None = None,
    *,
    chosen_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores and slopes [T, E], and per sequence sums of scores and counts of the chosen experts [B, E].

    Without chosen_TE (bool) the plain top-k is counted. Only `valid` tokens are summed and counted.
    """
    scores_TE, slope_TE = normalized_scores(logits_TE, score_function)
    if chosen_TE is None:
        chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.topk(topk, dim=1)[1], 1.0)
    tables = scores_TE, chosen_TE
    if valid is not None:
        valid_T1, sequence_T = valid.mask_T.unsqueeze(1), valid.sequence_T
        tables = scores_TE * valid_T1, chosen_TE * valid_T1
        if sequence_T is not None and num_sequences > 1:
            sums_BE = scores_TE.new_zeros(num_sequences, scores_TE.shape[1])
            probs_BE, counts_BE = (sums_BE.index_add(0, sequence_T, table.to(sums_BE.dtype)) for table in tables)
            return scores_TE, slope_TE, probs_BE, counts_BE
    probs_BE, counts_BE = (
        table.view(-1, num_sequences, table.shape[1]).sum(0, dtype=scores_TE.dtype) for table in tables
    )
    return scores_TE, slope_TE, probs_BE, counts_BE


@dataclass(frozen=True)
class LossSettings:
    """What the flags say of the losses.

    Attributes:
        topk: experts of a token.
        score_function: of the logits.
        coefficients: of each loss, by name.
        z_loss_coeff: of the z-loss; None without.
        per_token_loss: multiply the gradient by the microbatch's token count over tp and cp (global_aux_loss: the mean
            count of the data ranks), because the gradients are divided by the token count later.
    """

    topk: int
    score_function: str
    coefficients: Mapping[str, float]
    z_loss_coeff: float | None = None
    per_token_loss: bool = False


@torch.no_grad()
def balancing_losses(
    logits_TE: Tensor,
    settings: LossSettings,
    *,
    num_sequences: int,
    running: tuple[Tensor, Tensor] | None,
    ps: ParallelState,
    chosen_TE: Tensor | None = None,
    kernels: Balancing | None = None,
    valid: ValidTokens | None = None,
) -> BalancingLosses:
    """Compute all balancing losses of one microbatch.

    `running` is (counts_E summed over the iteration's earlier microbatches and tp_dp_cp, number of microbatches) for
    global_aux_loss, updated in place. `chosen_TE` (bool) are the experts that count, None: the plain top-k. `kernels`
    compute all of it, if given. Only `valid` tokens count; their number may differ between ranks and microbatches.

    Source: Switch Transformer, equation 4; ST-MoE, equation 5; DeepSeek-V3, equation 17; arXiv 2501.11873, section 3.
    """
    if kernels is not None:
        return _by_kernels(kernels, logits_TE, settings, num_sequences, running, ps)
    num_tokens, num_shards = logits_TE.shape[0], ps.tp_cp.size
    coefficients, z_loss_coeff = settings.coefficients, settings.z_loss_coeff
    total: int | Tensor = num_tokens * num_shards if valid is None else valid.total
    valid_T = None if valid is None else valid.mask_T
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    values = logits_TE.new_zeros(len(LOSS_NAMES))
    grad_TE = None
    scores_TE = None
    if any(coefficients.values()):
        if valid is not None:
            num_sequences = valid.num_sequences
        num_rows = num_sequences if coefficients["seq_load_balancing_loss"] else 1
        scores_TE, slope_TE, probs_BE, counts_BE = scores_and_counts(
            logits_TE, settings.topk, settings.score_function, num_rows, valid, chosen_TE=chosen_TE
        )
        weights_BE = _loss_weights(probs_BE, counts_BE, total, settings, running, ps, values, valid)
        if valid is not None and valid.sequence_T is not None and len(weights_BE) > 1:
            weights_TE = weights_BE.index_select(0, valid.sequence_T)
        else:
            weights_TE = weights_BE.repeat(num_tokens // len(weights_BE), 1)
        if slope_TE is scores_TE:
            grad_TE = torch._softmax_backward_data(weights_TE, scores_TE, -1, scores_TE.dtype)
        else:
            grad_TE = slope_TE * (weights_TE - (scores_TE * weights_TE).sum(-1, keepdim=True))
    if z_loss_coeff is not None:
        log_softmax_TE = logits_TE.log_softmax(-1)
        log_sum_T1 = logits_TE[:, :1] - log_softmax_TE[:, :1]
        if valid_T is None:
            torch.mean(log_sum_T1.square(), (0, 1), out=values[3])
        else:  # this rank's share of the mean over all ranks, times their number
            values[3] = (log_sum_T1.square() * valid_T.unsqueeze(1)).sum() * (num_shards / total)
        softmax_TE = (
            scores_TE if settings.score_function == "softmax" and scores_TE is not None else log_softmax_TE.exp_()
        )
        factor = 2 * z_loss_coeff / total
        if grad_TE is None or isinstance(factor, Tensor):
            slope_TE = softmax_TE * (log_sum_T1 * factor)
            grad_TE = slope_TE if grad_TE is None else grad_TE.add_(slope_TE)
        else:
            grad_TE = grad_TE.addcmul_(softmax_TE, log_sum_T1, value=factor)
    if grad_TE is None:
        grad_TE = torch.zeros_like(logits_TE)
    if settings.per_token_loss:
        grad_TE *= total
    if valid_T is not None:
        grad_TE *= valid_T.unsqueeze(1)
    return BalancingLosses(values, grad_TE)


def _scales(
    coefficients: Mapping[str, float],
    total: int,
    num_sequences: int,
    num_experts: int,
    topk: int,
    ps: ParallelState,
) -> tuple[float, float, float]:
    """Return the factors of the counts in the three losses; 0 for unused ones. `total`: tokens over tp and cp."""
    divisors = (total**2, (total // num_sequences) ** 2 * num_sequences, (total * ps.dp.size) ** 2)
    aux, seq, over_all = (
        num_experts / (topk * divisor) if coefficients[name] and divisor else 0.0
        for name, divisor in zip(LOSS_NAMES, divisors)
    )
    return aux, seq, over_all


def _by_kernels(
    kernels: Balancing,
    logits_TE: Tensor,
    settings: LossSettings,
    num_sequences: int,
    running: tuple[Tensor, Tensor] | None,
    ps: ParallelState,
) -> BalancingLosses:
    num_tokens, num_experts = logits_TE.shape
    coefficients, z_coefficient, total = settings.coefficients, settings.z_loss_coeff, num_tokens * ps.tp_cp.size
    if z_coefficient is not None:
        z_coefficient = 2 * z_coefficient / max(ps.tp_cp.size, total)
    counted = kernels.count(logits_TE, settings.topk, settings.score_function, num_sequences)
    _, counts_BE, _ = counted
    if running is not None:
        sums_E, steps = running
        sums_E += all_reduce(counts_BE.sum(0), ps.tp_dp_cp)
        steps += 1
    if ps.tp_cp.size > 1 and (coefficients["load_balancing_loss"] or coefficients["seq_load_balancing_loss"]):
        counts_BE = all_reduce(counts_BE.contiguous(), ps.tp_cp)
    scales = _scales(coefficients, total, num_sequences, num_experts, settings.topk, ps)
    return BalancingLosses(
        *kernels.gradient(
            logits_TE,
            counted,
            counts_BE,
            running,
            scales,
            [coefficients[name] for name in LOSS_NAMES[:3]],
            settings.score_function,
            z_coefficient,
            float(total) if settings.per_token_loss else 1.0,
        )
    )


def _loss_weights(
    probs_BE: Tensor,
    counts_BE: Tensor,
    total: int | Tensor,
    settings: LossSettings,
    running: tuple[Tensor, Tensor] | None,
    ps: ParallelState,
    values: Tensor,
    valid: ValidTokens | None,
) -> Tensor:
    """Return the sum of the c's of the losses in use, [1 or B, E]; write the losses to `values`.

    `total`: tokens over tp and cp; other data ranks may have other numbers of `valid` ones.
    """
    group = ps.tensor_context.of(None if valid is None else valid.cp_size)
    num_sequences, num_experts = counts_BE.shape
    topk, coefficients = settings.topk, settings.coefficients
    aux_scale: float | Tensor
    seq_scale: float | Tensor
    global_scale: float | Tensor
    if valid is None:
        assert isinstance(total, int)
        aux_scale, seq_scale, global_scale = _scales(coefficients, total, num_sequences, num_experts, topk, ps)
    else:
        scale = num_experts / (topk * total)
        aux_scale = scale / total
        seq_scale = aux_scale if valid.lengths_B is None else scale / valid.lengths_B.clamp(min=1).unsqueeze(1)
    probs_E, counts_E = (probs_BE[0], counts_BE[0]) if num_sequences == 1 else (probs_BE.sum(0), counts_BE.sum(0))
    weights = []
    if coefficients["load_balancing_loss"]:
        weight_E = _sum_over_ranks(counts_E, group) * aux_scale
        torch.dot(probs_E, weight_E, out=values[0])
        weights.append(coefficients["load_balancing_loss"] * weight_E)
    if coefficients["seq_load_balancing_loss"]:
        weight_BE = _sum_over_ranks(counts_BE, group) * seq_scale
        torch.dot(probs_BE.flatten(), weight_BE.flatten(), out=values[1])
        weights.append(coefficients["seq_load_balancing_loss"] * weight_BE)
    if coefficients["global_load_balancing_loss"]:
        if running is None:
            raise ValueError("balancing_losses: the global loss needs the counts of earlier microbatches")
        sums_E, steps = running
        all_counts_E = _sum_over_ranks(counts_E, ps.tp_dp_cp)
        sums_E += all_counts_E
        steps += 1
        coefficient: float | Tensor = coefficients["global_load_balancing_loss"]
        if valid is not None:  # earlier microbatches had other numbers of tokens: as many as so many of this size
            num_chosen = all_counts_E.sum()
            steps = sums_E.sum() / num_chosen
            global_scale = num_experts * topk / num_chosen.square()
            if settings.per_token_loss:  # the gradient is multiplied by `total`, which differs between the ranks
                coefficient *= num_chosen * group.size / (topk * ps.tp_dp_cp.size * total)
        weight_E = (sums_E / steps).to(probs_E.dtype) * global_scale
        torch.dot(probs_E, weight_E, out=values[2])
        weights.append(coefficient * weight_E)
    return functools.reduce(torch.add, weights).view(-1, num_experts)


def _sum_over_ranks(counts: Tensor, group: Group) -> Tensor:
    return counts if group.size == 1 else all_reduce(counts.clone(), group)


def _layers(chunks) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.moe_layers()


def _routers(chunks) -> Iterator[Any]:
    for layer in _layers(chunks):
        yield layer.router


def start_iteration(chunks) -> None:
    """Reset the running counts of global_aux_loss, and the number of packs."""
    for chunk in chunks:
        chunk.num_packs = 0.0
    for router in _routers(chunks):
        if router.coefficients["global_load_balancing_loss"]:
            router.global_tokens_per_expert.zero_()
            router.ga_steps.zero_()


def reset_iteration(chunks) -> None:
    """Discard the statistics of the current iteration, which is repeated or skipped."""
    for router in _routers(chunks):
        local_tokens_per_expert = getattr(router, "local_tokens_per_expert", None)
        for counter in (router.loss_sums, router.dropped, router.tokens_per_expert, local_tokens_per_expert):
            if counter is not None:
                counter.zero_()
        router.selection.reset()
    for layer in _layers(chunks):
        for counter in (layer.sent_tokens_P, layer.placement.moved_tokens_2P):
            if counter is not None:
                counter.zero_()


def update_biases(chunks, ps: ParallelState, frozen: bool = False) -> None:
    """Update expert biases and what selections estimate, once per global batch; `frozen` only resets the counts."""
    update_expert_bias(chunks, ps, frozen)
    by_kind: dict[type[ExpertSelection], list[ExpertSelection]] = {}
    for router in _routers(chunks):
        by_kind.setdefault(type(router.selection), []).append(router.selection)
    for kind, selections in by_kind.items():
        kind.end_iteration(selections, ps, frozen)


@torch.no_grad()
def update_expert_bias(chunks, ps: ParallelState, frozen: bool = False) -> None:
    """Move every expert's bias by the update rate towards balance; `frozen` only resets the counts.

    Communication: one all-reduce of all layers' counts over tp_dp_cp.
    Source: auxiliary-loss-free load balancing (arXiv 2408.15664); DeepSeek-V3, section 2.1.2.
    """
    routers = [router for router in _routers(chunks) if router.expert_bias is not None]
    if frozen:
        for router in routers:
            router.local_tokens_per_expert.zero_()
    if not routers or frozen:
        return
    counts_LE = torch.stack([router.local_tokens_per_expert for router in routers])
    all_reduce(counts_LE, ps.tp_dp_cp)
    direction_LE = torch.sign(counts_LE.mean(-1, keepdim=True) - counts_LE)
    for router, direction_E in zip(routers, direction_LE):
        router.expert_bias += direction_E * router.moe.moe_router_bias_update_rate
        router.local_tokens_per_expert.zero_()


@dataclass(frozen=True)
class MoeMetrics:
    """Balance of one iteration.

    Attributes:
        losses: mean over MoE layers and microbatches by name, without coefficient, in the log line's order.
        per_layer: mean over microbatches of every layer by name, 0 for dense layers; MTP layers come last.
        dropped_tokens: (token, expert) pairs beyond capacity in all layers, microbatches and ranks.
    """

    losses: dict[str, float]
    per_layer: dict[str, list[float]]
    dropped_tokens: int


def logged_losses(moe: MoEArgs) -> tuple[str, ...]:
    """Return the names of the logged losses, in order, including those with coefficient 0.

    As in Megatron-LM a single type is tested by substring: seq_aux_loss and global_aux_loss also log
    load_balancing_loss (0).
    """
    kinds = moe.moe_router_load_balancing_type
    names = [name for kind, name in BALANCING_TYPES if kind in kinds]
    return tuple(names + ["z_loss"] * (moe.moe_z_loss_coeff is not None))


def collect_moe_metrics(
    chunks, ps: ParallelState, num_microbatches: int, moe: MoEArgs, num_layers: int, device: torch.device | str = "cpu"
) -> MoeMetrics:
    """Read and reset the routers' statistics; all ranks get the same values.

    Collective over the world, including pipeline stages without experts. `num_layers` is that of the full model with
    MTP layers.
    """
    if not moe.num_experts:
        return MoeMetrics({}, {}, 0)
    # columns: the four losses, drops, and whether the layer is an MoE layer; the last row has the packs of this rank
    table = torch.zeros(num_layers + 1, len(LOSS_NAMES) + 2, dtype=torch.float64, device=device)
    if ps.dynamic_cp:
        table[-1, 0].fill_(chunks[0].num_packs)
    for router in _routers(chunks):
        row = table[router.layer_number - 1]
        row[:4] = router.loss_sums
        row[4] = router.dropped
        row[5].fill_(1.0)  # an assignment would copy from the host and wait
        router.loss_sums.zero_()
        router.dropped.zero_()
    # aux and seq are summed over tp_cp, global over tp_dp_cp; z-loss is a mean of local tokens
    all_reduce(table, ps.tp_dp_cp)
    table[:, :2] /= ps.dp.size
    table[:, 3] /= ps.tp_dp_cp.size
    table[:, 5] /= ps.tp_dp_cp.size
    all_reduce(table, ps.pp)
    *rows, (num_packs, *_) = table.tolist()
    # of a data rank; the packs of groups of several sizes are not as many as the microbatches of their ranks
    num_packs = num_packs / (ps.tp.size * ps.pp.size) if ps.dynamic_cp else num_microbatches
    num_moe_layers = sum(row[5] > 0.5 for row in rows)
    losses, per_layer = {}, {}
    for name in logged_losses(moe):
        column = LOSS_NAMES.index(name)
        count = num_microbatches if name == "global_load_balancing_loss" else num_packs
        per_layer[name] = [row[column] / count for row in rows]
        losses[name] = sum(per_layer[name]) / max(1, num_moe_layers)
    return MoeMetrics(losses, per_layer, round(sum(row[4] for row in rows)))

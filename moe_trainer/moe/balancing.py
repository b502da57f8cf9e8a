"""Balance of the experts: auxiliary losses, z-loss, expert bias, and what is logged of them.

Design: with normalised scores s_te (softmax, or sigmoid / sqrt-softplus divided by their sum over experts) every
balancing loss is linear in s once the counts n are taken as constants:

    L = sum_te c_e * s_te,      c_e = coeff * E / (k * N^2) * n_e

N tokens; aux_loss takes n and N over the microbatch (all tp x cp ranks), seq_aux_loss over each sequence and
averages, and global_aux_loss takes the running mean of n over the iteration's microbatches so far and over tp x dp x
cp. Linear means that all of them share one gradient pass: the c's are added up, and dL/dlogits has a closed form,

    softmax: s * (c - <s, c>),      others: r'(logit) / sum(r) * (c - <s, c>)

so no autograd graph is built: a [T, E] gradient is computed with the forward pass and added, times grad_scale, when
backward comes by (`attach_gradient`). The z-loss, coeff * mean(logsumexp^2), joins the same sum. Counts come from a
plain top-k of the scores: expert bias, groups and drops take no part; of FineRMoE's experts (finermoe.py) those that
are chosen are counted. Rejected: returning losses through the pipeline (stages other than the last must
back-propagate them too), and a global scale (a hidden argument).

A rank computes its own tokens' share of these losses: over tp the shares add up in the router's gradient
(ParamInfo.is_grad_partial), over cp because the gradient scale that the loop passes contains the size of cp, which the mean
over dp_cp takes away again.

What depends on the mapping by definition. Everything else here is the same for every tp, cp, ep, etp, pp and dp;
these few are as Megatron-Core defines them, and a one-process oracle has to compute them for the mapping in question:

* capacity (--moe-expert-capacity-factor): an expert's limit and what it drops are found on each rank's own tokens,
  that is per sequence shard under cp and under tp (with or without sequence parallelism), and per microbatch of each
  data rank;
* aux_loss and seq_aux_loss: one value per microbatch and data rank, averaged; aux_loss is not linear in the counts,
  so it depends on the micro-batch size and on the number of data ranks, seq_aux_loss (per sequence) does not;
* global_aux_loss: its counts are a running mean over the microbatches so far of sums over tp, cp and dp, so it
  depends on how many data ranks share the global batch and in which order microbatches come;
* quantile_balancing: its estimates are of one microbatch, so they depend on the micro-batch size, and on nothing else;
* sinkhorn: its iteration runs over each rank's own tokens, so it depends on tp, cp, the micro-batch size and the data
  ranks;
* multi-token prediction under cp (model/mtp.py): each cp rank divides its loss by its own number of valid tokens;
* --moe-input-jitter-eps and the forced routings of benchmarks: every rank draws its own random numbers.
* GEMMs in fp8 or fp4 (quantization/gemms.py). A scale for a whole tensor, and the first level of NVFP4's, is that
  of what a rank holds: its part of a weight, its rows. Blocks begin with a rank's part; along the rows (weights'
  gradients) also with an expert's rows on its rank, which come from all microbatches that are dispatched together.
  Gradients are quantised as large as they are inside a backward pass, which depends on the number of microbatches of
  a data rank and on cp. Padded routing adds to what each rank's tokens choose. Noise of stochastic rounding is every
  rank's own. Delayed scaling has the same scales for every mapping (quantization/iteration.py).

Shape letters: S sequence, B sequences of the microbatch, T tokens (= S*B, token s*B + b), E experts, K top-k.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arguments.moe import MoEArgs
from moe_trainer.layers.kernels import Balancing
from moe_trainer.moe.quantile_balancing import KIND as QUANTILE_BALANCING
from moe_trainer.moe.quantile_balancing import update_quantile_bias
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
    """Coefficient of each balancing loss by its logged name; 0.0 for those not asked for.

    Raises: ValueError when --moe-router-load-balancing-type and --moe-aux-loss-coeff have different lengths or do not
    go together.
    """
    kinds, coeffs = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    coeffs = [coeffs] if isinstance(coeffs, (int, float)) else list(coeffs)
    if len(kinds) != len(coeffs):
        raise ValueError(
            f"--moe-router-load-balancing-type {' '.join(kinds)} needs as many --moe-aux-loss-coeff values; "
            f"{len(coeffs)} given: {' '.join(map(str, coeffs))}"
        )
    for kind in ("sinkhorn", QUANTILE_BALANCING):
        if kind in kinds and (len(kinds) > 1 or any(coeffs)):
            raise ValueError(f"--moe-router-load-balancing-type {kind} stands alone and needs --moe-aux-loss-coeff 0")
    asked = dict(zip(kinds, coeffs))
    return {name: float(asked.get(kind, 0.0)) for kind, name in BALANCING_TYPES}


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
    """values: [4], order LOSS_NAMES, without coefficients, this rank's part; grad_TE: gradient of their weighted sum."""

    values: Tensor
    grad_TE: Tensor


def normalized_scores(logits_TE: Tensor, score_function: str) -> tuple[Tensor, Tensor]:
    """Scores that sum to one over the experts, and r'(logit) / sum(r) of their unnormalised form r (for softmax, r = exp)."""
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
    logits_TE: Tensor, topk: int, score_function: str, num_sequences: int, chosen_TE: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised scores and slopes, and per sequence the sums of scores and the counts of the plain top-k, both [B, E].

    chosen_TE: the choice that is counted, if it is known or another one; bool.
    """
    scores_TE, slope_TE = normalized_scores(logits_TE, score_function)
    if chosen_TE is None:
        chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.topk(topk, dim=1)[1], 1.0)
    probs_BE, counts_BE = (
        table.view(-1, num_sequences, table.shape[1]).sum(0, dtype=scores_TE.dtype) for table in (scores_TE, chosen_TE)
    )
    return scores_TE, slope_TE, probs_BE, counts_BE


@torch.no_grad()
def balancing_losses(
    logits_TE: Tensor,
    *,
    num_sequences: int,
    topk: int,
    score_function: str,
    coefficients: Mapping[str, float],
    z_loss_coeff: float | None,
    per_token_loss: bool,
    running: tuple[Tensor, Tensor] | None,
    ps: ParallelState,
    counts: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = scores_and_counts,
    kernels: Balancing | None = None,
) -> BalancingLosses:
    """Values and summed gradient of all balancing losses of one microbatch.

    Shapes: logits_TE; running = (counts_E summed over the iteration's earlier microbatches and over tp_dp_cp, number
    of microbatches), both updated in place, needed by global_aux_loss. per_token_loss multiplies the gradient by the
    microbatch's token count (all tp x cp ranks), which the later division by the token count takes away. counts: of
    the experts that are chosen. kernels: stand in for all of it.
    Source: Switch Transformer, equation 4; ST-MoE, equation 5; DeepSeek-V3, equation 17.
    """
    num_tokens, num_experts = logits_TE.shape
    cut = ps.tp_cp.size
    if kernels is not None:
        z = None if z_loss_coeff is None else 2 * z_loss_coeff / (cut * max(1, num_tokens))
        factor = float(num_tokens * cut) if per_token_loss else 1.0
        return _by_kernels(
            kernels, logits_TE, num_sequences, topk, score_function, coefficients, z, factor, running, ps
        )
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    values = logits_TE.new_zeros(len(LOSS_NAMES))
    grad_TE = None
    scores_TE = None
    if any(coefficients.values()):
        rows = num_sequences if coefficients["seq_load_balancing_loss"] else 1
        scores_TE, slope_TE, probs_BE, counts_BE = counts(logits_TE, topk, score_function, rows)
        weights_BE = _loss_weights(probs_BE, counts_BE, num_tokens, topk, coefficients, running, ps, values)
        weights_TE = weights_BE.repeat(num_tokens // rows, 1)
        if slope_TE is scores_TE:
            grad_TE = torch._softmax_backward_data(weights_TE, scores_TE, -1, scores_TE.dtype)
        else:
            grad_TE = slope_TE * (weights_TE - (scores_TE * weights_TE).sum(-1, keepdim=True))
    if z_loss_coeff is not None:
        log_softmax_TE = logits_TE.log_softmax(-1)
        log_sum_T1 = logits_TE[:, :1] - log_softmax_TE[:, :1]
        torch.mean(log_sum_T1.square(), (0, 1), out=values[3])
        softmax_TE = scores_TE if score_function == "softmax" and scores_TE is not None else log_softmax_TE.exp_()
        factor = 2 * z_loss_coeff / (cut * num_tokens)
        grad_TE = (
            softmax_TE * (log_sum_T1 * factor)
            if grad_TE is None
            else grad_TE.addcmul_(softmax_TE, log_sum_T1, value=factor)
        )
    if per_token_loss:
        grad_TE *= num_tokens * cut
    return BalancingLosses(values, grad_TE)


def _scales(
    coefficients: Mapping[str, float],
    num_tokens: int,
    num_sequences: int,
    num_experts: int,
    topk: int,
    ps: ParallelState,
) -> tuple[float, float, float]:
    """What counts of chosen experts are multiplied with in the three losses; 0 for those not asked for."""
    tokens, length = num_tokens * ps.tp_cp.size, num_tokens // num_sequences * ps.tp_cp.size
    divisors = (tokens**2, length**2 * num_sequences, (num_tokens * ps.tp_dp_cp.size) ** 2)
    return tuple(
        num_experts / (topk * divisor) if coefficients[name] and divisor else 0.0
        for name, divisor in zip(LOSS_NAMES, divisors)
    )


def _by_kernels(
    kernels: Balancing,
    logits_TE: Tensor,
    num_sequences: int,
    topk: int,
    score_function: str,
    coefficients: Mapping[str, float],
    z_coefficient: float | None,
    factor: float,
    running: tuple[Tensor, Tensor] | None,
    ps: ParallelState,
) -> BalancingLosses:
    counted = kernels.count(logits_TE, topk, score_function, num_sequences)
    _, counts_BE, _ = counted
    if running is not None:
        sums_E, steps = running
        sums_E += all_reduce(counts_BE.sum(0), ps.tp_dp_cp)
        steps += 1
    if ps.tp_cp.size > 1 and (coefficients["load_balancing_loss"] or coefficients["seq_load_balancing_loss"]):
        counts_BE = all_reduce(counts_BE.contiguous(), ps.tp_cp)
    scales = _scales(coefficients, logits_TE.shape[0], num_sequences, logits_TE.shape[1], topk, ps)
    return BalancingLosses(
        *kernels.gradient(
            logits_TE,
            counted,
            counts_BE,
            running,
            scales,
            [coefficients[name] for name in LOSS_NAMES[:3]],
            score_function,
            z_coefficient,
            factor,
        )
    )


def _loss_weights(
    probs_BE: Tensor,
    counts_BE: Tensor,
    num_tokens: int,
    topk: int,
    coefficients: Mapping[str, float],
    running: tuple[Tensor, Tensor] | None,
    ps: ParallelState,
    values: Tensor,
) -> Tensor:
    """The sum of the c's of the losses in use, [1 or B, E]; writes the losses' values."""
    num_sequences, num_experts = counts_BE.shape
    of_all, of_each, of_running = _scales(coefficients, num_tokens, num_sequences, num_experts, topk, ps)
    probs_E, counts_E = (probs_BE[0], counts_BE[0]) if num_sequences == 1 else (probs_BE.sum(0), counts_BE.sum(0))
    found = []
    if coefficients["load_balancing_loss"]:
        weight_E = _over_ranks(counts_E, ps.tp_cp) * of_all
        torch.dot(probs_E, weight_E, out=values[0])
        found.append(coefficients["load_balancing_loss"] * weight_E)
    if coefficients["seq_load_balancing_loss"]:
        weight_BE = _over_ranks(counts_BE, ps.tp_cp) * of_each
        torch.dot(probs_BE.flatten(), weight_BE.flatten(), out=values[1])
        found.append(coefficients["seq_load_balancing_loss"] * weight_BE)
    if coefficients["global_load_balancing_loss"]:
        sums_E, steps = running
        sums_E += _over_ranks(counts_E, ps.tp_dp_cp)
        steps += 1
        weight_E = (sums_E / steps).to(probs_E.dtype) * of_running
        torch.dot(probs_E, weight_E, out=values[2])
        found.append(coefficients["global_load_balancing_loss"] * weight_E)
    weights = functools.reduce(torch.add, found)
    return weights.view(-1, num_experts)


def _over_ranks(counts: Tensor, group: Group) -> Tensor:
    """The sums over a group; the counts of this rank stay as they are."""
    return counts if group.size == 1 else all_reduce(counts.clone(), group)


def _layers(chunks) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.moe_layers()


def _routers(chunks) -> Iterator[Any]:
    for layer in _layers(chunks):
        yield layer.router


def start_iteration(chunks) -> None:
    """Forget the counts of the previous iteration's microbatches (global_aux_loss)."""
    for router in _routers(chunks):
        if router.coefficients["global_load_balancing_loss"]:
            router.global_tokens_per_expert.zero_()
            router.ga_steps.zero_()


def reset_iteration(chunks) -> None:
    """Reset the statistics of the current iteration, as if none of its microbatches had run: for one that is repeated or skipped."""
    for router in _routers(chunks):
        for books in (
            router.loss_sums,
            router.dropped,
            router.tokens_per_expert,
            getattr(router, "local_tokens_per_expert", None),
        ):
            if books is not None:
                books.zero_()
        if router.quantile is not None:
            router.quantile.reset()
    for layer in _layers(chunks):
        layer.num_cloned_tokens = 0


def update_biases(chunks, ps: ParallelState, frozen: bool = False) -> None:
    """Move what biases the choice of experts: expert bias and quantile balancing; once per global batch. frozen: they stay."""
    update_expert_bias(chunks, ps, frozen)
    quantiles = [router for router in _routers(chunks) if router.quantile is not None]
    if quantiles:
        ema = quantiles[0].moe.moe_router_quantile_balancing_ema
        update_quantile_bias([router.quantile for router in quantiles], ps, ema, frozen)


@torch.no_grad()
def update_expert_bias(chunks, ps: ParallelState, frozen: bool = False) -> None:
    """Move every expert's bias by the update rate towards balance; once per global batch. frozen: the biases stay, the counts go.

    Communication: all layers' counts in one all-reduce over tp_dp_cp.
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
    """Balance of one iteration, as it is logged.

    losses: name -> mean over MoE layers and microbatches, without coefficient; names in the log line's order.
    per_layer: name -> mean over microbatches of every layer, 0 for dense ones; multi-token-prediction layers follow
    the decoder's. dropped_tokens: (token, expert) pairs beyond capacity, all layers, microbatches and ranks.
    """

    losses: dict[str, float]
    per_layer: dict[str, list[float]]
    dropped_tokens: int


def logged_losses(moe: MoEArgs) -> tuple[str, ...]:
    """Names that an iteration's record carries, in order: a name is there when its loss is asked for, even at coefficient 0.

    As in Megatron-LM the test on a single type is one on substrings: seq_aux_loss and global_aux_loss bring
    load_balancing_loss (0) along.
    """
    kinds = moe.moe_router_load_balancing_type
    names = [name for kind, name in BALANCING_TYPES if kind in kinds]
    return tuple(names + ["z_loss"] * (moe.moe_z_loss_coeff is not None))


def collect_moe_metrics(
    chunks, ps: ParallelState, num_microbatches: int, moe: MoEArgs, num_layers: int, device: torch.device | str = "cpu"
) -> MoeMetrics:
    """Read and reset the routers' accumulators; every rank gets the same values.

    Called on every rank of a model with experts, also where a pipeline stage has none. num_layers: of the whole model,
    multi-token-prediction layers included. device: where collectives take place.
    Communication: 6 * num_layers fp64 values over tp_dp_cp, then over pp; nothing on one rank.
    """
    if not moe.num_experts:
        return MoeMetrics({}, {}, 0)
    # columns: the four losses, drops, and whether the layer is an MoE layer
    table = torch.zeros(num_layers, len(LOSS_NAMES) + 2, dtype=torch.float64, device=device)
    for router in _routers(chunks):
        row = table[router.layer_number - 1]
        row[:4] = router.loss_sums
        row[4] = router.dropped
        row[5].fill_(1.0)  # an assignment would copy a number of the host, and wait for it
        router.loss_sums.zero_()
        router.dropped.zero_()
    # each rank holds its part of the sum over tp_cp (aux, seq) or tp_dp_cp (global); z-loss is a mean of local tokens
    all_reduce(table, ps.tp_dp_cp)
    table[:, :2] /= ps.dp.size
    table[:, 3] /= ps.tp_dp_cp.size
    table[:, 5] /= ps.tp_dp_cp.size
    all_reduce(table, ps.pp)
    rows = table.tolist()
    num_moe_layers = sum(row[5] > 0.5 for row in rows)
    losses, per_layer = {}, {}
    for name in logged_losses(moe):
        column = LOSS_NAMES.index(name)
        per_layer[name] = [row[column] / num_microbatches for row in rows]
        losses[name] = sum(per_layer[name]) / max(1, num_moe_layers)
    return MoeMetrics(losses, per_layer, round(sum(row[4] for row in rows)))

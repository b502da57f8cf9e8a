"""The router: which experts take each token, and with what weight.

Design: `TopKRouter` owns the weight and the running counts; everything it decides is in small functions of tensors
(`score_topk`, `sinkhorn_topk`, `drop_beyond_capacity`), so that each can be compared with its definition. Balancing losses have a
closed-form gradient (see balancing.py): they are computed without autograd and added to the logits' gradient, scaled by the
`grad_scale` that the caller passes. The result is dense, `probs_TE` and `routing_TE`: every dispatcher starts from these two.

Where the layer is recomputed in backward, everything that is decided, drawn or counted passes through `Activations.once`: the second
pass weighs the same experts, whatever rounding or a changed bias would choose now, and no count or loss is taken twice.

Numerics, as Megatron-Core since 0.18: logits in the activation dtype or --moe-router-dtype; scores, choice and normalization in fp32
(fp64 for fp64 logits), and the weights rounded to the dtype of the logits at the end; ties as torch.topk breaks them. The position drop policy keeps the first tokens of each expert (a stable choice).

Shape letters: S sequence, B microbatch, H hidden, T tokens (= S*B, token s*B + b), E experts, K top-k.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.fine_grid import FineGrid
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.dropout import drawing
from moe_trainer.layers.init import hidden_init, make_parameter
from moe_trainer.layers.kernels import Balancing
from moe_trainer.memory.activations import Activations
from moe_trainer.moe.balancing import (
    LOSS_NAMES,
    attach_gradient,
    balancing_losses,
    loss_coefficients,
    scores_and_counts,
)
from moe_trainer.moe.dispatch.base import Once, at_once
from moe_trainer.moe.finermoe import choose_slices
from moe_trainer.moe.margin import choice_margin, in_best_groups
from moe_trainer.moe.quantile_balancing import KIND as QUANTILE_BALANCING
from moe_trainer.moe.quantile_balancing import QuantileBias
from moe_trainer.ops.main_grad import sum_for, widens
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.rng import ShardStream
from moe_trainer.parallel.state import ParallelState

ROUTER_DTYPES = (("fp32", torch.float32), ("fp64", torch.float64))


class _Gate(torch.autograd.Function):
    """x @ w^T in a dtype that x and w need not have, without keeping converted copies for backward."""

    @staticmethod
    def forward(ctx, x_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.weight = weight_EH
        if dtype == torch.float32 and x_TH.dtype == weight_EH.dtype and widens(x_TH):
            return torch.mm(x_TH, weight_EH.t(), out_dtype=dtype)  # the same sums, without copies
        return x_TH.to(dtype) @ weight_EH.to(dtype).t()

    @staticmethod
    def backward(ctx, grad_TE: Tensor):
        x_TH, weight_EH = ctx.saved_tensors
        dtype = grad_TE.dtype
        grad_x = (grad_TE @ weight_EH.to(dtype)).to(x_TH.dtype)
        x_TH, total = x_TH.to(dtype), sum_for(ctx.weight, grad_TE)
        if total is None:
            return grad_x, (grad_TE.t() @ x_TH).to(weight_EH.dtype), None
        total.add(grad_TE.t(), x_TH)
        return grad_x, None, None


class _StraightThrough(torch.autograd.Function):
    """Forward the replacement, send the gradient to the original."""

    @staticmethod
    def forward(ctx, original: Tensor, replacement: Tensor) -> Tensor:
        return replacement

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def group_limited_topk(scores_TE: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    """Top-k experts among those of the best groups. Returns indices_TK.

    A group's score is the sum of its top (topk // group_topk) scores.
    Source: DeepSeek-V2, section 2.1.3; DeepSeek-V3, section 2.1.2.
    """
    return in_best_groups(scores_TE, topk, num_groups, group_topk)[1].topk(topk, dim=-1)[1]


@torch.no_grad()
def _select(scores_TE: Tensor, topk: int, num_groups: int | None, group_topk: int | None, grid: FineGrid | None = None) -> Tensor:
    if grid is not None:
        return choose_slices(scores_TE, grid, topk)
    if group_topk:
        return group_limited_topk(scores_TE, topk, num_groups, group_topk)
    return scores_TE.topk(topk, dim=-1)[1]


def score_topk(
    logits_TE: Tensor,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias_E: Tensor | None = None,
    once: Once = at_once,
    grid: FineGrid | None = None,
    chosen_TK: Tensor | None = None,
    routing_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose top-k experts per token and weigh them.

    Scores, choice and weights are in fp32 at least; the weights are rounded to the dtype of the logits at the end. The bias takes part in
    the choice only; weights come from unbiased scores. once: is asked for the choice.
    grid: of FineRMoE, which chooses by logits; with softmax over the chosen only. chosen_TK, routing_TE: experts that the caller has chosen already.
    Returns: probs_TE in the dtype of the logits, zero where not chosen; routing_TE bool.
    """
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    biased_TE = scores_TE = logits_TE
    if score_function != "softmax":
        raw_TE = logits_TE.to(wide)
        scores_TE = torch.sigmoid(raw_TE) if score_function == "sigmoid" else F.softplus(raw_TE).sqrt()
        biased_TE = scores_TE if expert_bias_E is None else scores_TE + expert_bias_E
    elif pre_softmax:
        biased_TE = scores_TE = torch.softmax(logits_TE, dim=-1, dtype=wide)
    if chosen_TK is None:
        chosen_TK = once(lambda: _select(biased_TE, topk, num_groups, group_topk, grid))
    if routing_TE is None:
        routing_TE = as_map(chosen_TK, logits_TE)
    shared = score_function == "sigmoid" and topk > 1
    if logits_TE.is_cuda and (shared or score_function == "softmax" and not pre_softmax):
        # a pass over all experts is fewer kernels than picking the weights of the chosen ones and putting them back
        return _Shares.apply(logits_TE, scores_TE.detach() if shared else None, routing_TE, scaling_factor or 1.0), routing_TE
    weights_TK = scores_TE.gather(1, chosen_TK)
    if score_function == "softmax" and not pre_softmax:
        weights_TK = torch.softmax(weights_TK, dim=-1, dtype=wide)
    elif score_function != "softmax" and topk > 1:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    if scaling_factor:
        weights_TK = weights_TK * scaling_factor
    return torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK.to(logits_TE.dtype)), routing_TE


def as_map(chosen_TK: Tensor, logits_TE: Tensor) -> Tensor:
    """Chosen experts as bool [T, E]."""
    return torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)


class _Shares(torch.autograd.Function):
    """Softmax over the chosen experts, or their sigmoids over the sum of these, times a factor; 0 for the others."""

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
        grad_TE = grad_TE.to(share_TE.dtype) if ctx.factor == 1.0 else torch.mul(grad_TE, ctx.factor, out=torch.empty_like(share_TE))
        # both are the gradient of shares of a sum; that of a sigmoid's logarithm is 1 - sigmoid
        grad_TE = torch._softmax_backward_data(grad_TE, share_TE, -1, share_TE.dtype)  # CUDA's writes no bf16 of an fp32 gradient
        return (grad_TE if sigmoid_TE is None else grad_TE * (1.0 - sigmoid_TE)).to(ctx.dtype), None, None, None


SINKHORN_ROUNDS = 8  # after so many the host of a device asks whether it is over


def sinkhorn(cost_TE: Tensor, tolerance: float = 1e-4, max_rounds: int = 1000, ask_after: int | None = None) -> Tensor:
    """Scale exp(cost) so that all tokens weigh the same and all experts get the same total.

    Source: Sinkhorn's iteration, stopped when the column factors move by less than `tolerance` on average. The tolerance is
    absolute, so factors too large for it in fp32 would never stop: hence the bound. ask_after: rounds until the host asks whether it is over,
    for which it waits; those after the end change nothing. None: on a CPU every round, on a device SINKHORN_ROUNDS.
    """
    ask_after = ask_after or (SINKHORN_ROUNDS if cost_TE.is_cuda else 1)
    cost_TE = torch.exp(cost_TE)
    rows_T = torch.ones(cost_TE.shape[0], device=cost_TE.device, dtype=cost_TE.dtype)
    cols_E = torch.ones(cost_TE.shape[1], device=cost_TE.device, dtype=cost_TE.dtype)
    eps, over = 1e-8, None
    for number in range(1, max_rounds + 1):
        next_rows_T = (1.0 / rows_T.numel()) / ((cols_E * cost_TE).sum(1) + eps)
        next_cols_E = (1.0 / cols_E.numel()) / ((next_rows_T.unsqueeze(1) * cost_TE).sum(0) + eps)
        ends = (cols_E - next_cols_E).abs().mean() <= tolerance
        if over is None:
            rows_T, cols_E, over = next_rows_T, next_cols_E, ends
        else:
            rows_T, cols_E, over = torch.where(over, rows_T, next_rows_T), torch.where(over, cols_E, next_cols_E), over | ends
        if number % ask_after == 0:
            if over.item():
                break
            over = None
    return cols_E * cost_TE * rows_T.unsqueeze(1)


def sinkhorn_topk(logits_TE: Tensor, topk: int, balance: bool, once: Once = at_once) -> tuple[Tensor, Tensor]:
    """Choose experts by the Sinkhorn-normalised logits; weigh with sigmoid (top-1) or softmax (top-k).

    balance False (evaluation) chooses by the weights themselves. once: is asked for the choice. Returns: probs_TE, routing_TE.
    """
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    if topk == 1:
        scores_TE = torch.sigmoid(logits_TE)
    else:
        scores_TE = torch.softmax(logits_TE, dim=-1, dtype=wide).to(logits_TE.dtype)
    with torch.no_grad():
        indices_TK = once(lambda: (sinkhorn(logits_TE.to(wide)) if balance else scores_TE).topk(topk, dim=1)[1])
        routing_TE = as_map(indices_TK, logits_TE)
    return scores_TE * routing_TE, routing_TE


def expert_capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Rows an expert accepts: ceil(tokens * topk / experts * factor), at most every token once."""
    return min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))


def drop_beyond_capacity(
    probs_TE: Tensor, routing_TE: Tensor, capacity: int, policy: str, pad: bool, once: Once = at_once
) -> tuple[Tensor, Tensor]:
    """Keep at most `capacity` tokens per expert: the largest probabilities ("probs") or the first ("position").

    The kept probabilities are not renormalised. With pad, experts that have fewer take further tokens, with probability 0, until
    they have exactly `capacity`. once: is asked for the choice.
    Returns: probs_TE, routing_TE.
    """
    kept_TE = once(lambda: _keep(probs_TE.detach(), routing_TE, capacity, policy, pad))
    return probs_TE * kept_TE, kept_TE


def _keep(probs_TE: Tensor, routing_TE: Tensor, capacity: int, policy: str, pad: bool) -> Tensor:
    # tokens of the expert first, the rest (candidates for padding) behind them; equal keys keep token order
    key_TE = routing_TE.to(torch.float64)
    if policy == "probs":
        key_TE = key_TE * 2 + probs_TE
    order_TE = key_TE.argsort(dim=0, descending=True, stable=True)[:capacity]
    kept_TE = torch.zeros_like(routing_TE).scatter_(0, order_TE, True)
    return kept_TE if pad else kept_TE & routing_TE


class TopKRouter(nn.Module):
    """Route tokens to experts.

    Buffers: expert_bias [E] fp32 (persistent) and local_tokens_per_expert [E] with --moe-router-enable-expert-bias;
    global_tokens_per_expert [E] and ga_steps with global_aux_loss; tokens_per_expert [E], what was chosen before drops, with
    --moe-per-layer-logging. `quantile`: the bias of quantile balancing, None otherwise. `recorder`: None, or a list that receives the logits, probs
    and map of every forward pass.
    """

    def __init__(self, model: ModelArgs, moe: MoEArgs, ps: ParallelState, name: str, layer_number: int, *,
                 per_token_loss: bool = False, stream: ShardStream | None = None, activations: Activations | None = None):
        """stream: random numbers of this rank of tp, whose rows are its own; None for torch's global ones. activations: the chunk's."""
        super().__init__()
        self.activations = activations or Activations()
        self.stream = stream
        self.moe, self.ps, self.name, self.layer_number = moe, ps, name, layer_number
        self.num_experts, self.topk, self.grid = moe.num_experts, moe.moe_router_topk, moe.finermoe
        self.dtype = dict(ROUTER_DTYPES).get(moe.moe_router_dtype)
        self.coefficients = loss_coefficients(moe)
        self.per_token_loss = per_token_loss
        self.recorder: list | None = None
        self.fused_topk: Callable | None = None  # kernels: set when the model is built; see dispatch/choose.py
        self.balancing: Balancing | None = None
        init, partial = hidden_init(model), ps.tp.size > 1  # every rank of tp routes rows of its own
        self.weight = make_parameter((self.num_experts, model.hidden_size), ParamInfo(
            (f"{name}.weight",), partial=partial, init=init.kind, init_std=init.std))
        self.bias = make_parameter((self.num_experts,), ParamInfo(
            (f"{name}.bias",), partial=partial, init="zeros")) if model.add_bias_linear else None
        self._make_buffers()
        self.quantile = QuantileBias(self.num_experts, ps.tp_cp) if moe.moe_router_load_balancing_type == QUANTILE_BALANCING else None

    def _make_buffers(self):
        def counts(buffer_name, persistent=False, shape=(self.num_experts,)):
            self.register_buffer(buffer_name, torch.zeros(shape, dtype=torch.float32), persistent=persistent)

        if self.moe.moe_router_enable_expert_bias:
            counts("expert_bias", persistent=True)
            counts("local_tokens_per_expert")
        else:
            self.register_buffer("expert_bias", None)
        if self.coefficients["global_load_balancing_loss"]:
            counts("global_tokens_per_expert")
            counts("ga_steps", shape=())
        if self.moe.moe_per_layer_logging:
            counts("tokens_per_expert")
        else:
            self.register_buffer("tokens_per_expert", None)
        counts("loss_sums", shape=(len(LOSS_NAMES),))
        counts("dropped", shape=())
        self.fixed_bias, self.bias_stream = None, None
        if self.moe.moe_router_force_biased is not None:
            self.bias_stream = torch.Generator(device="cpu").manual_seed(self.layer_number)
            if self.moe.moe_router_force_biased < 0:
                self.fixed_bias = self._draw_bias()

    def _apply(self, fn, recurse=True):
        # counts and biases stay fp32 whatever the model is cast to: bf16 counts stop growing at 256
        super()._apply(fn, recurse)
        for buffer_name, buffer in self.named_buffers(recurse=False):
            setattr(self, buffer_name, buffer.float())
        return self

    def draw_logits(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Draw the logits that --moe-router-force-load-balancing puts in place of the router's own; None without it.

        Each rank of tp draws for its own tokens. A region that runs again reuses what its first pass drew.
        """
        if not self.moe.moe_router_force_load_balancing:
            return None
        generator = None if self.stream is None else self.stream.generator(device)
        return self.activations.once(lambda: torch.randn(
            num_tokens, self.num_experts, dtype=self.dtype or self.weight.dtype, device=device, generator=generator))

    def forward(self, x_SBH: Tensor, grad_scale: float | Tensor = 1.0, drawn_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route the tokens of one microbatch.

        Shapes: x_SBH [S, B, hidden]. Returns: probs_TE (logits' dtype), routing_TE bool.
        grad_scale: factor of the auxiliary losses' gradients. drawn_TE: of `draw_logits`; None: they are drawn here, if any are wanted.
        Communication: E counts over tp_cp (aux_loss, seq_aux_loss: B*E) or tp_dp_cp (global_aux_loss).
        """
        active = self.training and torch.is_grad_enabled()
        x_TH = x_SBH.reshape(-1, x_SBH.shape[-1])
        if drawn_TE is None:
            drawn_TE = self.draw_logits(x_TH.shape[0], x_TH.device)
        logits_TE = self._force(self._logits(x_TH, active), drawn_TE)
        wants_losses = active and (any(self.coefficients.values()) or self.moe.moe_z_loss_coeff is not None)
        unaided_TE = logits_TE.detach()
        chosen_TK = self._plain_choice(unaided_TE)
        routing_TE = None if chosen_TK is None else as_map(chosen_TK, unaided_TE)
        if wants_losses:
            grad_TE = self.activations.once(lambda: self._losses(unaided_TE, x_SBH.shape, routing_TE))
            attach = attach_gradient if self.balancing is None else self.balancing.attach
            logits_TE = attach(logits_TE, grad_TE, grad_scale)
        probs_TE, routing_TE = self._route(logits_TE, chosen_TK, routing_TE)
        if self.tokens_per_expert is not None and active and not self.activations.replaying:
            self.tokens_per_expert += routing_TE.sum(0)
        if self._drops():
            probs_TE, routing_TE = self._drop(probs_TE, routing_TE)
        if not self.activations.replaying:
            self._write_down(unaided_TE, probs_TE, routing_TE, active)
        return probs_TE, routing_TE

    def _write_down(self, logits_TE: Tensor, probs_TE: Tensor, routing_TE: Tensor, active: bool) -> None:
        if self.expert_bias is not None and active:
            self.local_tokens_per_expert += routing_TE.sum(0)
        if self.recorder is not None:
            self.recorder.append({"logits": logits_TE, "probs": probs_TE.detach(), "map": routing_TE})

    def _logits(self, x_TH: Tensor, active: bool) -> Tensor:
        eps = self.moe.moe_input_jitter_eps
        if eps is not None and active:
            with drawing(self.stream, x_TH.device):
                x_TH = x_TH * torch.empty_like(x_TH).uniform_(1.0 - eps, 1.0 + eps)
        dtype = self.dtype or self.weight.dtype
        if dtype == x_TH.dtype == self.weight.dtype and not hasattr(self.weight, "main_grad_sum"):
            logits_TE = F.linear(x_TH, self.weight)
        else:
            logits_TE = _Gate.apply(x_TH, self.weight, dtype)
        return logits_TE if self.bias is None else logits_TE + self.bias.to(logits_TE.dtype)

    def _draw_bias(self) -> Tensor:
        spread = abs(self.moe.moe_router_force_biased)
        return torch.empty(self.num_experts, device="cpu").normal_(0.0, spread, generator=self.bias_stream)

    def _force(self, logits_TE: Tensor, drawn_TE: Tensor | None) -> Tensor:
        """Benchmark modes: random logits (balanced), or an expert bias of the asked spread (unbalanced)."""
        if drawn_TE is not None:
            logits_TE = _StraightThrough.apply(logits_TE, drawn_TE.to(logits_TE.dtype))
        if self.moe.moe_router_force_biased is not None:
            bias_E = self.activations.once(self._draw_bias) if self.fixed_bias is None else self.fixed_bias
            logits_TE = logits_TE + bias_E.to(logits_TE)
        return logits_TE

    def _plain_choice(self, logits_TE: Tensor) -> Tensor | None:
        """The experts of the largest logits, where these are chosen: the same that balancing losses count. None where others may be."""
        moe = self.moe
        if (moe.moe_router_score_function != "softmax" or moe.moe_router_group_topk or self.grid is not None or self.quantile is not None
                or self.fused_topk is not None or moe.moe_router_load_balancing_type == "sinkhorn"):
            return None
        return self.activations.once(lambda: logits_TE.topk(self.topk, dim=1)[1])

    def _route(self, logits_TE: Tensor, chosen_TK: Tensor | None, routing_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        moe = self.moe
        if moe.moe_router_load_balancing_type == "sinkhorn":
            return sinkhorn_topk(logits_TE, self.topk, balance=self.training, once=self.activations.once)
        if self.quantile is not None:
            estimate = self.training and torch.is_grad_enabled()
            chosen_TK = self.activations.once(lambda: self.quantile.choose(logits_TE.detach(), self.topk, estimate))
        elif self.fused_topk is not None:
            # the kernel cannot be told what to choose: when the layer is recomputed it gets the same numbers
            bias_E = None if self.expert_bias is None else self.activations.once(self.expert_bias.clone)
            return self.fused_topk(
                logits_TE, self.topk, use_pre_softmax=moe.moe_router_pre_softmax, num_groups=moe.moe_router_num_groups,
                group_topk=moe.moe_router_group_topk, scaling_factor=moe.moe_router_topk_scaling_factor,
                score_function=moe.moe_router_score_function, expert_bias=bias_E)
        return score_topk(
            logits_TE,
            self.topk,
            score_function=moe.moe_router_score_function,
            pre_softmax=moe.moe_router_pre_softmax,
            num_groups=moe.moe_router_num_groups,
            group_topk=moe.moe_router_group_topk,
            scaling_factor=moe.moe_router_topk_scaling_factor,
            expert_bias_E=self.expert_bias,
            once=self.activations.once,
            grid=self.grid,
            chosen_TK=chosen_TK,
            routing_TE=routing_TE,
        )

    def margin(self, logits_TE: Tensor) -> Tensor | None:
        """`choice_margin` of a microbatch's tokens; None where a choice is no order of a token's own scores."""
        moe = self.moe
        if self.grid is not None or moe.moe_router_load_balancing_type == "sinkhorn":
            return None
        if self.quantile is not None:  # chooses by biased logits, whatever the score function
            return choice_margin(logits_TE.float() - self.quantile.bias_E, self.topk, "softmax")
        return choice_margin(logits_TE, self.topk, moe.moe_router_score_function, moe.moe_router_num_groups, moe.moe_router_group_topk, self.expert_bias)

    def _losses(self, logits_TE: Tensor, shape: torch.Size, routing_TE: Tensor | None) -> Tensor:
        """Count the losses; returns their gradient. routing_TE: the plain top-k, if it is known."""
        moe = self.moe
        running = None
        if self.coefficients["global_load_balancing_loss"]:
            running = (self.global_tokens_per_expert, self.ga_steps)
        if self.grid is not None:  # what FineRMoE chooses is counted
            routing_TE = as_map(choose_slices(logits_TE, grid=self.grid, topk=self.topk), logits_TE)
        losses = balancing_losses(
            logits_TE,
            num_sequences=shape[1],
            topk=self.topk,
            score_function=moe.moe_router_score_function,
            coefficients=self.coefficients,
            z_loss_coeff=moe.moe_z_loss_coeff,
            per_token_loss=self.per_token_loss,
            running=running,
            ps=self.ps,
            counts=scores_and_counts if routing_TE is None else functools.partial(scores_and_counts, chosen_TE=routing_TE),
            kernels=self.balancing if self.grid is None else None,
        )
        self.loss_sums += losses.values
        return losses.grad_TE

    def _drops(self) -> bool:
        factor = self.moe.moe_expert_capacity_factor
        return factor is not None and factor >= 0

    def _drop(self, probs_TE: Tensor, routing_TE: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.moe
        capacity = expert_capacity(routing_TE.shape[0], self.topk, self.num_experts, moe.moe_expert_capacity_factor)
        probs_TE, kept_TE = drop_beyond_capacity(
            probs_TE, routing_TE, capacity, moe.moe_token_drop_policy, moe.moe_pad_expert_input_to_capacity,
            once=self.activations.once,
        )
        if self.training and torch.is_grad_enabled() and not self.activations.replaying:
            self.dropped += (routing_TE & ~kept_TE).sum()
        return probs_TE, kept_TE

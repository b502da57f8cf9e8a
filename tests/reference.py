"""Reference MoE transformer for equality tests: one process, loops over tokens and experts, autograd throughout.

Written from the definitions, sharing no code with moe_trainer. Weights are a dict by global name; `args` is the
container of sections (or anything with the same fields). Slow on purpose; run it in fp64 on tiny sizes.

Shape letters: S sequence, B microbatch, H hidden, T tokens (= S*B, token s*B + b), E experts.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from finermoe_reference import find_grid
from torch import Tensor

SPLITS = [
    find_grid,
]


@dataclass
class Balance:
    """Auxiliary losses of one microbatch's MoE layers, and the values that are logged."""

    total: Tensor | float = 0.0  # weighted sum of all auxiliary losses
    values: dict = field(default_factory=dict)  # (layer name, loss name) -> value without coefficient
    maps: dict = field(default_factory=dict)  # layer name -> final routing map
    probs: dict = field(default_factory=dict)
    dropped: int = 0


def compute_scores(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return torch.exp(logits) / torch.exp(logits).sum()
    if score_function == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return torch.sqrt(torch.log1p(torch.exp(logits)))


def top_indices(scores: list[float], k: int) -> list[int]:
    """Return the positions of the k largest scores."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:k]


def find_split(moe):
    """Return how experts divide the output of a layer: `choose(logits)`, `slices`, `projection`; None if they do not."""
    return next((split for split in (each(moe) for each in SPLITS) if split is not None), None)


def choose_experts(scores: list[float], moe) -> list[int]:
    """Return the top-k experts, limited to the top_indices groups if group-limited routing is on."""
    k = moe.moe_router_topk
    if (split := find_split(moe)) is not None:
        return split.choose(scores)
    if not moe.moe_router_group_topk:
        return top_indices(scores, k)
    size = len(scores) // moe.moe_router_num_groups
    groups = [scores[g * size : (g + 1) * size] for g in range(moe.moe_router_num_groups)]
    scored = moe.moe_router_group_score_topk or k // moe.moe_router_group_topk
    group_scores = [sum(sorted(group)[-scored:]) for group in groups]
    allowed = top_indices(group_scores, moe.moe_router_group_topk)
    return top_indices([s if e // size in allowed else -math.inf for e, s in enumerate(scores)], k)


def route_token(logits: Tensor, moe, bias: Tensor | None) -> tuple[list[int], Tensor]:
    """Return one token's experts and their weights."""
    k, kind = moe.moe_router_topk, moe.moe_router_score_function
    if kind == "softmax" and not moe.moe_router_pre_softmax:
        chosen = choose_experts((logits if bias is None else logits + bias).tolist(), moe)
        weights = compute_scores(logits[chosen], "softmax")
    else:
        scores = compute_scores(logits, kind)
        chosen = choose_experts((scores if bias is None else scores + bias).tolist(), moe)
        weights = scores[chosen]
        if kind != "softmax" and k > 1:
            weights = weights / (weights.sum() + 1e-20)
    return chosen, weights * (moe.moe_router_topk_scaling_factor or 1.0)


def route(logits_TE: Tensor, moe, bias: Tensor | None) -> tuple[list[dict[int, Tensor]], int]:
    """Return {expert: weight} for every token after drops, and the number of dropped pairs."""
    num_tokens, num_experts = logits_TE.shape
    routes = [dict(zip(*route_token(logits_TE[t], moe, bias))) for t in range(num_tokens)]
    if moe.moe_expert_capacity_factor is None:
        return routes, 0
    dropped = 0
    capacity = math.ceil(num_tokens * moe.moe_router_topk / num_experts * moe.moe_expert_capacity_factor)
    for expert in range(num_experts):
        assigned = [t for t in range(num_tokens) if expert in routes[t]]
        if moe.moe_token_drop_policy == "probs":
            assigned.sort(key=lambda t: -routes[t][expert].item())
        for t in assigned[capacity:]:
            del routes[t][expert]
            dropped += 1
        if moe.moe_pad_expert_input_to_capacity:
            others = [t for t in range(num_tokens) if t not in assigned]
            for t in others[: max(0, min(capacity, num_tokens) - len(assigned))]:
                routes[t][expert] = logits_TE.new_zeros(())
    return routes, dropped


def balancing_loss(scores_TE: Tensor, counts_E: Tensor, num_tokens: int, k: int) -> Tensor:
    """Return E / (k * N^2) * sum_e (sum_t score) * count."""
    return scores_TE.shape[1] / (k * num_tokens**2) * (scores_TE.sum(0) * counts_E).sum()


def add_balance(logits_TE: Tensor, shape, moe, name: str, balance: Balance, earlier_counts: list[Tensor]) -> None:
    """Add the auxiliary losses of one layer and microbatch.

    earlier_counts: counts of this iteration's earlier microbatches (appended to).
    """
    kinds, coeffs = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    coefficients = dict(zip([kinds], [coeffs])) if isinstance(kinds, str) else dict(zip(kinds, coeffs))
    num_tokens = len(logits_TE)
    length, batch = shape
    k = moe.moe_router_topk
    scores_TE = torch.stack([compute_scores(row, moe.moe_router_score_function) for row in logits_TE])
    scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    chosen_TE = torch.zeros_like(scores_TE)
    split = find_split(moe)
    for t in range(num_tokens):
        chosen_TE[
            t, top_indices(scores_TE[t].tolist(), k) if split is None else split.choose(logits_TE[t].tolist())
        ] = 1
    counts_E = chosen_TE.sum(0)
    if coefficients.get("aux_loss"):
        loss = balancing_loss(scores_TE, counts_E, num_tokens, k)
        balance.values[name, "load_balancing_loss"] = loss.item()
        balance.total = balance.total + coefficients["aux_loss"] * loss
    if coefficients.get("seq_aux_loss"):
        parts = [balancing_loss(scores_TE[b::batch], chosen_TE[b::batch].sum(0), length, k) for b in range(batch)]
        loss = sum(parts) / batch
        balance.values[name, "seq_load_balancing_loss"] = loss.item()
        balance.total = balance.total + coefficients["seq_aux_loss"] * loss
    if coefficients.get("global_aux_loss"):
        earlier_counts.append(counts_E)
        loss = balancing_loss(scores_TE, sum(earlier_counts) / len(earlier_counts), num_tokens, k)
        balance.values[name, "global_load_balancing_loss"] = loss.item()
        balance.total = balance.total + coefficients["global_aux_loss"] * loss
    if moe.moe_z_loss_coeff is not None:
        loss = torch.log(torch.exp(logits_TE).sum(-1)).pow(2).mean()
        balance.values[name, "z_loss"] = loss.item()
        balance.total = balance.total + moe.moe_z_loss_coeff * loss


def feed_forward(
    x_H: Tensor, w1: Tensor, w2: Tensor, model, b1: Tensor | None = None, b2: Tensor | None = None
) -> Tensor:
    """Apply one feed-forward network to one token."""
    h = w1 @ x_H
    if b1 is not None:
        h = h + b1
    if model.swiglu:
        gate, up = h[: len(h) // 2], h[len(h) // 2 :]
        a = gate * torch.sigmoid(gate) * up
    elif model.squared_relu:
        a = h.clamp(min=0) ** 2
    else:
        a = F.gelu(h, approximate="tanh" if model.bias_gelu_fusion and model.add_bias_linear else "none")
    y = w2 @ a
    return y if b2 is None else y + b2


def moe_layer(
    x_SBH: Tensor,
    params: dict[str, Tensor],
    name: str,
    args,
    balance: Balance,
    bias: Tensor | None = None,
    earlier_counts: list[Tensor] | None = None,
) -> Tensor:
    """Apply the MoE layer `name` (e.g. "decoder.layers.0.mlp"). bias: the expert bias."""
    moe, model = args.moe, args.model
    length, batch, hidden = x_SBH.shape
    x_TH = x_SBH.reshape(-1, hidden)
    logits_TE = x_TH @ params[f"{name}.router.weight"].t()
    if f"{name}.router.bias" in params:
        logits_TE = logits_TE + params[f"{name}.router.bias"]
    add_balance(logits_TE, (length, batch), moe, name, balance, [] if earlier_counts is None else earlier_counts)
    routes, dropped = route(logits_TE, moe, bias)
    balance.dropped += dropped
    balance.maps[name] = torch.tensor([[e in r for e in range(moe.num_experts)] for r in routes])
    balance.probs[name] = torch.stack(
        [torch.stack([r.get(e, x_TH.new_zeros(())) for e in range(moe.num_experts)]) for r in routes]
    )
    down, up = (params.get(f"{name}.{leaf}_latent_proj.weight") for leaf in ("fc1", "fc2"))
    down_bias, up_bias = (params.get(f"{name}.{leaf}_latent_proj.bias", 0.0) for leaf in ("fc1", "fc2"))
    split = find_split(moe)
    slices = 1 if split is None else split.slices
    rows = []
    for t, experts in enumerate(routes):
        read = x_TH[t] if down is None else down @ x_TH[t] + down_bias
        parts = [read.new_zeros(len(read) // slices) for _ in range(slices)]
        for e, weight in experts.items():
            prefix = f"{name}.experts.local_experts.{e}"
            x_in = read * weight if moe.moe_apply_probs_on_input else read
            out = feed_forward(
                x_in,
                params[f"{prefix}.linear_fc1.weight"],
                params[f"{prefix}.linear_fc2.weight"],
                model,
                params.get(f"{prefix}.linear_fc1.bias"),
                params.get(f"{prefix}.linear_fc2.bias"),
            )
            parts[e // (moe.num_experts // slices)] += out if moe.moe_apply_probs_on_input else weight * out
        y = torch.cat(parts)
        y = y if up is None else up @ y + up_bias
        projection = None if split is None else params.get(f"{name}.{split.projection}.weight")
        y = y if projection is None else projection @ y
        shared = f"{name}.shared_experts"
        if f"{shared}.linear_fc1.weight" in params:
            out = feed_forward(
                x_TH[t], params[f"{shared}.linear_fc1.weight"], params[f"{shared}.linear_fc2.weight"], model
            )
            if f"{shared}.gate_weight" in params:
                out = out * torch.sigmoid(params[f"{shared}.gate_weight"] @ x_TH[t])
            y = y + out
        rows.append(y)
    return torch.stack(rows).view_as(x_SBH)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x_SD: Tensor, base: float, pairs: bool = False) -> Tensor:
    """Apply rotary embedding to one head: complex numbers are (first half, second half), or neighbors (pairs)."""
    length, dim = x_SD.shape
    angles = torch.outer(
        torch.arange(length, dtype=x_SD.dtype), base ** (-torch.arange(0, dim, 2, dtype=x_SD.dtype) / dim)
    )
    first, second = (x_SD[:, ::2], x_SD[:, 1::2]) if pairs else (x_SD[:, : dim // 2], x_SD[:, dim // 2 :])
    rotated_pairs = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.stack(rotated_pairs, -1).flatten(-2) if pairs else torch.cat(rotated_pairs, -1)


def causal(query_SD: Tensor, key_SD: Tensor, value_SD: Tensor) -> Tensor:
    """Return causal softmax attention of one head."""
    scores = query_SD @ key_SD.t() / math.sqrt(query_SD.shape[1])
    mask = torch.ones(len(scores), len(scores)).tril() == 0
    return scores.masked_fill(mask, -math.inf).softmax(-1) @ value_SD


def attention(x_SH: Tensor, params: dict[str, Tensor], name: str, model) -> Tensor:
    """Return causal grouped-query attention of one sequence. The qkv rows are [q .. q, k, v] per key-value group."""
    heads, groups, dim = model.num_attention_heads, model.query_groups, model.kv_channels
    per_group = heads // groups
    qkv = x_SH @ params[f"{name}.linear_qkv.weight"].t()
    if f"{name}.linear_qkv.bias" in params:
        qkv = qkv + params[f"{name}.linear_qkv.bias"]
    qkv = qkv.view(len(x_SH), groups, per_group + 2, dim)

    def rotated(head_SD: Tensor, kind: str) -> Tensor:
        if model.qk_layernorm:
            head_SD = rms_norm(head_SD, params[f"{name}.{kind}_layernorm.weight"], model.layernorm_epsilon)
        return rotate(head_SD, model.rotary_base)

    out = []
    for g in range(groups):
        key, value = rotated(qkv[:, g, per_group], "k"), qkv[:, g, per_group + 1]
        out += [causal(rotated(qkv[:, g, h], "q"), key, value) for h in range(per_group)]
    return torch.cat(out, -1) @ params[f"{name}.linear_proj.weight"].t()


def latent_attention(x_SH: Tensor, params: dict[str, Tensor], name: str, model) -> Tensor:
    """Return latent attention of one sequence: low-rank queries, keys and values, one rotary key for all heads."""
    heads, nope, rope, width = model.num_attention_heads, model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim

    def project(x: Tensor, leaf: str) -> Tensor:
        return x @ params[f"{name}.{leaf}.weight"].t()

    def normalized(x: Tensor, leaf: str) -> Tensor:
        epsilon = model.attention_latent_norm_epsilon or model.layernorm_epsilon
        return rms_norm(x, params[f"{name}.{leaf}.weight"], epsilon) if model.qk_layernorm else x

    if model.q_lora_rank is None:
        queries = project(x_SH, "linear_q_proj")
    else:
        queries = project(normalized(project(x_SH, "linear_q_down_proj"), "q_layernorm"), "linear_q_up_proj")
    down = project(x_SH, "linear_kv_down_proj")
    shared_key = rotate(down[:, model.kv_lora_rank :], model.rotary_base, pairs=True)
    kv = project(normalized(down[:, : model.kv_lora_rank], "kv_layernorm"), "linear_kv_up_proj")
    out = []
    for query, key_value in zip(queries.split(nope + rope, 1), kv.split(nope + width, 1)):
        query = torch.cat([query[:, :nope], rotate(query[:, nope:], model.rotary_base, pairs=True)], 1)
        out.append(causal(query, torch.cat([key_value[:, :nope], shared_key], 1), key_value[:, nope:]))
    assert len(out) == heads
    return project(torch.cat(out, -1), "linear_proj")


@dataclass
class ForwardPass:
    """State of one microbatch's forward pass: weights, flags, and accumulated auxiliary losses.

    Attributes:
        counts: by layer name, token counts of this iteration's earlier microbatches (global_aux_loss).
        biases: by layer name, the expert bias.
    """

    params: dict[str, Tensor]
    args: object
    balance: Balance
    counts: dict[str, list[Tensor]]
    biases: dict[str, Tensor]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.params[f"{name}.weight"], self.args.model.layernorm_epsilon)

    def layer(self, x_SBH: Tensor, name: str) -> Tensor:
        """Apply a transformer layer: attention, then a feed-forward or MoE layer, with pre-norm and residual."""
        model = self.args.model
        attend = latent_attention if model.multi_latent_attention else attention
        normalized = self.norm(x_SBH, f"{name}.input_layernorm")
        columns = [
            attend(normalized[:, b], self.params, f"{name}.self_attention", model) for b in range(normalized.shape[1])
        ]
        x_SBH = x_SBH + torch.stack(columns, 1)
        normalized, mlp = self.norm(x_SBH, f"{name}.pre_mlp_layernorm"), f"{name}.mlp"
        if f"{mlp}.router.weight" in self.params:
            counts = self.counts.setdefault(mlp, [])
            return x_SBH + moe_layer(
                normalized, self.params, mlp, self.args, self.balance, self.biases.get(mlp), counts
            )
        w1, w2 = (self.params[f"{mlp}.linear_{leaf}.weight"] for leaf in ("fc1", "fc2"))
        rows = [feed_forward(row, w1, w2, model) for row in normalized.reshape(-1, normalized.shape[-1])]
        return x_SBH + torch.stack(rows).view_as(normalized)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        return self.params["embedding.word_embeddings.weight"][tokens_BS.t()]

    def token_loss(self, x_SBH: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the cross-entropy of every token, [B, S]; the output layer may be tied to the embedding."""
        head = self.params.get("output_layer.weight", self.params["embedding.word_embeddings.weight"])
        logits_BSV = (x_SBH @ head.t()).transpose(0, 1)
        return torch.log(torch.exp(logits_BSV).sum(-1)) - logits_BSV.gather(-1, labels_BS.unsqueeze(-1)).squeeze(-1)

    def mtp_losses(self, x_SBH: Tensor, tokens_BS: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> list[Tensor]:
        """Return the mean loss of every multi-token-prediction depth; x_SBH is the decoder's normalized output."""
        losses = []
        for depth in range(self.args.model.mtp_num_layers or 0):
            tokens_BS, labels_BS, mask_BS = (shift(each) for each in (tokens_BS, labels_BS, mask_BS))
            name = f"mtp.layers.{depth}"
            joined = torch.cat(
                [self.norm(self.embed(tokens_BS), f"{name}.enorm"), self.norm(x_SBH, f"{name}.hnorm")], -1
            )
            x_SBH = self.layer(joined @ self.params[f"{name}.eh_proj.weight"].t(), f"{name}.mtp_model_layer")
            x_SBH = self.norm(x_SBH, f"{name}.final_layernorm")
            losses.append((self.token_loss(x_SBH, labels_BS) * mask_BS).sum() / mask_BS.sum())
        return losses


def shift(x_BS: Tensor) -> Tensor:
    """Shift by one position; zero at the end."""
    return torch.cat([x_BS[:, 1:], torch.zeros_like(x_BS[:, :1])], 1)


def transformer(
    tokens_BS: Tensor,
    labels_BS: Tensor,
    params: dict[str, Tensor],
    args,
    earlier_counts: dict[str, list[Tensor]] | None = None,
    biases: dict[str, Tensor] | None = None,
    mask_BS: Tensor | None = None,
) -> tuple[Tensor, Balance]:
    """Return loss_BS per token of a decoder (RMSNorm, rotary, dense or MoE layers), and its balance.

    The weighted losses of multi-token prediction are in the balance's total.

    `earlier_counts`: by layer name, counts of this iteration's earlier microbatches (global_aux_loss); appended to.
    `biases`: by layer name, the expert bias.
    """
    model = args.model
    run = ForwardPass(params, args, Balance(), {} if earlier_counts is None else earlier_counts, biases or {})
    x_SBH = run.embed(tokens_BS)
    for index in range(model.num_layers):
        x_SBH = run.layer(x_SBH, f"decoder.layers.{index}")
    x_SBH = run.norm(x_SBH, "decoder.final_layernorm")
    mask_BS = torch.ones_like(tokens_BS, dtype=x_SBH.dtype) if mask_BS is None else mask_BS
    for depth, loss in enumerate(run.mtp_losses(x_SBH, tokens_BS, labels_BS, mask_BS), start=1):
        run.balance.values["mtp", depth] = loss.item()
        run.balance.total = run.balance.total + model.mtp_loss_scaling_factor / model.mtp_num_layers * loss
    return run.token_loss(x_SBH, labels_BS), run.balance

"""FineRMoE for transformers: Qwen2 whose MLP layers have experts that compute slices of the output.

Tensor names are those of the published models (arXiv 2603.13364), so this file reads them too. Part of every exported
folder: transformers runs it with trust_remote_code=True. It computes no balancing loss.

Shape letters: T tokens, H hidden, W width of a slice, E experts, K chosen experts of a token.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model

from .configuration_finer_moe import FineRMoeConfig


class FineRMoeMLP(nn.Module):
    """A gated network to a given output width."""

    def __init__(self, config, intermediate_size, output_size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, output_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        """Return the output of x."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FineRMoeSparseMoeBlock(nn.Module):
    """Router, experts and the gated shared expert.

    Experts are ordered as [slice, candidate group, member]. A slice takes the group with the largest sum of logits, and
    in it the experts with the largest logits. The weights are a softmax over the chosen experts of all slices.
    """

    def __init__(self, config):
        super().__init__()
        self.top_k, self.slices, self.candidates = config.num_experts_per_tok, config.G_O, config.R_O
        self.group_size = config.G_I * config.R_I
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        bias = torch.zeros(config.num_experts) if config.moe_router_enable_expert_bias else None
        self.gate.register_buffer("e_score_correction_bias", bias)
        width = config.hidden_size // config.G_O
        self.experts = nn.ModuleList(
            FineRMoeMLP(config, config.moe_intermediate_size, width) for _ in range(config.num_experts)
        )
        self.concat_proj = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=False) if config.moe_concat_proj else None
        )
        shared = config.shared_expert_intermediate_size
        self.shared_expert = FineRMoeMLP(config, shared, config.hidden_size) if shared else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if shared else None

    def route(self, x_TH):
        """Return the chosen experts and their weights, both [T, K], the experts of a slice side by side."""
        logits_TE = F.linear(x_TH.float(), self.gate.weight.float())
        bias_E = self.gate.e_score_correction_bias
        biased_TE = logits_TE if bias_E is None else logits_TE + bias_E
        groups = biased_TE.unflatten(1, (self.slices, self.candidates, self.group_size))
        winner = groups.sum(-1).argmax(-1)  # [T, slices]
        of_winner = groups.gather(2, winner[..., None, None].expand(-1, -1, 1, self.group_size)).squeeze(2)
        members = of_winner.topk(self.top_k // self.slices, dim=-1)[1]
        first_group = torch.arange(self.slices, device=x_TH.device) * self.candidates
        chosen_TK = ((first_group + winner).unsqueeze(-1) * self.group_size + members).flatten(1)
        return chosen_TK, logits_TE.gather(1, chosen_TK).softmax(-1)

    def forward(self, hidden_states):
        """Return the output, in the shape of the input."""
        x_TH = hidden_states.flatten(0, -2)
        chosen_TK, weights_TK = self.route(x_TH)
        out_TSW = x_TH.new_zeros(x_TH.shape[0], self.slices, x_TH.shape[1] // self.slices)
        for expert in chosen_TK.unique().tolist():
            token, column = torch.where(chosen_TK == expert)
            y_RW = self.experts[expert](x_TH[token]) * weights_TK[token, column, None].to(x_TH.dtype)
            out_TSW[:, expert // (self.candidates * self.group_size)].index_add_(0, token, y_RW)
        y_TH = out_TSW.flatten(1)
        if self.concat_proj is not None:
            y_TH = self.concat_proj(y_TH)
        if self.shared_expert is not None:
            y_TH = y_TH + self.shared_expert_gate(x_TH).sigmoid() * self.shared_expert(x_TH)
        return y_TH.view_as(hidden_states)


class FineRMoeModel(Qwen2Model):
    """The decoder without the output head: Qwen2 with other MLP layers."""

    config_class = FineRMoeConfig

    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            if config.has_experts(number):
                layer.mlp = FineRMoeSparseMoeBlock(config)
        self.post_init()


class FineRMoeForCausalLM(Qwen2ForCausalLM):
    """The language model."""

    config_class = FineRMoeConfig
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]

    def __init__(self, config):
        super(Qwen2ForCausalLM, self).__init__(config)  # not Qwen2ForCausalLM's own, which would build a dense model
        self.model = FineRMoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


__all__ = ["FineRMoeForCausalLM", "FineRMoeModel"]

"""Configuration of FineRMoE models, with the key names of the published ones (arXiv 2603.13364).

Part of every exported folder: transformers runs this file with trust_remote_code=True.
"""

from transformers import Qwen2Config


class FineRMoeConfig(Qwen2Config):
    """Qwen2's configuration and that of the experts.

    Args:
        num_experts: G_O * R_O groups of G_I * R_I experts.
        num_experts_per_tok: the same number for every slice of the output, so a multiple of G_O.
        moe_intermediate_size: width of one expert.
        shared_expert_intermediate_size: width of the gated shared expert; 0 for none.
        G_I: experts that share the width of a dense layer.
        G_O: slices of the output.
        R_I: dense-layer widths in a group; 0 means as G_I.
        R_O: groups that a slice chooses from; 0 means as G_O.
        moe_concat_proj: multiply the concatenated slices by a square matrix.
        moe_router_enable_expert_bias: add a bias to the logits that groups and experts are chosen by. Not in the
            published models.
        mlp_only_layers: numbers of the layers with a dense network.
        decoder_sparse_step: only every such layer has experts.
    """

    model_type = "finer_moe"

    def __init__(
        self,
        num_experts=128,
        num_experts_per_tok=2,
        moe_intermediate_size=280,
        shared_expert_intermediate_size=8960,
        G_I=32,
        G_O=2,
        R_I=1,
        R_O=2,
        moe_concat_proj=False,
        moe_router_enable_expert_bias=False,
        mlp_only_layers=None,
        decoder_sparse_step=1,
        **kwargs,
    ):
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        self.shared_expert_intermediate_size = shared_expert_intermediate_size or 0
        self.G_I, self.G_O = G_I, G_O
        self.R_I, self.R_O = R_I or G_I, R_O or G_O
        self.moe_concat_proj = moe_concat_proj
        self.moe_router_enable_expert_bias = moe_router_enable_expert_bias
        self.mlp_only_layers = list(mlp_only_layers or ())
        self.decoder_sparse_step = decoder_sparse_step or 1
        super().__init__(**kwargs)
        group, experts = self.G_I * self.R_I, self.G_O * self.R_O * self.G_I * self.R_I
        per_slice, rest = divmod(num_experts_per_tok, G_O)
        if num_experts != experts:
            raise ValueError(f"num_experts is {num_experts}, and G_O * R_O * G_I * R_I is {experts}")
        if rest or not 0 < per_slice <= group:
            raise ValueError(
                f"num_experts_per_tok is {num_experts_per_tok}; a multiple of G_O ({G_O}) up to {G_O * group} is needed"
            )
        if self.hidden_size % G_O:
            raise ValueError(f"hidden_size is {self.hidden_size}; a multiple of G_O ({G_O}) is needed")

    def has_experts(self, layer):
        """Return whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


__all__ = ["FineRMoeConfig"]

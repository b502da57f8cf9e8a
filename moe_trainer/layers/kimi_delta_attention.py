"""Kimi delta attention, the linear attention of Kimi-Linear (--experimental-attention-variant kda).

A gated DeltaNet (gated_delta_net.py) with a decay for each channel of a key and a sigmoid as output gate. With
--kda-gate-rank R, decays and output gates are made from two latents of R channels each: replicated matrices make the
latents (under sequence parallelism of the local tokens), sharded ones all heads of them. Without, in_proj makes all.

Source: arXiv 2510.26692; transformers' kimi_linear. The recorded Megatron-Core has no such layer: the names are ours.
Shapes: as in gated_delta_net.py.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from arguments.model import ModelArgs
from moe_trainer.layers.gated_delta_net import SIGMOID, GatedDeltaNet
from moe_trainer.layers.init import hidden_init
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.ops.gated_delta_rule import Heads


class KimiDeltaAttention(GatedDeltaNet):
    """Linear attention of one layer, with decays by channel."""

    gate = SIGMOID
    step_init = "log_step"

    def _all_heads(self, model: ModelArgs) -> Heads:
        heads = super()._all_heads(model)
        return replace(heads, decays=heads.key_dim, lower_bound=model.kda_decay_lower_bound)

    def _build_projections(
        self, model: ModelArgs, full: Heads, name: str, factory: LayerFactory, options: dict[str, Any]
    ) -> None:
        self.rank = model.kda_gate_rank
        if self.rank is None:
            super()._build_projections(model, full, name, factory, options)
            return
        sizes, names = (*full.channels, full.values), ("query", "key", "value", "beta")
        self.in_proj = self._make_in_proj(model, sizes, names, name, factory, options)
        options = {"init": hidden_init(model), **options}
        down, up = factory.replicated_linear, factory.column_linear
        # all three read one input
        self.decay_down_proj, self.gate_down_proj = (
            down(model.hidden_size, self.rank, name=f"{name}.{kind}_down_proj", save_original_input=True, **options)
            for kind in ("decay", "gate")
        )
        self.decay_up_proj, self.gate_up_proj = (
            up(self.rank, full.values * width, name=f"{name}.{kind}_up_proj", **options)
            for kind, width in (("decay", full.decays), ("gate", full.value_dim))
        )

    def _project(self, x_SBH: Tensor) -> tuple[Tensor, ...]:
        if self.rank is None:
            return super()._project(x_SBH)
        x_SBC, beta_SBN = self.in_proj(x_SBH).split([sum(self.rows[:3]), self.rows[3]], -1)
        alpha_SBA = self.decay_up_proj(self.decay_down_proj(x_SBH))
        return x_SBC, self.gate_up_proj(self.gate_down_proj(x_SBH)), beta_SBN, alpha_SBA

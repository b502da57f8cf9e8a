"""One transformer layer: norm, attention, residual; norm, feed-forward or experts, residual.

Shapes: S sequence (this rank's rows of it under sequence parallelism), B microbatch, H hidden.
"""

from torch import Tensor, nn

from arguments import Arguments
from moe_trainer.layers.attention import SelfAttention
from moe_trainer.layers.core_attention import Visible
from moe_trainer.layers.dropout import Dropout
from moe_trainer.layers.gated_delta_net import GatedDeltaNet
from moe_trainer.layers.kit import Kit
from moe_trainer.layers.mla import MultiLatentAttention
from moe_trainer.layers.mlp import MLP
from moe_trainer.layers.rotary import Tables
from moe_trainer.moe.layer import MoELayer, Routed
from moe_trainer.parallel.state import ParallelState
from moe_trainer.shape.layers import is_linear


class TransformerLayer(nn.Module):
    """name: global name, e.g. "decoder.layers.0"; layer_number counts from 1 (MTP layers after the decoder's)."""

    def __init__(self, args: Arguments, ps: ParallelState, *, name: str, layer_number: int, is_moe: bool, kit: Kit):
        super().__init__()
        model, sp, kit = args.model, args.parallel.sequence_parallel, kit.for_layer(layer_number)
        rows_cut = sp and ps.tp.size > 1
        self.activations, self.graphs = kit.activations, kit.graphs
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.fp32_residual = model.fp32_residual_connection
        self.hidden_dropout = Dropout(model.hidden_dropout, kit.stream if rows_cut else None)
        self.input_layernorm = kit.norm(model.hidden_size, model, name=f"{name}.input_layernorm", partial=rows_cut)
        attention = MultiLatentAttention if model.multi_latent_attention else SelfAttention
        if is_linear(model, layer_number - 1):
            attention = GatedDeltaNet
        self.is_sparse = model.experimental_attention_variant == "dsa"  # it has a loss of its own
        loss = {"per_token_loss": args.training.calculate_per_token_loss} if self.is_sparse else {}
        self.self_attention = attention(model, ps, name=f"{name}.self_attention", layer_number=layer_number, kit=kit,
                                        sequence_parallel=sp, **loss)
        self.pre_mlp_layernorm = kit.norm(model.hidden_size, model, name=f"{name}.pre_mlp_layernorm", partial=rows_cut)
        self.is_moe = is_moe
        if is_moe:
            self.mlp = MoELayer(
                model, args.moe, ps, name=f"{name}.mlp", layer_number=layer_number, kit=kit,
                sequence_parallel=sp, per_token_loss=args.training.calculate_per_token_loss)
        else:
            self.mlp = MLP(model, model.ffn_hidden_size, name=f"{name}.mlp", group=ps.tp, kit=kit,
                           bias=model.add_bias_linear, sequence_parallel=sp)

    def forward(self, x_SBH: Tensor, rope: Tables | None, visible: Visible | None, grad_scale: float | Tensor) -> Tensor:
        """rope: cos and sin, or None; visible: see CoreAttention; grad_scale: of the auxiliary losses."""
        live, drawn = self.graphs.live(grad_scale), self.mlp.draw_logits(x_SBH) if self.is_moe else ()
        return self.graphs.run("layer", lambda x, *drawn: self._feed(self._attend(x, rope, visible, live), live, drawn), [self], x_SBH, *drawn)

    def _attend(self, x_SBH: Tensor, rope: Tables | None, visible: Visible | None, grad_scale: float | Tensor) -> Tensor:
        """The layer's first half."""
        return self.graphs.run("attn", lambda x: self._attention(x, rope, visible, grad_scale),
                               [self.input_layernorm, self.self_attention], x_SBH)

    def _attention(self, x_SBH: Tensor, rope: Tables | None, visible: Visible | None, grad_scale: float | Tensor) -> Tensor:
        with self.activations.offloading("attn_norm"):
            normed, inside = self.activations.discarding("layernorm", self.input_layernorm, x_SBH)
        with inside:
            y_SBH = self.self_attention(normed, rope, visible, *([grad_scale] if self.is_sparse else ()))
        return self._add(normed if self.residual_after_norm else x_SBH, y_SBH)

    def _feed(self, x_SBH: Tensor, grad_scale: float | Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        """The layer's second half. drawn: logits that take the place of the router's, or nothing."""
        if not self.is_moe or not self.graphs.captures("moe_router"):
            return self.graphs.run("moe" if self.is_moe else "mlp", lambda x, *drawn: self._whole_feed(x, grad_scale, drawn),
                                   [self.pre_mlp_layernorm, self.mlp], x_SBH, *drawn)
        normed, routed = self.graphs.run("moe_router", lambda x, *drawn: self._route(x, grad_scale, drawn),
                                         [self.pre_mlp_layernorm, *self.mlp.routing_modules], x_SBH, *drawn)
        return self._add(normed if self.residual_after_norm else x_SBH, self.mlp(normed, grad_scale, routed))

    def _whole_feed(self, x_SBH: Tensor, grad_scale: float | Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        with self.activations.offloading("mlp_norm"):
            normed, inside = self.activations.discarding("layernorm", self.pre_mlp_layernorm, x_SBH)
        with inside:
            y_SBH = self._feed_forward(normed, grad_scale, drawn)
        return self._add(normed if self.residual_after_norm else x_SBH, y_SBH)

    def _route(self, x_SBH: Tensor, grad_scale: float | Tensor, drawn: tuple[Tensor, ...]) -> tuple[Tensor | None, Routed]:
        """What of the second half stands before the exchange of tokens; the normed rows where somebody reads them later."""
        normed, inside = self.activations.discarding("layernorm", self.pre_mlp_layernorm, x_SBH)
        with inside:
            routed = self.mlp.route(normed, grad_scale, *drawn)
        return normed if self.residual_after_norm or self.mlp.overlap_shared else None, routed

    def _feed_forward(self, x_SBH: Tensor, grad_scale: float | Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        if self.is_moe:
            return self.activations.region("moe", lambda x: self.mlp(x, grad_scale, None, *drawn), x_SBH)
        return self.activations.region("mlp", self.mlp, x_SBH)

    def _add(self, residual: Tensor, y_SBH: Tensor) -> Tensor:
        y_SBH = self.hidden_dropout(y_SBH)
        return (residual.float() if self.fp32_residual else residual) + y_SBH

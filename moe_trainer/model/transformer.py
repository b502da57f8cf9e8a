"""A decoder-only language model: embedding, blocks, final norm, head; per-token loss or logits.

Module paths equal Megatron-Core's names (`decoder.layers.0.self_attention.linear_qkv.weight`), so a name in an error, a
checkpoint or a golden file leads straight to the code.

Shapes: S sequence, B microbatch, H hidden, V padded vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments import Arguments
from moe_trainer.layers.init import embedding_init, hidden_init
from moe_trainer.layers.kit import Kit
from moe_trainer.layers.rotary import make_rotary
from moe_trainer.layers.vocab import OutputHead, VocabParallelEmbedding
from moe_trainer.model.block import TransformerLayer
from moe_trainer.model.mtp import MultiTokenPrediction
from moe_trainer.moe.layer import MoELayer
from moe_trainer.parallel.state import ParallelState
from moe_trainer.shape.layers import moe_layer_pattern, mtp_is_moe


class Embedding(nn.Module):
    """Token embedding, learned positions if asked for, dropout."""

    def __init__(self, args: Arguments, ps: ParallelState, padded_vocab_size: int):
        super().__init__()
        model = args.model
        self.dropout_p = model.hidden_dropout
        self.fp32_residual = model.fp32_residual_connection
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size, model.hidden_size, name="embedding.word_embeddings", group=ps.tp,
            init=embedding_init(model), tied=not model.untie_embeddings_and_output_weights)
        self.position_embeddings = None
        if model.position_embedding_type == "learned_absolute" and model.add_position_embedding:
            self.position_embeddings = VocabParallelEmbedding(
                model.max_position_embeddings, model.hidden_size, name="embedding.position_embeddings", group=ps.tp,
                init=embedding_init(model))

    def forward(self, tokens_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
        """Returns: x_SBH, fp32 with --fp32-residual-connection."""
        x_SBH = self.word_embeddings(tokens_BS.t())
        if self.position_embeddings is not None:
            x_SBH = x_SBH + self.position_embeddings(position_ids_BS.t())
        if self.fp32_residual:
            x_SBH = x_SBH.float()
        if self.training and self.dropout_p > 0.0:
            x_SBH = F.dropout(x_SBH, self.dropout_p)
        return x_SBH


class Decoder(nn.Module):
    """The blocks and the final norm."""

    def __init__(self, args: Arguments, ps: ParallelState, kit: Kit, pattern: tuple[bool, ...]):
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(args, ps, name=f"decoder.layers.{i}", layer_number=i + 1, is_moe=is_moe, kit=kit)
            for i, is_moe in enumerate(pattern))
        self.final_layernorm = kit.norm(args.model.hidden_size, args.model, name="decoder.final_layernorm")


class Transformer(nn.Module):
    """The whole model on one rank. Built by build.build_chunks, which also gives the parameters their values."""

    def __init__(self, args: Arguments, ps: ParallelState, padded_vocab_size: int, kit: Kit):
        super().__init__()
        model = args.model
        pattern = moe_layer_pattern(model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
        self.rotary = make_rotary(model)
        self.tied = not model.untie_embeddings_and_output_weights
        self.embedding = Embedding(args, ps, padded_vocab_size)
        self.decoder = Decoder(args, ps, kit, pattern)
        self.mtp = None
        if model.mtp_num_layers:
            self.mtp = MultiTokenPrediction(args, ps, is_moe=mtp_is_moe(pattern), kit=kit)
        self.output_layer = OutputHead(
            model.hidden_size, padded_vocab_size, name="output_layer", group=ps.tp, init=hidden_init(model),
            tied=self.tied)

    def forward(self, tokens_BS: Tensor, position_ids_BS: Tensor, labels_BS: Tensor | None = None,
                loss_mask_BS: Tensor | None = None, attention_mask: Tensor | None = None,
                grad_scale: float | Tensor = 1.0) -> Tensor:
        """Per-token LM loss, fp32 [B, S], when labels are given, else logits_BSV.

        attention_mask: None for causal, else bool [B or 1, 1, S, S], True = hidden (Megatron's convention).
        loss_mask_BS: read by multi-token prediction only; the caller masks the returned loss.
        grad_scale: factor of the auxiliary (balancing, z, MTP) losses in the gradient.
        """
        x_SBH = self.embedding(tokens_BS, position_ids_BS)
        visible = None if attention_mask is None else ~attention_mask
        rope = None
        if self.rotary is not None:
            rope = self.rotary.tables(tokens_BS.shape[1], tokens_BS.device)
        for layer in self.decoder.layers:
            x_SBH = layer(x_SBH, rope, visible, grad_scale)
        x_SBH = self.decoder.final_layernorm(x_SBH)
        if labels_BS is None:
            return self.output_layer.logits_BSV(x_SBH, self._tied_weight())
        if self.mtp is not None and self.training:
            x_SBH = self.mtp(x_SBH, tokens_BS, position_ids_BS, labels_BS, loss_mask_BS, self.embedding, self._loss_BS,
                             rope, visible, grad_scale)
        return self._loss_BS(x_SBH, labels_BS)

    def _tied_weight(self) -> Tensor | None:
        return self.embedding.word_embeddings.weight if self.tied else None

    def _loss_BS(self, x_SBH: Tensor, labels_BS: Tensor) -> Tensor:
        return self.output_layer.loss_BS(x_SBH, labels_BS, self._tied_weight())

    def moe_layers(self) -> list[MoELayer]:
        """The decoder's MoE layers in order, then those of multi-token prediction."""
        layers = [*self.decoder.layers]
        if self.mtp is not None:
            layers += [depth.mtp_model_layer for depth in self.mtp.layers]
        return [layer.mlp for layer in layers if layer.is_moe]

    def named_state_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that belong to a checkpoint (routers' expert_bias), under their global names."""
        for layer in self.moe_layers():
            yield from layer.named_state_buffers()

"""Multi-token prediction: extra layers that predict the tokens after the next one.

Depth d (from 1) combines the hidden state of depth d-1 (depth 0: the decoder's output) with the embedding of the token
d positions ahead, and predicts the label d positions ahead with the model's output layer. Tokens, labels and mask are
shifted left by one per depth, before they are sharded over cp. The losses are attached to the hidden state that the
main loss reads. Evaluation skips all of it. With --mtp-detach-heads the losses do not train the main model.

As in Megatron-LM each context-parallel rank divides by its own number of valid tokens of a microbatch and the means are
averaged, so the loss depends on the mapping (list in moe/balancing.py). With dynamic context parallelism, where
a sequence may be in any group, the number is that of the whole group. With --mtp-loss-per-token nothing is divided
here: the gradient is that of a sum over tokens, which is divided by the trained tokens of the global batch with that of
the main loss. The layers and the losses are separate modules, because they may be on different pipeline stages; the
losses are with the output layer.

A depth has one transformer layer, or in hybrid models the layers that --hybrid-layer-pattern lists after a /.

Source: DeepSeek-V3 report, section 2.2; shapes, names and normalization of Megatron-Core.
Shapes: S sequence (sharded in hidden states, full in tokens, labels and masks), B microbatch, H hidden.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from arguments import Arguments
from arguments.layer_pattern import mtp_layers
from moe_trainer.layers.init import hidden_init
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.model.block import TransformerLayer
from moe_trainer.model.sequence_borders import shard_of
from moe_trainer.ops.attach_loss import attach_loss
from moe_trainer.ops.packed_sequences import Packed
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import ParallelState
from moe_trainer.participant import Participant, StepMetrics


def shift_left(x_BS: Tensor, packed: Packed | None = None) -> Tensor:
    """Return the next position's value at every position, zero at the last (of every packed sequence)."""
    if packed is not None:
        return packed.shift_left(x_BS)
    shifted = torch.roll(x_BS, -1, dims=1)
    shifted[:, -1] = 0
    return shifted


class _ZeroGrad(torch.autograd.Function):
    """Identity with a zero gradient. Unlike with detach, every parameter gets a gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


class HybridDepth(nn.Module):
    """The layers of one sublayer each of a depth of a hybrid model."""

    def __init__(self, layers: Iterable[TransformerLayer]):
        super().__init__()
        self.layers = nn.ModuleList(layers)


class MTPLayer(nn.Module):
    """One depth.

    Args:
        name: global (mtp.layers.0).
        layers: number from 0, and whether it is an MoE layer, of each of its layers.
    """

    def __init__(
        self,
        args: Arguments,
        ps: ParallelState,
        *,
        name: str,
        layers: Sequence[tuple[int, bool]],
        factory: LayerFactory,
    ):
        super().__init__()
        model, sp, factory = args.model, args.parallel.sequence_parallel, factory.for_layer(layers[0][0] + 1)
        size, has_local_tokens = model.hidden_size, sp and ps.tp.size > 1
        self.activations = factory.activations
        self.enorm = factory.norm(size, model, name=f"{name}.enorm", partial=has_local_tokens)
        self.hnorm = factory.norm(size, model, name=f"{name}.hnorm", partial=has_local_tokens)
        self.eh_proj = factory.column_linear(
            2 * size,
            size,
            name=f"{name}.eh_proj",
            group=ps.tp,
            init=hidden_init(model),
            sequence_parallel=sp,
            gather_output=True,
        )
        # a captured part can run once per pass only
        inside = replace(factory, graphs=CudaGraphs()) if model.mtp_use_repeated_layer else factory
        is_hybrid, inner_name = bool(model.hybrid_layer_pattern), f"{name}.mtp_model_layer"
        made = [
            TransformerLayer(
                args,
                ps,
                name=f"{inner_name}.layers.{index}" if is_hybrid else inner_name,
                layer_number=number + 1,
                is_moe=is_moe,
                factory=inside,
            )
            for index, (number, is_moe) in enumerate(layers)
        ]
        self.mtp_model_layer = HybridDepth(made) if is_hybrid else made[0]
        self.final_layernorm = factory.norm(size, model, name=f"{name}.final_layernorm", partial=has_local_tokens)

    @property
    def inner_layers(self) -> list[TransformerLayer]:
        """The layers between the projection and the final norm."""
        inside = self.mtp_model_layer
        return [*inside.layers] if isinstance(inside, HybridDepth) else [inside]

    def forward(self, x_SBH: Tensor, embedded_SBH: Tensor, inputs: PassInputs) -> Tensor:
        """Run the depth on the normed hidden state of the previous one and the embeddings of the shifted tokens."""

        def run(x_SBH: Tensor, embedded_SBH: Tensor) -> Tensor:
            joined = torch.cat([self.enorm(embedded_SBH), self.hnorm(x_SBH)], dim=-1)
            x_SBH, inside = self.eh_proj(joined), self.inner_layers
            for layer, rope in zip(inside, inputs.ropes[-len(inside) :], strict=True):
                x_SBH = layer(x_SBH, rope, inputs)
            return self.final_layernorm(x_SBH)

        return self.activations.recompute_region("mtp", run, x_SBH, embedded_SBH)


class MultiTokenPrediction(nn.Module):
    """The layers of all depths, or of the one that all use (--mtp-use-repeated-layer).

    Args:
        pattern: whether each decoder layer is an MoE layer.
    """

    def __init__(self, args: Arguments, ps: ParallelState, *, pattern: Sequence[bool], factory: LayerFactory):
        super().__init__()
        model = args.model
        self.sequence = SequenceShard.over(ps.context)
        self.num_depths, self.detached = model.num_mtp_depths, model.mtp_detach_heads
        depths = mtp_layers(model, pattern)
        self.layers = nn.ModuleList(
            MTPLayer(args, ps, name=f"mtp.layers.{depth}", layers=layers, factory=factory)
            for depth, layers in enumerate(depths[:1] if model.mtp_use_repeated_layer else depths)
        )

    def forward(
        self,
        x_SBH: Tensor,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        embed: Callable[[Tensor, Tensor], Tensor],
        inputs: PassInputs,
    ) -> list[Tensor]:
        """Return the normed hidden state of every depth, from the decoder's normed output.

        The last ropes of `inputs` are of the layers of a depth; all depths have the same.
        """
        packed, states = inputs.packed, []
        local = shard_of(self.sequence, packed).local
        hidden = _ZeroGrad.apply(x_SBH) if self.detached else x_SBH
        for depth in range(self.num_depths):
            tokens_BS, position_ids_BS = shift_left(tokens_BS, packed), shift_left(position_ids_BS, packed)
            layer = self.layers[min(depth, len(self.layers) - 1)]
            embedded = embed(local(tokens_BS, 1), local(position_ids_BS, 1))
            if self.detached:
                embedded = _ZeroGrad.apply(embedded)
            hidden = layer(hidden, embedded, inputs)
            states.append(hidden)
        return states


class MTPLosses(nn.Module):
    """The losses of all depths.

    Attributes:
        is_global: they are a mean over the tokens of the global batch (--mtp-loss-per-token).
        losses: [2, depths]: sums over microbatches of the mean loss, or of the loss, and of what divides them.
    """

    losses: Tensor

    def __init__(self, args: Arguments, ps: ParallelState):
        super().__init__()
        self.sequence = SequenceShard.over(ps.context)
        self.num_depths = args.model.num_mtp_depths
        self.loss_weight = args.model.mtp_loss_scaling_factor / self.num_depths
        self.per_token_loss = args.training.calculate_per_token_loss
        self.is_global = self.per_token_loss and args.model.mtp_loss_per_token
        self.register_buffer("losses", torch.zeros(2, self.num_depths, dtype=torch.float32), persistent=False)

    def forward(
        self,
        x_SBH: Tensor,
        states: Sequence[Tensor],
        labels_BS: Tensor,
        loss_mask_BS: Tensor | None,
        loss_BS: Callable[..., Tensor],
        grad_scale: float | Tensor,
        packed: Packed | None = None,
    ) -> Tensor:
        """Return x_SBH (the decoder's normed output) with the losses of all depths attached."""
        local, cp_size = shard_of(self.sequence, packed).local, None if packed is None else packed.cp_size
        mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if loss_mask_BS is None else loss_mask_BS.float()

        def count_tokens(mask_BS: Tensor) -> Tensor:
            """Count those of this rank, or of its group if groups change."""
            return (local(mask_BS, 1) if cp_size is None else mask_BS).sum()

        original_count = count_tokens(mask_BS)
        for depth, state in enumerate(states):
            labels_BS, mask_BS = shift_left(labels_BS, packed), shift_left(mask_BS, packed)
            local_mask_BS = local(mask_BS, 1)
            masked_BS = loss_BS(state, local(labels_BS, 1), local_mask_BS) * local_mask_BS
            loss = masked_BS.detach().sum()
            divisor: float | Tensor = local_mask_BS.sum()
            norm: float | Tensor = 1.0
            if not self.is_global:
                count = count_tokens(mask_BS).clamp(min=1)
                loss, divisor = loss / count, 1.0 if cp_size is None else 1.0 / cp_size
                # with grad_scale losses are summed over cp, but these means of the ranks must be averaged
                norm = original_count / count if self.per_token_loss else 1.0 / (count * self.sequence.cp.size)
            self.losses[0, depth] += loss
            self.losses[1, depth] += divisor
            x_SBH = attach_loss(x_SBH, masked_BS, norm * self.loss_weight * grad_scale)
        return x_SBH


def reset_mtp_metrics(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if chunk.mtp_losses is not None:
            chunk.mtp_losses.losses.zero_()


def get_mtp_sums(chunks: Sequence[Any]) -> Tensor:
    """Return the input of mtp_metrics, to be all-reduced: fp64 [2 * depths], zero except on the last stage."""
    depths, losses = chunks[0].mtp_depths, chunks[-1].mtp_losses
    if losses is None:
        return torch.zeros(2 * depths, dtype=torch.float64, device=chunks[-1].device)
    return losses.losses.double().flatten()


def mtp_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Return the mean loss of every depth over microbatches, or tokens, and ranks: {"mtp_1 loss": ...}."""
    depths = len(sums) // 2
    pairs = zip(sums[:depths], sums[depths:])
    return {f"mtp_{depth} loss": loss / max(divisor, 1.0) for depth, (loss, divisor) in enumerate(pairs, start=1)}


class MTPMetrics(Participant):
    """The losses of multi-token prediction of a model."""

    def __init__(self, chunks: Sequence[Any]):
        self._chunks = chunks

    def last_stage_sums(self) -> Tensor:
        return get_mtp_sums(self._chunks)

    def end_step(self, sums: Sequence[float], num_microbatches: int) -> StepMetrics:
        self.discard()
        return StepMetrics(mtp_metrics(sums))

    def discard(self) -> None:
        reset_mtp_metrics(self._chunks)

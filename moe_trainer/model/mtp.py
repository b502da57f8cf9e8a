"""Multi-token prediction: extra layers that predict the tokens after the next one.

Depth d (from 1) joins the hidden state of depth d-1 (depth 0: the decoder's, after its final norm) with the embedding
of the token d places ahead, runs one transformer layer and its own final norm, and predicts the label d places ahead
with the model's own output head. Tokens, labels and mask are shifted left by one per depth; the places freed at the end
are masked. Its loss never leaves the module: it is attached to the hidden state that the main loss reads, with weight
factor / depths over the valid tokens of the microbatch, and its value goes to a counter for the log. In evaluation none
of it runs.

Source: DeepSeek-V3 report, section 2.2; shapes, names and normalization of Megatron-Core.
Shapes: S sequence, B microbatch, H hidden.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from arguments import Arguments
from moe_trainer.layers.init import hidden_init
from moe_trainer.layers.kit import Kit
from moe_trainer.layers.rotary import Tables
from moe_trainer.model.block import TransformerLayer
from moe_trainer.ops.attach_loss import attach_loss
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import ParallelState


def shift_left(x_BS: Tensor) -> Tensor:
    """The next position's value at every position, zero at the last."""
    shifted = torch.roll(x_BS, -1, dims=1)
    shifted[:, -1] = 0
    return shifted


class MTPLayer(nn.Module):
    """One depth. name: global name, e.g. "mtp.layers.0"."""

    def __init__(self, args: Arguments, ps: ParallelState, *, name: str, layer_number: int, is_moe: bool, kit: Kit):
        super().__init__()
        model = args.model
        size = model.hidden_size
        self.enorm = kit.norm(size, model, name=f"{name}.enorm")
        self.hnorm = kit.norm(size, model, name=f"{name}.hnorm")
        self.eh_proj = kit.column_linear(2 * size, size, name=f"{name}.eh_proj", group=ps.tp, init=hidden_init(model))
        self.mtp_model_layer = TransformerLayer(
            args, ps, name=f"{name}.mtp_model_layer", layer_number=layer_number, is_moe=is_moe, kit=kit)
        self.final_layernorm = kit.norm(size, model, name=f"{name}.final_layernorm")

    def forward(self, x_SBH: Tensor, embedded_SBH: Tensor, rope: Tables | None, visible: Tensor | None,
                grad_scale: float | Tensor) -> Tensor:
        """x_SBH: normed hidden state of the previous depth; embedded_SBH: of the shifted tokens."""
        joined = torch.cat([self.enorm(embedded_SBH), self.hnorm(x_SBH)], dim=-1)
        return self.final_layernorm(self.mtp_model_layer(self.eh_proj(joined), rope, visible, grad_scale))


class MultiTokenPrediction(nn.Module):
    """All depths (--mtp-num-layers); with --mtp-use-repeated-layer one layer serves them all."""

    def __init__(self, args: Arguments, ps: ParallelState, *, is_moe: bool, kit: Kit):
        super().__init__()
        model = args.model
        self.num_depths = model.mtp_num_layers
        self.loss_weight = model.mtp_loss_scaling_factor / self.num_depths
        self.per_token_loss = args.training.calculate_per_token_loss
        num_layers = 1 if model.mtp_use_repeated_layer else self.num_depths
        self.layers = nn.ModuleList(
            MTPLayer(args, ps, name=f"mtp.layers.{i}", layer_number=model.num_layers + i + 1, is_moe=is_moe, kit=kit)
            for i in range(num_layers))
        # per depth: sum over microbatches of the mean loss; last: number of microbatches
        self.register_buffer("losses", torch.zeros(self.num_depths + 1, dtype=torch.float32), persistent=False)

    def forward(self, x_SBH: Tensor, tokens_BS: Tensor, position_ids_BS: Tensor, labels_BS: Tensor,
                loss_mask_BS: Tensor | None, embed: Callable[[Tensor, Tensor], Tensor],
                loss_BS: Callable[[Tensor, Tensor], Tensor], rope: Tables | None, visible: Tensor | None,
                grad_scale: float | Tensor) -> Tensor:
        """Return x_SBH (the decoder's normed output) with the losses of all depths attached."""
        mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if loss_mask_BS is None else loss_mask_BS.float()
        original_count = mask_BS.sum()
        result, hidden = x_SBH, x_SBH
        for depth in range(self.num_depths):
            tokens_BS, position_ids_BS = shift_left(tokens_BS), shift_left(position_ids_BS)
            labels_BS, mask_BS = shift_left(labels_BS), shift_left(mask_BS)
            layer = self.layers[min(depth, len(self.layers) - 1)]
            hidden = layer(hidden, embed(tokens_BS, position_ids_BS), rope, visible, grad_scale)
            masked_BS = loss_BS(hidden, labels_BS) * mask_BS
            count = mask_BS.sum().clamp(min=1)
            self.losses[depth] += masked_BS.detach().sum() / count
            norm = original_count / count if self.per_token_loss else 1.0 / count
            result = attach_loss(result, masked_BS, norm * self.loss_weight * grad_scale)
        self.losses[-1] += 1
        return result


def collect_mtp_metrics(chunks: list[nn.Module], ps: ParallelState) -> dict[str, float]:
    """Mean loss of every depth since the last call, over microbatches and dp_cp: {"mtp_1 loss": ...}; then zero.

    Communication: depths + 1 fp32 values, all-reduced over ps.dp_cp, when the model has MTP.
    """
    metrics: dict[str, float] = {}
    for chunk in chunks:
        mtp = chunk.mtp
        if mtp is None:
            continue
        sums = all_reduce(mtp.losses.clone(), ps.dp_cp).tolist()
        mtp.losses.zero_()
        count = max(sums.pop(), 1.0)
        metrics.update({f"mtp_{depth} loss": value / count for depth, value in enumerate(sums, start=1)})
    return metrics

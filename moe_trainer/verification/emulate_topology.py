"""Quantities that Megatron-LM defines by the mapping, computed in one process as many ranks would.

moe/balancing.py lists all of them and explains why. emulate_balancing.py has the global auxiliary loss,
emulate_formats.py the quantized formats. Here:

* Expert capacity: ceil(T * k / E * factor) for the T tokens of one sequence shard. With tensor parallelism (MoE layers
  then always have sequence shards) and context parallelism a shard is 1 / (tp * cp) of the sequence, and each drops
  separately.
* Sinkhorn balancing: its iteration covers the tokens of one sequence shard.
* Multi-token prediction: each context rank takes the mean over its valid tokens, and these means are averaged.

With dynamic context parallelism every microbatch has its own number of context ranks, and the mean of multi-token
prediction is that of the whole group, as in one process. Tokens of packed sequences include their padding, so the
reference of such a quantity has the padding of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_trainer.model.mtp import MTPLosses, shift_left
from moe_trainer.moe.receive.capacity import unknown_counts
from moe_trainer.ops.attach_loss import attach_loss
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.training.run import TrainRun
from moe_trainer.verification.sequence_sharding import SequenceSharding, track_lengths


def emulate_topology(run: TrainRun, sharding: SequenceSharding, cp_sizes: Iterator[int] | None = None) -> None:
    """Make a run on full sequences compute what a sharding defines. Call it before the first step.

    Args:
        run: of the one process.
        sharding: of all microbatches.
        cp_sizes: yields the number of context ranks of every microbatch, in the place of the sharding's.
    """
    if sharding.num_shards == 1 and cp_sizes is None:
        return
    get_lengths, current = track_lengths(run), sharding
    batch_size = 1 if run.args.packed_capacity is not None else run.args.training.micro_batch_size

    if cp_sizes is not None:
        sizes = cp_sizes

        def begin_microbatch(*_) -> None:
            nonlocal current
            current = SequenceSharding(sharding.tp, next(sizes))

        run.chunks[0].register_forward_pre_hook(begin_microbatch)

    def get_tokens() -> list[Tensor]:
        lengths = get_lengths()
        return [current.token_indices(index, lengths, batch_size) for index in range(current.num_shards)]

    for chunk in run.chunks:
        for layer in chunk.moe_layers():
            vars(layer.router).update(_drop_tokens=route_by_shard(layer.router._drop_tokens, get_tokens))
            layer.known_counts = unknown_counts  # each shard rounds it up, so the counts of all come from the routing
            selection = layer.router.selection
            if selection.declaration.counts == "rank":
                vars(selection).update(route=route_by_shard(selection.route, get_tokens))
    losses = run.chunks[-1].mtp_losses
    if sharding.cp > 1 and losses is not None and not losses.is_global:
        by_context = SequenceSharding(1, sharding.cp)

        def get_positions() -> list[Tensor]:
            return [by_context.positions(index, get_lengths()) for index in range(sharding.cp)]

        vars(losses).update(forward=mean_by_context_rank(losses, get_positions))


def route_by_shard(decide: Callable, get_tokens: Callable[[], list[Tensor]]) -> Callable:
    """Wrap a function to probs_TE and routing_TE so that it runs separately for every shard of its tensors [T, E]."""

    def decide_by_shard(*inputs: Any) -> tuple[Tensor, Tensor]:
        tokens = get_tokens()
        shards = [decide(*(each[index] if isinstance(each, Tensor) else each for each in inputs)) for index in tokens]
        order = torch.argsort(torch.cat(tokens))
        return torch.cat([probs for probs, _ in shards])[order], torch.cat([routing for _, routing in shards])[order]

    return decide_by_shard


def mean_by_context_rank(losses: MTPLosses, get_positions: Callable[[], list[Tensor]]) -> Callable:
    """Return a forward pass of MTPLosses with the mean over the tokens of each context rank."""

    def forward(
        x_SBH: Tensor,
        states: Sequence[Tensor],
        labels_BS: Tensor,
        loss_mask_BS: Tensor | None,
        loss_BS: Callable[[Tensor, Tensor], Tensor],
        grad_scale: float | Tensor,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        positions = get_positions()
        mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if loss_mask_BS is None else loss_mask_BS.float()
        before = [mask_BS[:, index].sum() for index in positions]
        for depth, state in enumerate(states):
            labels_BS, mask_BS = shift_left(labels_BS, packed), shift_left(mask_BS, packed)
            token_loss_BS, weights_BS = loss_BS(state, labels_BS), torch.zeros_like(mask_BS)
            for index, valid in zip(positions, before):
                count = mask_BS[:, index].sum().clamp(min=1)
                mean = (token_loss_BS[:, index].detach() * mask_BS[:, index]).sum() / count
                losses.losses[0, depth] += mean / len(positions)
                share = valid / count if losses.per_token_loss else 1.0 / (count * len(positions))
                weights_BS[:, index] = mask_BS[:, index] * share
            x_SBH = attach_loss(x_SBH, token_loss_BS * weights_BS, losses.loss_weight * grad_scale)
        losses.losses[1] += 1
        return x_SBH

    return forward

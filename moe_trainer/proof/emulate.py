"""Quantities that Megatron-LM defines by topology, computed in one process as many ranks would.

moe/balancing.py lists all of them and says why. The global auxiliary loss is in emulate_balance.py, 8-bit formats are in emulate_fp8.py; here are:

* expert capacity: ceil(T * k / E * factor) with the T tokens of one sequence shard. With tensor parallelism (MoE layers always see
  sequence shards then) and with context parallelism a shard is 1 / (tp * cp) of the sequence, and each drops for itself.
* sinkhorn balancing: its iteration runs over the tokens of one sequence shard.
* multi-token prediction: each context rank takes the mean over the valid tokens it holds, and these means are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_trainer.model.mtp import MTPLosses, shift_left
from moe_trainer.ops.attach_loss import attach_loss
from moe_trainer.proof.topology import Topology
from moe_trainer.run import Run


def emulate(run: Run, topology: Topology) -> None:
    """Make a run on whole sequences compute what `topology` defines. It must be called before the first step."""
    if topology.shards == 1:
        return
    training, length = run.args.training, run.args.data.seq_length
    rows = [topology.rows(index, length, training.micro_batch_size) for index in range(topology.shards)]
    for chunk in run.chunks:
        for layer in chunk.moe_layers():
            layer.router._drop = by_shard(layer.router._drop, rows)
            if run.args.moe.moe_router_load_balancing_type == "sinkhorn":
                layer.router._route = by_shard(layer.router._route, rows)
    losses = run.chunks[-1].mtp_losses
    if topology.cp > 1 and losses is not None:
        whole = Topology(1, topology.cp)
        losses.forward = by_context_rank(losses, [whole.positions(index, length) for index in range(topology.cp)])


def by_shard(decide: Callable, rows: list[Tensor]) -> Callable:
    """A router's decision over tokens (tensors [T, E], or None, to probs_TE and routing_TE), taken for every shard by itself."""

    def decided(*tensors_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = [decide(*(None if tensor is None else tensor[index] for tensor in tensors_TE)) for index in rows]
        back = torch.argsort(torch.cat(rows))
        return torch.cat([probs for probs, _ in parts])[back], torch.cat([routing for _, routing in parts])[back]

    return decided


def by_context_rank(losses: MTPLosses, held: list[Tensor]) -> Callable:
    """The forward pass of MTPLosses with the mean taken over each context rank's tokens; held: positions by rank."""

    def forward(x_SBH: Tensor, states: Sequence[Tensor], labels_BS: Tensor, loss_mask_BS: Tensor | None,
                loss_BS: Callable[[Tensor, Tensor], Tensor], grad_scale: float | Tensor) -> Tensor:
        mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if loss_mask_BS is None else loss_mask_BS.float()
        before = [mask_BS[:, here].sum() for here in held]
        for depth, state in enumerate(states):
            labels_BS, mask_BS = shift_left(labels_BS), shift_left(mask_BS)
            token_loss_BS, weights_BS = loss_BS(state, labels_BS), torch.zeros_like(mask_BS)
            for here, valid in zip(held, before):
                count = mask_BS[:, here].sum().clamp(min=1)
                mean = (token_loss_BS[:, here].detach() * mask_BS[:, here]).sum() / count
                losses.losses[depth] += mean / len(held)
                share = valid / count if losses.per_token_loss else 1.0 / (count * len(held))
                weights_BS[:, here] = mask_BS[:, here] * share
            x_SBH = attach_loss(x_SBH, token_loss_BS * weights_BS, losses.loss_weight * grad_scale)
        losses.losses[-1] += 1
        return x_SBH

    return forward

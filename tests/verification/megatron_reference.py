"""First step of a proof's one process, computed by Megatron-Core's own model."""

from __future__ import annotations

import math
from datetime import timedelta

import torch

from moe_trainer.checkpoint.rank_memory import global_name
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.training.initialize import make_groups
from moe_trainer.verification import parity
from moe_trainer.verification.megatron_core.model import build_megatron_model, copy_weights, on_cpu
from moe_trainer.verification.shrink import ParityCase
from moe_trainer.verification.synthetic_data import draw_batches
from moe_trainer.verification.training_trace import make_run


def run_megatron_core(_rank: int, _size: int, case: ParityCase, seed: int) -> dict[str, torch.Tensor]:
    """Return loss, gradient norm and gradients by the names of a comparison; for a process that has no group."""
    args = parity._parse(case.reference, 1, False)
    ps = make_groups(args, LaunchEnv(0, 1, 0, None, None, "verification"), timedelta(seconds=60))
    (chunk,) = make_run(args, 0, ps, 1, seed=seed).chunks
    (batches,) = draw_batches(args, ps, 0, 1, seed)
    per_token, loss_sum, tokens = args.training.calculate_per_token_loss, 0.0, 0.0
    with on_cpu():
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        model = build_megatron_model(args, chunk.embedding.word_embeddings.weight.shape[0])
        copy_weights(chunk, model)
        scale = 1.0 if per_token else 1.0 / len(batches)
        for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
            scaler.set_loss_scale(torch.tensor(scale))
        length = args.data.seq_length
        hidden_SS = torch.ones(length, length).triu(1).bool()[None, None]
        for batch in batches:
            mask_BS = batch.loss_mask_BS
            loss_BS = model(
                batch.tokens_BS, batch.position_ids_BS, hidden_SS, labels=batch.labels_BS, loss_mask=mask_BS
            )
            total = (loss_BS * mask_BS).sum()
            (total * (scale if per_token else scale / mask_BS.sum())).backward()
            loss_sum, tokens = loss_sum + total.detach().double(), tokens + mask_BS.sum().double()
    factor = 1.0 / tokens if per_token else 1.0
    grads = {
        f"gradient (step 1) of {global_name(name, 0, 0)}": param.grad.double() * factor
        for name, param in model.named_parameters()
    }
    norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
    return grads | {"lm loss (step 1)": loss_sum / tokens, "gradient norm (step 1)": torch.tensor(norm)}

"""What happens to gradients between the last backward and the optimizer."""

import torch
from torch import Tensor

from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState


def finalize_grads(grads: DataParallelGrads, ps: ParallelState, num_tokens: Tensor | int | None = None) -> None:
    """Finish the reduction; with --calculate-per-token-loss divide by the tokens of the global batch.

    num_tokens: this rank's loss tokens over all its micro-batches; None without per-token loss.
    """
    grads.finish()
    if num_tokens is None:
        return
    device = grads.buffers[0].flat.device
    total = torch.as_tensor(num_tokens).detach().to(device, torch.float64, copy=True)
    collectives.all_reduce(total, ps.dp_cp)
    if total.item() > 0:
        grads.scale(1.0 / total.item())

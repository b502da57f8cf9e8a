"""Choose and build the optimizer."""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from arguments.optimizer import OptimizerArgs
from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.optim.distributed_optimizer import ParamGather
from moe_trainer.optim.flat_shard import make_flat_shards
from moe_trainer.optim.fsdp_shard import FsdpGrads, FsdpShard
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.loss_scale import build_loss_scale
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.optim.optimizer_shard import OptimizerShard
from moe_trainer.optim.state_plan import plan_state
from moe_trainer.optim.update import Updater
from moe_trainer.parallel.state import ParallelState


def build_optimizer(
    chunks: Sequence[nn.Module],
    grads: DataParallelGrads | FsdpGrads,
    optimizer: OptimizerArgs,
    precision: PrecisionArgs,
    parallel: ParallelArgs,
    ps: ParallelState,
    *,
    device: torch.device = torch.device("cpu"),
    check_for_nan: bool = True,
    count_zeros: bool = False,
    timer: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
) -> Optimizer:
    """Build the optimizer of a model from its gradient buffers. Collective over ps.world.

    From now on the parameters are views of flat buffers (or FSDP shards): load weights with `param.copy_`, never by
    assigning `.data`.

    Args:
        device: of the model; a rank without parameters also takes part in sums over all ranks.
        check_for_nan: raise on non-finite gradients; otherwise skip the iteration
            (--no-check-for-nan-in-loss-and-grad).
        count_zeros: report the number of zeros in gradients (--log-num-zeros-in-grad).
        timer: returns a context manager for a Megatron timer name.
    """
    loss_scale, plan = build_loss_scale(precision), plan_state(optimizer)
    gather = None
    if isinstance(grads, FsdpGrads):
        shards: list[OptimizerShard] = [
            FsdpShard(grads, optimizer, plan, ps, device, names_main_params=precision.bf16 or precision.fp16)
        ]
    else:
        flat_shards = make_flat_shards(grads, optimizer, ps)
        shards = [*flat_shards]
        if grads.is_sharded:
            buffers = [(shard.layout, shard.gather_buffer) for shard in flat_shards]
            gather = ParamGather(buffers, chunks, parallel.overlap_param_gather)
    updater = Updater(shards, optimizer, plan, device, ps)
    built = Optimizer(
        grads,
        shards,
        updater,
        optimizer,
        loss_scale,
        gather,
        ps,
        device,
        check_for_nan=check_for_nan,
        count_zeros=count_zeros,
        timer=timer,
    )
    if gather is not None and parallel.overlap_param_gather_with_optimizer_step:
        built.gather_early(list(chunks[0].parameters()))
    return built

"""Choose and build the optimizer."""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from arguments.optimizer import OptimizerArgs
from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.optim.distributed_optimizer import ParamGather
from moe_trainer.optim.fully_sharded import ShardedGrads, ShardedState
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.loss_scale import build_loss_scale
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.optim.state_plan import plan_state
from moe_trainer.optim.stored_state import make_states
from moe_trainer.optim.update import Updater
from moe_trainer.parallel.state import ParallelState


def build_optimizer(chunks: Sequence[nn.Module], grads: DataParallelGrads | ShardedGrads, optimizer: OptimizerArgs, precision: PrecisionArgs,
                    parallel: ParallelArgs, ps: ParallelState, *, device: torch.device = torch.device("cpu"),
                    check_for_nan: bool = True, count_zeros: bool = False,
                    timer: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext()) -> Optimizer:
    """Build the optimizer of a model whose gradients `grads` keeps.

    device: of the model; a rank without parameters takes part in sums over all ranks too.
    From here on the parameters are views of flat buffers (or were shards before): load weights with `param.copy_`, never by assigning `.data`.
    check_for_nan: raise on gradients that are not finite (--no-check-for-nan-in-loss-and-grad: skip the iteration).
    count_zeros: report zeros in gradients (--log-num-zeros-in-grad). timer: context manager per Megatron timer name.
    Collective over ps.world.
    """
    loss_scale, plan = build_loss_scale(precision), plan_state(optimizer)
    gather = None
    if isinstance(grads, ShardedGrads):
        states = [ShardedState(grads, optimizer, plan, ps, device, precision.bf16 or precision.fp16)]
    else:
        states = make_states(grads, optimizer, ps)
    if isinstance(grads, DataParallelGrads) and grads.sharded:
        gather = ParamGather([(state.layout, state.wire) for state in states], chunks, parallel.overlap_param_gather)
    updater = Updater(states, optimizer, plan, device, ps)
    built = Optimizer(grads, states, updater, optimizer, loss_scale, gather, ps, device, check_for_nan=check_for_nan, count_zeros=count_zeros,
                      timer=timer)
    if gather is not None and parallel.overlap_param_gather_with_optimizer_step:
        built.gather_early(list(chunks[0].parameters()))
    return built

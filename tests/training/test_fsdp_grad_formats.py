"""Formats of --megatron-fsdp-main-grads-dtype and --megatron-fsdp-main-params-dtype, under both ways of sharding."""

import pytest
import torch
from harness import run_ranks
from training.layouts import create_groups, make_argv, make_run

from moe_trainer.parallel.params import get_param_info
from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step

FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --bf16 --clip-grad 0 --data-parallel-sharding-strategy"
NARROW = ["--megatron-fsdp-main-grads-dtype", "bf16"]


def _gradients(rank, n, strategy):
    """With fp32 sums and with bf16 ones: this rank's part of every gradient, by name and place."""
    found = []
    for flags in ([], NARROW):
        argv = [*make_argv("plain"), *f"{FSDP} {strategy}".split(), *flags]
        run = make_run(argv, rank, create_groups(argv, rank, n), 1)
        train_step(run, TrainState(), 2)
        found.append(
            {
                (get_param_info(slot.param).names[0], slot.start): view.float().clone()
                for slot, view in run.grads.owned_views()
            }
        )
    return found


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_bf16_main_grads_are_accumulated_in_bf16(strategy):
    for wide, narrow in run_ranks(_gradients, 2, strategy):
        assert wide.keys() == narrow.keys() and wide
        assert any(not torch.equal(grad, grad.bfloat16().float()) for grad in wide.values())
        for name, grad in narrow.items():
            assert torch.equal(grad, grad.bfloat16().float()), name
            assert (grad - wide[name]).norm() <= 2.0**-7 * wide[name].norm(), name


def _weights(rank, n, strategy):
    """This rank's main parameters at the start and after a step, with fp32 ones and with the model's own; their states."""
    found = []
    for dtype in ("fp32", "auto"):
        # gradients that are reduced in bf16 are the same for both
        flags = f"{FSDP} {strategy} --megatron-fsdp-grad-comm-dtype bf16 --grad-reduce-in-bf16"
        argv = [*make_argv("plain"), *flags.split(), "--megatron-fsdp-main-params-dtype", dtype]
        run = make_run(argv, rank, create_groups(argv, rank, n), 1)
        mains = []
        for steps in (0, 1):
            for _ in range(steps):
                train_step(run, TrainState(), 1)
            segments = [segment for shard in run.optimizer._shards for segment in shard.update_segments]
            mains.append(torch.cat([segment.main_params().reshape(-1) for segment in segments]))
        found.append((*mains, {state.state_name for state in run.optimizer.tensors()}))
    return found


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_narrow_main_params_are_the_rounded_fp32_ones(strategy):
    """After one step from the same weights: the update is the same, in fp32."""
    for (start, wide, _), (narrow_start, narrow, names) in run_ranks(_weights, 2, strategy):
        assert torch.equal(start, narrow_start) and not torch.equal(start, narrow)
        assert torch.equal(narrow, wide.bfloat16().float()) and not torch.equal(narrow, wide)
        assert names == {"exp_avg", "exp_avg_sq"}

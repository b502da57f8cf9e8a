"""--megatron-fsdp-main-grads-dtype bf16 accumulates gradients of microbatches in bf16 under every sharding strategy."""

import pytest
import torch
from harness import run_ranks
from training.layouts import create_groups, make_argv, make_run

from moe_trainer.parallel.params import get_param_info
from moe_trainer.training.context import TrainState
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

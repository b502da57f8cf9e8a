"""Router logits that are not finite, in Triton's kernels on a device: the iteration ends, and is skipped or rejected."""

import pytest
from emulated_cuda.run import on_device
from training.layouts import make_argv

SMALL = (
    "--num-layers 1 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 2 --on-nan skip "
    "--triton-kernels router permute"
)


def skipped_step() -> str:
    """Why an iteration whose router's weight is NaN is skipped."""
    import torch

    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.run import TrainState
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    args = parse_args([*make_argv("plain"), *SMALL.split()], 1)
    run = make_run(args, 0, ParallelState.single(), 2, device="cuda")
    run.chunks[0].moe_layers()[0].router.weight.data.fill_(torch.nan)
    return str(train_step(run, TrainState(), 2).skipped)


def test_nan_among_router_logits_reaches_the_check_of_the_loss():
    pytest.importorskip("triton")
    assert on_device(skipped_step) == "the loss is nan"

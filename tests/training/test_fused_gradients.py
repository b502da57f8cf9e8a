"""--gradient-accumulation-fusion: GEMMs add weights' gradients to the main gradients, and train as without it."""

import pytest
import torch
from training.layouts import FP32, compare, make_argv, train

from arguments import parse_args
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace

OFF = "--no-gradient-accumulation-fusion"


def find_matrices_with_autograd_gradient(flags: list[str]) -> tuple[set[str], set[str]]:
    """Names of the matrices that autograd brings a gradient to, and of all of them."""
    found, every = set(), set()

    def prepare(run) -> None:
        for param in (param for chunk in run.chunks for param in chunk.parameters() if param.dim() > 1):
            every.add(param.info.names[0])
            param.register_hook(lambda grad, name=param.info.names[0]: found.add(name) if grad is not None else None)

    argv = [word for word in make_argv("deepseek") if word != "--moe-grouped-gemm"]  # expert by expert
    training_trace.train(parse_args([*argv, *flags], 1), 0, ParallelState.single(), 1, prepare=prepare)
    return found, every


def test_gemms_accumulate_into_main_gradients():
    by_autograd, _ = find_matrices_with_autograd_gradient([])
    assert by_autograd == {"embedding.word_embeddings.weight"}
    by_autograd, every = find_matrices_with_autograd_gradient([OFF])
    assert by_autograd == every


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("--bf16", torch.float32),
        ("--bf16 --grad-reduce-in-bf16", torch.bfloat16),
        (
            "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all",
            torch.float32,
        ),
        (f"--bf16 {OFF}", None),
    ],
)
def test_weights_know_the_dtype_of_fused_sums(flags, dtype):
    found = set()

    def prepare(run) -> None:
        found.update(
            getattr(param, "main_grad_sum_dtype", None) for chunk in run.chunks for param in chunk.parameters()
        )

    args = parse_args([*make_argv("plain"), *flags.split()], 1)
    training_trace.train(args, 0, ParallelState.single(), 1, prepare=prepare)
    assert found == {dtype}


@pytest.mark.parametrize(
    "kind", ["plain", "capacity", "accumulation", "deepseek", "biases, tied head", "distributed optimizer, overlap"]
)
def test_gradient_accumulation_fusion_does_not_change_training(kind):
    argv = [word for word in make_argv(kind) if word != "--moe-grouped-gemm"]
    fused, apart = (train([*argv, *flags], 0, ParallelState.single()) for flags in ([], [OFF]))
    assert [str(difference) for difference in compare(apart, fused, FP32)] == []

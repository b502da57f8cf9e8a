"""Formats and offloading of the optimizer state on full models under every sharding.

The losses, gradients and weights of one process with the same formats.
"""

import pytest
from harness import run_ranks
from training.layouts import Tolerances, assert_equal, make_argv, shallow, train_one_process, train_ranks

NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16"
WIDE = "--use-precision-aware-optimizer"
OFFLOAD = f"{NARROW} --optimizer-cpu-offload --optimizer-offload-fraction 0.6 --overlap-cpu-optimizer-d2h-h2d"
BETWEEN = "--chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.5"
ZERO = "--use-distributed-optimizer"
FULL = f"{ZERO} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
EP, PP = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
# (ranks, kind of model, formats and places, how they are spread)
CASES = (
    (2, "plain", NARROW, FULL),
    (2, "plain", OFFLOAD, f"{EP} {FULL}"),
    (2, "biases, tied head", BETWEEN, f"{PP} {ZERO}"),
    (2, "plain", NARROW, ""),
    (2, "plain", OFFLOAD, FSDP),
    (4, "deepseek", OFFLOAD, f"{EP} {FULL}"),
    (4, "plain", NARROW, f"{EP} {FULL} --num-distributed-optimizer-instances 2"),
    (4, "plain", WIDE, f"{PP} {EP} {FULL}"),
)


# a sum in another order may fall to the other side of a tie of bf16: a first moment is off by 2^-9, and its step with it
ROUNDED = Tolerances(weight=1.5e-5)


def model(kind: str) -> list[str]:
    return shallow(make_argv(kind))


@pytest.mark.parametrize("n", [2, 4])
def test_optimizer_state_formats_and_offload_equal_one_process(n):
    cases = [case for case in CASES if case[0] == n]
    found = run_ranks(
        train_ranks, n, [[*model(kind), *formats.split(), *how.split()] for _, kind, formats, how in cases]
    )
    for (_, kind, formats, how), outcome, *others in zip(cases, *found, strict=True):
        expected = train_one_process(*model(kind), *formats.split())
        assert_equal(outcome, expected, f"{kind}, {formats} {how}", ROUNDED)
        assert all(other.grad_norms == outcome.grad_norms for other in others), f"{kind}, {how}: every rank clips alike"


@pytest.mark.parametrize("where", [OFFLOAD, f"{NARROW} {BETWEEN}"])
def test_optimizer_offload_does_not_change_training(where):
    expected = train_one_process(*model("deepseek"), *NARROW.split())
    outcome = train_one_process(*model("deepseek"), *where.split())
    assert_equal(outcome, expected, where)
    assert expected.losses == outcome.losses

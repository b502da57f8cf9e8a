"""Parallel training equals one process: losses, every gradient, the norm, the expert bias, the weights after three steps."""

import functools

import pytest
from harness import run_ranks
from train.layouts import KINDS, Outcome, argv_of, compare, train, train_ranks

from moe_trainer.parallel.state import ParallelState

# (ranks, expert-parallel ranks)
LAYOUTS = ((2, 2), (4, 4), (4, 2))
GLOBAL_LOSS = ["--moe-router-load-balancing-type", "global_aux_loss", "aux_loss", "--moe-aux-loss-coeff", "1e-1", "1e-2"]


def spread(ep: int, dispatcher: str) -> list[str]:
    return ["--expert-model-parallel-size", str(ep), "--moe-token-dispatcher-type", dispatcher]


@functools.cache
def one_process(kind: str) -> Outcome:
    return train(argv_of(kind), 0, ParallelState.single())


def assert_equal(outcome: Outcome, expected: Outcome, what: str) -> None:
    differences = compare(expected, outcome)
    assert not differences, f"{what}: {len(differences)} quantities part, first\n" + "\n".join(map(str, differences[:8]))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("n", "ep"), LAYOUTS)
def test_expert_parallel_training_equals_one_process(n, ep, dispatcher):
    argvs = [[*argv_of(kind), *spread(ep, dispatcher)] for kind in KINDS]
    ranks = run_ranks(train_ranks, n, argvs, timeout=300.0)
    for kind, outcome, *others in zip(KINDS, *ranks, strict=True):
        what = f"{kind}, {n} ranks, EP {ep}, {dispatcher}"
        assert_equal(outcome, one_process(kind), what)
        for other in others:  # every rank logs and clips alike
            assert other.losses == outcome.losses and other.grad_norms == outcome.grad_norms, what


def test_the_cases_do_what_they_are_named_for():
    assert min(one_process("capacity").dropped) > 0
    assert "mtp_1 loss" in one_process("deepseek").losses[0]
    bias = one_process("deepseek").weights["decoder.layers.1.mlp.router.expert_bias"]
    assert bias.abs().max() > 0
    first = one_process("plain").grads
    assert all(grad.abs().max() > 0 for grad in first.values()), "an expert without tokens proves nothing"


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_global_aux_loss_depends_on_data_ranks_alone(dispatcher):
    """Its counts run over all data-parallel ranks, so the oracle is the same number of ranks without expert parallelism."""
    argv = [*argv_of("accumulation"), *GLOBAL_LOSS]
    expected = run_ranks(train_ranks, 4, [[*argv, *spread(1, dispatcher)]])[0][0]
    for ep in (2, 4):
        assert_equal(run_ranks(train_ranks, 4, [[*argv, *spread(ep, dispatcher)]])[0][0], expected, f"EP {ep}")

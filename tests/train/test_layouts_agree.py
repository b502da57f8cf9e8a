"""Expert-parallel training equals one process: losses, every gradient, the norm, the expert bias, the weights after three steps."""

import functools

import pytest
import torch
from harness import run_ranks
from train.layouts import KINDS, Outcome, argv_of, train

from moe_trainer.parallel.state import ParallelState

# (ranks, expert-parallel ranks)
LAYOUTS = ((2, 2), (4, 4), (4, 2))
GLOBAL_LOSS = ["--moe-router-load-balancing-type", "global_aux_loss", "aux_loss", "--moe-aux-loss-coeff", "1e-1", "1e-2"]


def _ranks(rank, n, ep, argvs):
    """Several trainings on the same ranks, one after the other."""
    ps = ParallelState.create(n, rank, ep=ep)
    spread = ["--expert-model-parallel-size", str(ep)]
    return [train([*argv, *spread], rank, ps) for argv in argvs]


@functools.cache
def one_process(kind: str) -> Outcome:
    return train(argv_of(kind), 0, ParallelState.single())


def assert_equal(outcome: Outcome, expected: Outcome, tolerance: float, what: str) -> None:
    assert outcome.dropped == expected.dropped, what
    for ours, theirs in zip(outcome.losses, expected.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-12), what
    assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=tolerance), what
    for name, grad in expected.grads.items():
        assert (outcome.grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-12, f"{what}: gradient of {name}"
    assert outcome.grads.keys() == expected.grads.keys()
    for name, weight in expected.weights.items():
        assert torch.allclose(outcome.weights[name], weight, rtol=0, atol=2e-6), f"{what}: {name} after three steps"
    assert outcome.weights.keys() == expected.weights.keys()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("n", "ep"), LAYOUTS)
def test_expert_parallel_training_equals_one_process(n, ep, dispatcher):
    argvs = [[*argv_of(kind), "--moe-token-dispatcher-type", dispatcher] for kind in KINDS]
    ranks = run_ranks(_ranks, n, ep, argvs, timeout=300.0)
    for kind, outcome, *others in zip(KINDS, *ranks, strict=True):
        what = f"{kind}, {n} ranks, EP {ep}, {dispatcher}"
        assert_equal(outcome, one_process(kind), 2e-6, what)
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
    argv = [*argv_of("accumulation"), *GLOBAL_LOSS, "--moe-token-dispatcher-type", dispatcher]
    expected = run_ranks(_ranks, 4, 1, [argv])[0][0]
    for ep in (2, 4):
        assert_equal(run_ranks(_ranks, 4, ep, [argv])[0][0], expected, 2e-6, f"EP {ep}")

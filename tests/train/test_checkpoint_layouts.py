"""A checkpoint of one expert layout loads into any other: weights, both moments and expert bias, bit for bit."""

import pytest
import torch
from harness import run_ranks
from train.layouts import argv_of, make_run

from moe_trainer.checkpoint.checkpoint import load, save
from moe_trainer.checkpoint.inspect import describe, differences
from moe_trainer.checkpoint.options import CheckpointState, LoadOptions, SaveOptions
from moe_trainer.model.weights import gather_named, load_named_weights
from moe_trainer.parallel.state import ParallelState
from moe_trainer.run import TrainState
from moe_trainer.train import train_step

KIND = "deepseek"


def _argv(ep, distributed):
    return [*argv_of(KIND), "--expert-model-parallel-size", str(ep), "--moe-token-dispatcher-type", "alltoall",
            *(["--use-distributed-optimizer"] if distributed else [])]


def _microbatches(run):
    return run.args.training.global_batch_size // (run.args.training.micro_batch_size * run.ps.dp.size)


def _save(run, folder):
    content = CheckpointState(iteration=2, args=run.args.as_dict())
    save(folder, content, run.chunks, run.optimizer, run.ps, SaveOptions(save_rng=False))


def _train_and_save(rank, n, ep, distributed, folder):
    run = make_run(_argv(ep, distributed), rank, ParallelState.create(n, rank, ep=ep), 2)
    state = TrainState()
    for _ in range(2):
        train_step(run, state, _microbatches(run))
        state.iteration += 1
    run.optimizer.wait_params()
    _save(run, folder)


def _load_and_save(rank, n, ep, distributed, source, target):
    """Returns the loss and the gradient norm of the step after."""
    run = make_run([*_argv(ep, distributed), "--seed", "99"], rank, ParallelState.create(n, rank, ep=ep), 1, skip=2)
    found = load(source, run.chunks, run.optimizer, run.ps, LoadOptions(run.args.as_dict(), load_rng=False))
    assert found.iteration == 2 and found.optim_loaded
    _save(run, target)
    result = train_step(run, TrainState(iteration=2), _microbatches(run))
    return result.losses, result.grad_norm


# (ranks, EP, distributed optimizer); each is loaded from the one before it
CHAIN = ((1, 1, False), (4, 4, False), (2, 2, True), (4, 2, True), (2, 1, True), (4, 2, False), (4, 4, True))


@pytest.mark.parametrize("distributed", [False, True])
def test_state_moves_between_expert_layouts_unchanged(tmp_path, distributed):
    first = tmp_path / "first"
    run_ranks(_train_and_save, 2, 2, distributed, first)
    kept = describe(first / "iter_0000002")
    for moment in ("exp_avg", "exp_avg_sq"):
        assert f"optimizer.state.{moment}.decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in kept
    source, results = first, []
    for number, (n, ep, sharded) in enumerate(CHAIN):
        target = tmp_path / str(number)
        results.append(run_ranks(_load_and_save, n, ep, sharded, source, target)[0])
        assert differences(first / "iter_0000002", target / "iter_0000002") == [], CHAIN[number]
        source = target
    for losses, norm in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=2e-6)
        assert norm == pytest.approx(results[0][1], rel=2e-6)


def _whole_model(rank, n):
    """What rank 0 gathers by name (the others nothing), and the numbers of local experts of a rank."""
    run = make_run(_argv(2, False), rank, ParallelState.create(n, rank, ep=2), 0)
    whole = dict(gather_named(run.chunks, run.ps, lambda param: param.data))
    return {name: tensor.clone() for name, tensor in whole.items()}, {
        param.shape[0] for param in run.chunks[0].parameters() if param.info.stacked}


def test_ranks_hold_a_share_of_the_experts_and_start_as_one_process():
    run = make_run(_argv(1, False), 0, ParallelState.single(), 0)
    expected = dict(gather_named(run.chunks, run.ps, lambda param: param.data))
    for rank, (whole, local) in enumerate(run_ranks(_whole_model, 4)):
        assert local == {4}
        assert list(whole) == (list(expected) if rank == 0 else [])
        assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.items())


def _load_misfits(rank, n, weights):
    """The message of this rank when one expert is missing and another one's shape is wrong."""
    run = make_run(_argv(2, False), rank, ParallelState.create(n, rank, ep=2), 0)
    load_named_weights(run.chunks, weights, run.ps)
    prefix = "decoder.layers.1.mlp.experts.local_experts"
    broken = {name: tensor for name, tensor in weights.items() if name != f"{prefix}.7.linear_fc1.weight"}
    broken |= {f"{prefix}.1.linear_fc2.weight": torch.zeros(3), "decoder.extra": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        load_named_weights(run.chunks, broken, run.ps)
    return str(error.value)


def test_weights_that_fit_no_model_are_refused_on_every_rank_alike():
    run = make_run(_argv(1, False), 0, ParallelState.single(), 0)
    weights = {name: tensor.clone() for name, tensor in gather_named(run.chunks, run.ps, lambda param: param.data)}
    one, other = run_ranks(_load_misfits, 2, weights)
    assert one == other
    for words in ("1 missing", "local_experts.7.linear_fc1.weight", "1 unexpected", "decoder.extra", "local_experts.1.linear_fc2.weight: given [3]"):
        assert words in one

"""The real optimizer's flat storage, gaps and paddings included, through any layout and back."""

import pytest
import torch
from harness import run_ranks
from toy import ToyChunk, build_training, compute_loss

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.checkpoint.inspect import describe, differences
from moe_trainer.checkpoint.manager import CheckpointState, LoadOptions, SaveOptions, load, save
from moe_trainer.parallel.state import ParallelState

RECORD = {"num_layers": 0, "num_experts": 3}


def make(ps, distributed, bf16, seed, **optimizer):
    model = ToyChunk(dtype=torch.bfloat16 if bf16 else torch.float32, seed=seed)
    grads, built = build_training(
        model,
        ps=ps,
        parallel=ParallelArgs(use_distributed_optimizer=distributed, ddp_bucket_size=400),
        precision=PrecisionArgs(bf16=bf16),
        **optimizer,
    )
    return model, grads, built


def step(model, grads, built, seed):
    built.zero_grad()
    compute_loss(model, seed).backward()
    grads.finish()
    built.step(1e-2, 0.1)


def _train_and_save(rank, size, folder, distributed, bf16):
    ps = ParallelState.create(size, rank)
    model, grads, built = make(ps, distributed, bf16, seed=0)
    for iteration in range(3):
        step(model, grads, built, iteration)
    save(folder, CheckpointState(3, RECORD), [model], built, ps, SaveOptions())


def _load_and_save(rank, size, source, target, distributed, bf16):
    ps = ParallelState.create(size, rank)
    model, grads, built = make(ps, distributed, bf16, seed=7)
    step(model, grads, built, 11)
    found = load(source, [model], built, ps, LoadOptions(RECORD))
    assert found.optim_loaded and built.scalars()["step"] == 3
    save(target, CheckpointState(3, RECORD), [model], built, ps, SaveOptions())
    step(model, grads, built, 5)
    return [param.detach().float() for param in model.parameters()]


@pytest.mark.parametrize("bf16", [False, True])
def test_state_moves_between_layouts_unchanged(tmp_path, bf16):
    run_ranks(_train_and_save, 2, tmp_path / "two", True, bf16)
    assert ("optimizer.state.fp32_param.norm.weight" in describe(tmp_path / "two/iter_0000003")) == bf16
    results = []
    for number, (size, distributed) in enumerate([(1, False), (1, True), (2, True), (4, True), (2, False)]):
        target = tmp_path / str(number)
        results += run_ranks(_load_and_save, size, tmp_path / "two", target, distributed, bf16)
        assert differences(tmp_path / "two/iter_0000003", target / "iter_0000003") == []
    # and training continues alike: every rank has the same batch here, so the mean over ranks changes nothing but rounding
    for other in results[1:]:
        assert all(torch.allclose(a, b, atol=1e-2 if bf16 else 1e-6) for a, b in zip(results[0], other, strict=True))


def _load_other(rank, size, folder):
    ps = ParallelState.create(size, rank)
    model, _, built = make(ps, False, False, seed=1, optimizer="sgd")
    with pytest.raises(
        ValueError, match="momentum_buffer.*--optimizer adam, this run has --optimizer sgd.*--no-load-optim"
    ):
        load(folder, [model], built, ps, LoadOptions(RECORD | {"optimizer": "sgd"}))


def test_state_of_another_optimizer_is_rejected(tmp_path):
    model, _, built = make(ParallelState.single(), False, False, seed=0)
    save(
        tmp_path,
        CheckpointState(3, RECORD | {"optimizer": "adam"}),
        [model],
        built,
        ParallelState.single(),
        SaveOptions(),
    )
    run_ranks(_load_other, 1, tmp_path)

"""--use-precision-aware-optimizer: the update against a definition, its memory, sharding and resume."""

import itertools

import pytest
import torch
from harness import run_ranks
from toy import Toy, ToyChunk, build_training, compute_loss, train_step

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.checkpoint.inspect import differences
from moe_trainer.checkpoint.manager import AsyncSaver, CheckpointState, LoadOptions, SaveOptions, load, save
from moe_trainer.optim.state_formats import FORMATS, ScaledFormat, decode, encode
from moe_trainer.parallel.state import ParallelState

BF16 = PrecisionArgs(bf16=True)
RECORD = {"num_layers": 0, "num_experts": 3}
MOMENTS = ("exp_avg", "exp_avg_sq")
AWARE = {"use_precision_aware_optimizer": True}
NARROW = {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
FP8 = {**AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}
HALF = {
    **AWARE,
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "fp8",
    "exp_avg_sq_dtype": "bf16",
    "main_grads_dtype": "bf16",
}


def _rounded(x, name, positive=False):
    fmt = FORMATS[name]
    return decode(*encode(x, fmt, positive)) if isinstance(fmt, ScaledFormat) else x.to(fmt.dtype).float()


def _state(optimizer):
    return {(held.state_name, held.param.info.names, held.start): held.values().clone() for held in optimizer.tensors()}


@pytest.mark.parametrize("first, second", list(itertools.product(FORMATS, FORMATS)))
def test_moments_in_every_pair_of_formats(first, second):
    """Adam in fp32 on the stored values, then rounded, tensor by tensor; with the gradients of the model itself."""
    model = Toy()
    grads, optimizer = build_training(
        model, clip_grad=0.0, adam_beta2=0.95, **AWARE, exp_avg_dtype=first, exp_avg_sq_dtype=second
    )
    params = [p.detach().clone() for p in model.parameters()]
    kept = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    for step in range(1, 5):
        train_step(model, grads, optimizer, [step], lr=0.05, weight_decay=0.0)
        for number, (param, (m, v)) in enumerate(zip(params, kept)):
            grad = list(model.parameters())[number].main_grad
            m.lerp_(grad, 0.1)
            v.mul_(0.95).addcmul_(grad, grad, value=0.05)
            param.sub_(0.05 / (1 - 0.9**step) * m / ((v / (1 - 0.95**step)).sqrt() + 1e-8))
            m.copy_(_rounded(m, first)), v.copy_(_rounded(v, second, True))
    exact = first == second == "fp32"
    for name, ours, theirs in zip(dict(model.named_parameters()), model.parameters(), params):
        # where a rounding of ours fell to the other side of a tie, one step of the format
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-5, atol=1e-6 if exact else 5e-3, msg=name)
    state = _state(optimizer)
    assert {name for name, *_ in state} == set(MOMENTS)
    for (kind, *_), tensor in state.items():
        assert torch.equal(tensor, _rounded(tensor, first if kind == "exp_avg" else second))


@pytest.mark.parametrize("segment", [64, 1 << 17])
def test_fp32_formats_equal_the_plain_optimizer(segment, monkeypatch):
    monkeypatch.setattr("moe_trainer.optim.optimizer_shard.MAX_SEGMENT_NUMEL_CPU", segment)
    plain, aware = Toy(), Toy()
    for model, more in ((plain, {}), (aware, AWARE)):
        grads, optimizer = build_training(model, **more)
        for step in range(4):
            train_step(model, grads, optimizer, [step])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), aware.parameters()))


def test_remainders_are_the_fp32_main_parameters():
    """Bit by bit those of the plain optimizer, in half the memory; the model parts from plain rounding at ties only."""
    (plain, plain_run), (aware, aware_run) = (
        (model, build_training(model, precision=BF16, clip_grad=0.0, **more))
        for model, more in ((Toy(torch.bfloat16), {}), (Toy(torch.bfloat16), AWARE))
    )
    for step in range(4):
        for model, (grads, optimizer) in ((plain, plain_run), (aware, aware_run)):
            optimizer.zero_grad()
            compute_loss(plain, step).backward() if model is plain else None
            for ours, theirs in zip(aware.parameters(), plain.parameters()):
                if model is aware:
                    ours.main_grad.copy_(theirs.main_grad)  # the same gradients, whatever the models became
            if model is plain:
                grads.finish()
            optimizer.step(1e-3, 0.1)
        expected, found = _state(plain_run[1]), _state(aware_run[1])
        assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)
    assert plain_run[1].params_norm() == aware_run[1].params_norm()
    (main,) = {block.main.flat.dtype for state in aware_run[1]._shards for block in state.blocks}
    assert main == torch.int16
    for ours, theirs in zip(aware.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0)


@pytest.mark.parametrize("formats", [NARROW, FP8, HALF])
def test_update_decodes_one_segment_at_a_time(formats, monkeypatch):
    """The update decodes one segment at a time, regardless of the size of the state."""
    monkeypatch.setattr("moe_trainer.optim.optimizer_shard.MAX_SEGMENT_NUMEL_CPU", 64)
    model = Toy(torch.bfloat16)
    grads, optimizer = build_training(model, precision=BF16, **formats)
    opened, update = [], optimizer._updater._update
    monkeypatch.setattr(
        optimizer._updater,
        "_update",
        lambda segments, grads, *rest: (
            opened.append(sum(grad.numel() for grad in grads)),
            update(segments, grads, *rest),
        )[1],
    )
    train_step(model, grads, optimizer, [0])
    assert max(opened) <= 64 and sum(opened) >= sum(p.numel() for p in model.parameters())


def _train(model, grads, optimizer, steps, rank=0, size=1):
    norms = []
    for step in steps:
        norms.append(
            train_step(
                model, grads, optimizer, [step * 8 + rank] if size > 1 else [step * 8, step * 8 + 1], lr=1e-2
            ).grad_norm
        )
    return norms


def _train_and_gather(rank, n, formats, distributed, bf16):
    model = Toy(torch.bfloat16 if bf16 else torch.float32)
    ps = ParallelState.create(n, rank) if n > 1 else ParallelState.single()
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 300} if distributed else {}
    built = build_training(
        model,
        ps=ps,
        precision=BF16 if bf16 else None,
        parallel=ParallelArgs(use_distributed_optimizer=distributed, **overlap),
        **formats,
    )
    norms = _train(model, *built, range(4), rank, n)
    built[1].wait_params()
    return norms, [p.detach().float() for p in model.parameters()]


@pytest.mark.parametrize("formats", [NARROW, FP8, {**FP8, "exp_avg_sq_dtype": "fp8"}])
def test_precision_aware_optimizer_on_two_ranks_equals_one(formats):
    """The formats' rounding does not depend on who holds what; what is left is the order of fp32 sums, at times a rounding apart."""
    norms, expected = _train_and_gather(0, 1, formats, False, False)
    for distributed in (False, True):
        for found, params in run_ranks(_train_and_gather, 2, formats, distributed, False):
            assert found == pytest.approx(norms, rel=1e-3)
            for ours, theirs in zip(params, expected):
                assert (ours - theirs).norm() <= 2e-3 * theirs.norm()


@pytest.mark.parametrize("formats", [NARROW, HALF])
def test_two_ranks_of_a_bf16_model_are_close_to_one(formats):
    _, expected = _train_and_gather(0, 1, formats, False, True)
    for _, params in run_ranks(_train_and_gather, 2, formats, True, True):
        assert all((ours - theirs).norm() <= 3e-2 * theirs.norm() for ours, theirs in zip(params, expected))


@pytest.mark.parametrize("name", ["fp8", "fp16"])
def test_row_without_gradient_makes_no_large_step(name):
    """Its second moment is far below the largest, its first moment is not: dividing by eps alone would make a huge step."""
    model = Toy()
    grads, optimizer = build_training(model, clip_grad=0.0, **AWARE, exp_avg_dtype="fp32", exp_avg_sq_dtype=name)
    before = model.word_embeddings.weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        grads.finish()
        model.word_embeddings.weight.main_grad.zero_()
        model.word_embeddings.weight.main_grad[0] = 1e6
        if step == 0:
            model.word_embeddings.weight.main_grad[1] = 1e-3
        optimizer.step(1e-2, 0.0)
    assert 0 < (model.word_embeddings.weight[1] - before[1]).abs().max() < 0.05


def _make(rank, n, formats, bf16, distributed, seed=0):
    ps = ParallelState.create(n, rank) if n > 1 else ParallelState.single()
    model = ToyChunk(torch.bfloat16 if bf16 else torch.float32, seed=seed)
    return (
        ps,
        model,
        build_training(
            model,
            ps=ps,
            precision=BF16 if bf16 else None,
            parallel=ParallelArgs(use_distributed_optimizer=distributed),
            **formats,
        ),
    )


def _train_and_save(rank, n, folder, formats, bf16):
    ps, model, built = _make(rank, n, formats, bf16, True)
    _train(model, *built, range(3), rank, n)
    save(folder, CheckpointState(3, RECORD), [model], built[1], ps, SaveOptions())
    _train(model, *built, range(3, 6), rank, n)
    return [p.detach().clone() for p in model.parameters()], _state(built[1])


def _resumed(rank, n, source, target, formats, bf16, continue_training):
    ps, model, built = _make(rank, n, formats, bf16, True, seed=9)
    _train(model, *built, [17], rank, n)  # everything is different before
    load(source, [model], built[1], ps, LoadOptions(RECORD))
    if target is not None:
        save(target, CheckpointState(3, RECORD), [model], built[1], ps, SaveOptions())
    if continue_training:
        _train(model, *built, range(3, 6), rank, n)
    return [p.detach().clone() for p in model.parameters()], _state(built[1])


@pytest.mark.parametrize("formats, bf16", [(NARROW, True), (FP8, False), (HALF, True)])
def test_resume_keeps_values_across_ranks_and_formats(tmp_path, formats, bf16):
    """Bit for bit on the same ranks; the same values on any others, and into any formats that hold them."""
    straight = run_ranks(_train_and_save, 2, tmp_path / "a", formats, bf16)
    again = run_ranks(_resumed, 2, tmp_path / "a", None, formats, bf16, True)
    for (params, state), (other, other_state) in zip(straight, again):
        assert all(torch.equal(a, b) for a, b in zip(params, other))
        assert state.keys() == other_state.keys() and all(torch.equal(state[key], other_state[key]) for key in state)
    # a remainder rounds ties away from zero: into it only what is no tie of the coarser fp16
    for number, (n, here) in enumerate(
        ((1, formats), (3, formats), (1, {}), *(((2, AWARE),) if formats is not HALF else ()))
    ):
        target = tmp_path / str(number)
        run_ranks(_resumed, n, tmp_path / "a", target, here, bf16, False)
        assert differences(tmp_path / "a/iter_0000003", target / "iter_0000003") == []


def _save_async_and_load_parallel(rank, n, folder, formats):
    """Saved while training continues, and loaded in parallel by the ranks."""
    ps, model, built = _make(rank, n, formats, True, False)
    _train(model, *built, range(3), rank, n)
    saver = AsyncSaver()
    before = _state(built[1])
    saver.start(folder, CheckpointState(3, RECORD), [model], built[1], ps, SaveOptions())
    _train(model, *built, range(3, 5), rank, n)
    saver.finish()
    load(folder, [model], built[1], ps, LoadOptions(RECORD, fully_parallel=True))
    after = _state(built[1])
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_saved_in_the_background_and_loaded_in_parallel(tmp_path):
    assert all(run_ranks(_save_async_and_load_parallel, 2, tmp_path, HALF))


def test_weights_loaded_alone_reach_the_main_parameters():
    for formats in (NARROW, HALF):
        model = Toy(torch.bfloat16)
        grads, optimizer = build_training(model, precision=BF16, **formats)
        train_step(model, grads, optimizer, [0])
        with torch.no_grad():
            model.first.weight.fill_(3.0)
        optimizer.after_load(params_changed=True, state_loaded=False)
        train_step(model, grads, optimizer, [1], lr=0.0)
        assert torch.equal(model.first.weight, torch.full_like(model.first.weight, 3.0))


def test_fp16_main_parameters_are_more_precise_than_the_model():
    model = Toy(torch.bfloat16)
    grads, optimizer = build_training(model, precision=BF16, clip_grad=0.0, **AWARE, main_params_dtype="fp16")
    for step in range(10):
        train_step(model, grads, optimizer, [step], lr=3e-4, weight_decay=0.0)
    main = {held.param: held.values() for held in optimizer.tensors() if held.state_name == "fp32_param"}
    assert all(torch.equal(values.bfloat16(), param.detach().flatten()) for param, values in main.items())
    assert any(not torch.equal(values, values.bfloat16().float()) for values in main.values())


def test_model_is_rounded_to_its_main_parameters():
    """From the start: a run that resumes from a checkpoint of iteration 0 has the model of the main parameters."""
    model = Toy(torch.bfloat16)
    with torch.no_grad():
        model.first.weight[0, 0] = 1e-14  # fp16 next to numbers around 1 has none so small
    _, optimizer = build_training(model, precision=BF16, **AWARE, main_params_dtype="fp16")
    main = {held.param: held.values() for held in optimizer.tensors() if held.state_name == "fp32_param"}
    assert all(torch.equal(values, param.detach().float().flatten()) for param, values in main.items())
    assert model.first.weight[0, 0] == 0 and model.first.weight.any()


def test_main_parameters_at_a_rounding_tie_are_loaded_exactly():
    """A plain run's model has been rounded to even, remainders round away from zero: what is loaded must bring its own half along."""
    model = Toy(torch.bfloat16)
    _, optimizer = build_training(model, precision=BF16, **AWARE)
    optimizer.begin_load()
    main = [held.tensor for held in optimizer.tensors() if held.state_name == "fp32_param"]
    with torch.no_grad():
        for tensor, param in zip(main, model.parameters(), strict=True):
            param.copy_(tensor.fill_(1 + 2.0**-8).view(param.shape))
    assert all((param == 1.0).all() for param in model.parameters())
    optimizer.after_load(params_changed=True, state_loaded=True)
    assert all((held.values() == 1 + 2.0**-8).all() for held in optimizer.tensors() if held.state_name == "fp32_param")

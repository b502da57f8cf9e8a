"""Saved state is restored bit for bit under any layout; checkpoints that do not fit are rejected with reasons."""

import json
import random
import sys
import time
from dataclasses import replace

import numpy
import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer, layer_shapes
from harness import run_ranks

from arguments.mechanisms.selections import SAVED_NAMES
from moe_trainer.checkpoint import native_index
from moe_trainer.checkpoint.index import check
from moe_trainer.checkpoint.inspect import describe
from moe_trainer.checkpoint.manager import (
    AsyncSaver,
    CheckpointError,
    CheckpointState,
    LoadOptions,
    SaveOptions,
    latest_iteration,
    load,
    read_saved_args,
    save,
)
from moe_trainer.checkpoint.resolve import latest_valid
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()
OPTIONS = LoadOptions(RECORD)


def state(iteration=3, **more):
    return CheckpointState(
        iteration,
        RECORD,
        consumed_train_samples=12,
        consumed_valid_samples=4,
        skipped_train_samples=2,
        num_floating_point_operations_so_far=1e9,
        extra={"running": [1.5, None, (2, "x")]},
        **more,
    )


def save_one(folder, iteration=3, seed=0, **options):
    model = FakeModel(seed=seed, expert_bias=True)
    optimizer = FakeOptimizer(model, SINGLE, seed=seed)
    optimizer.step = iteration
    save(folder, state(iteration), [model], optimizer, SINGLE, SaveOptions(**options))
    return model, optimizer


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_round_trip_of_everything(tmp_path):
    model, optimizer = save_one(tmp_path)
    drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
    other = FakeModel(seed=9, expert_bias=True)
    other_optimizer = FakeOptimizer(other, SINGLE, seed=9)
    found = load(tmp_path, [other], other_optimizer, SINGLE, OPTIONS)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn
    assert equal(other.tensors().values(), model.tensors().values())
    assert equal(other_optimizer.values(), optimizer.values())
    assert other_optimizer.step == 3 and other_optimizer.notes == [(True, True)]
    assert found.iteration == 3 and found.optim_loaded and found.rng_loaded and not found.from_megatron
    assert found.state == replace(state(), scheduler={})


def test_native_files_need_no_code_of_other_formats(tmp_path, monkeypatch):
    packages = "moe_trainer.checkpoint.hf", "moe_trainer.checkpoint.megatron_legacy"
    for name in (*packages, *(name for name in sys.modules if name.startswith(packages))):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    save_one(tmp_path)
    other = FakeModel(seed=9, expert_bias=True)
    assert load(tmp_path, [other], FakeOptimizer(other, SINGLE, seed=9), SINGLE, OPTIONS).optim_loaded
    assert read_saved_args(tmp_path) and latest_valid(tmp_path) == 3
    with pytest.raises(ImportError):
        save_one(tmp_path / "legacy", ckpt_format="torch")


@pytest.mark.parametrize("save_optim", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_waits_for_pending_param_gather(tmp_path, asynchronous, save_optim):
    """With --overlap-param-gather the model is complete once the optimizer has waited for it."""
    model = FakeModel(expert_bias=True)
    complete, arriving = model.tensors(), [param.detach().clone() for param in model.parameters()]
    optimizer = FakeOptimizer(model, SINGLE)
    for param in model.parameters():
        param.data.fill_(torch.nan)
    optimizer.wait_params = lambda: [param.data.copy_(value) for param, value in zip(model.parameters(), arriving)]
    saver = AsyncSaver()
    writer = saver.start if asynchronous else save
    writer(tmp_path, state(), [model], optimizer, SINGLE, SaveOptions(save_optim=save_optim))
    saver.finish()
    other = FakeModel(seed=9, expert_bias=True)
    load(tmp_path, [other], None, SINGLE, OPTIONS)
    assert equal(other.tensors().values(), complete.values())


def test_files_and_tracker(tmp_path):
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"model")
    save_one(tmp_path / "save", 20, tokenizer_files=(tokenizer,), log_progress=True, verify_integrity=True)
    folder = tmp_path / "save/iter_0000020"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "integrity.json",
        "metadata.json",
        "tokenizer",
    ]
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
    }
    assert (folder / "tokenizer/tokenizer.model").read_bytes() == b"model"
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "20"
    assert latest_iteration(tmp_path / "save") == 20
    fields = (tmp_path / "save/progress.txt").read_text().rstrip("\n").split("\t")
    assert fields[1].startswith("Job ID: ") and fields[2:] == ["# GPUs: 1", "Saved checkpoint", "Iteration: 20"]
    assert check(folder, hashes=True) == []


def test_saved_args_need_no_model(tmp_path):
    save_one(tmp_path)
    assert read_saved_args(tmp_path) == RECORD
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        read_saved_args(tmp_path / "elsewhere")


def test_optimizer_and_rng_can_be_omitted_from_save(tmp_path):
    save_one(tmp_path, save_optim=False, save_rng=False)
    keys = describe(tmp_path / "iter_0000003")
    assert not [key for key in keys if key.startswith(("optimizer.", "rng_state"))]
    model = FakeModel(expert_bias=True)
    with pytest.raises(CheckpointError, match="no optimizer state .*--no-load-optim"):
        load(tmp_path, [model], FakeOptimizer(model, SINGLE), SINGLE, OPTIONS)


def test_optimizer_and_rng_can_be_omitted_from_load(tmp_path):
    saved, _ = save_one(tmp_path)
    model = FakeModel(seed=4, expert_bias=True)
    optimizer = FakeOptimizer(model, SINGLE, seed=4)
    before = optimizer.values()
    torch_state = torch.get_rng_state()
    found = load(tmp_path, [model], optimizer, SINGLE, replace(OPTIONS, load_optim=False, load_rng=False))
    assert found.iteration == 3 and not found.optim_loaded and not found.rng_loaded
    assert equal(optimizer.values(), before) and optimizer.notes == [(True, False)] and optimizer.step == 0
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert equal(model.tensors().values(), saved.tensors().values())
    assert load(tmp_path, [model], optimizer, SINGLE, replace(OPTIONS, finetune=True)).iteration == 0
    assert equal(optimizer.values(), before)


def test_empty_load_folder_starts_from_random_weights(tmp_path, caplog):
    model = FakeModel()
    assert load(tmp_path, [model], None, SINGLE, OPTIONS) is None
    assert "could not find the metadata file" in caplog.text and "will start from random" in caplog.text
    assert f"!!! --load {tmp_path}: this folder has no checkpoint." in caplog.text
    assert "!!! THIS RUN TRAINS FROM RANDOM WEIGHTS" in caplog.text and "--finetune" not in caplog.text
    load(tmp_path / "none", [model], None, SINGLE, replace(OPTIONS, finetune=True))
    assert f"{tmp_path / 'none'}: there is no such folder." in caplog.text and "!!! --finetune has" in caplog.text
    caplog.clear()
    (tmp_path / "link").symlink_to(tmp_path)  # the first start of a run that continues itself
    load(tmp_path, [model], None, SINGLE, replace(OPTIONS, args=RECORD | {"save": str(tmp_path / "link")}))
    assert "will start from random" in caplog.text and "!!!" not in caplog.text
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint"):
        load(tmp_path, [model], None, SINGLE, replace(OPTIONS, exit_on_missing=True))
    assert latest_iteration(tmp_path) is None


def test_the_index_is_read_once(tmp_path, monkeypatch):
    save(tmp_path, CheckpointState(3, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    read, paths = native_index.load_pickle, []
    monkeypatch.setattr(native_index, "load_pickle", lambda data: (paths.append(len(data)), read(data))[1])
    load(tmp_path, [FakeModel()], None, SINGLE, LoadOptions(RECORD))
    assert len(paths) == 1
    assert read_saved_args(tmp_path) and len(paths) == 2


def test_an_older_iteration_can_be_chosen(tmp_path):
    first, _ = save_one(tmp_path, 3, seed=1)
    save_one(tmp_path, 6, seed=2)
    model = FakeModel(expert_bias=True)
    assert load(tmp_path, [model], None, SINGLE, OPTIONS).iteration == 6
    assert load(tmp_path, [model], None, SINGLE, replace(OPTIONS, ckpt_step=3)).iteration == 3
    assert equal(model.tensors().values(), first.tensors().values())
    with pytest.raises(
        CheckpointError, match=r"--ckpt-step 4 asks for .*iter_0000004, which does not exist.*3, 6.*--ckpt-step 6"
    ):
        load(tmp_path, [model], None, SINGLE, replace(OPTIONS, ckpt_step=4))


def test_the_same_iteration_can_be_saved_again(tmp_path):
    save_one(tmp_path, 3, seed=1)
    second, _ = save_one(tmp_path, 3, seed=2)
    model = FakeModel(expert_bias=True)
    load(tmp_path, [model], None, SINGLE, OPTIONS)
    assert equal(model.tensors().values(), second.tensors().values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_retention_keeps_multiples_and_the_latest(tmp_path):
    for iteration in (10, 20, 25, 30, 35):
        save_one(tmp_path, iteration, retain_interval=20)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000020", "iter_0000035"]


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"total_limit": 2}, [25, 30, 99]),
        ({"total_limit": 2, "retain_interval": 20}, [20, 25, 30, 99]),
        ({"total_limit": 1, "protected": frozenset([5])}, [5, 30, 99]),
        ({"total_limit": 9}, [5, 10, 20, 25, 30, 99]),
    ],
)
def test_total_limit_keeps_the_last_the_retained_and_the_protected_ones(tmp_path, options, kept):
    """Those of later iterations are of a run that this one does not continue: they do not count."""
    for iteration in (99, 5, 10, 20, 25):
        save_one(tmp_path, iteration)
    model, _ = save_one(tmp_path, 30, **options)
    assert [int(path.name.removeprefix("iter_")) for path in sorted(tmp_path.glob("iter_*"))] == kept
    assert load(tmp_path, [model], None, SINGLE, OPTIONS).iteration == 30


def test_total_limit_removes_the_link_to_a_checkpoint_and_not_the_checkpoint(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "ckpt"
    save_one(elsewhere, 5)
    folder.mkdir()
    (folder / "iter_0000005").symlink_to(elsewhere / "iter_0000005")
    save_one(folder, 10, total_limit=1)
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000010"]
    assert (elsewhere / "iter_0000005" / "metadata.json").exists()


def test_total_limit_counts_no_save_in_progress(tmp_path):
    saver, model = AsyncSaver(), FakeModel()
    for iteration in (1, 2, 3):
        saver.start(tmp_path, state(iteration), [model], None, SINGLE, SaveOptions(total_limit=1))
        assert latest_iteration(tmp_path) == (iteration - 1 or None), "the older one stays until the newer is complete"
    saver.finish()
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]


def test_mixed_precision_keeps_both_copies(tmp_path):
    model = FakeModel(dtype=torch.bfloat16)
    optimizer = FakeOptimizer(model, SINGLE, main_params=True)
    save(tmp_path, state(), [model], optimizer, SINGLE, SaveOptions())
    keys = describe(tmp_path / "iter_0000003")
    assert keys["output_layer.weight"] == ((512, 64), "bfloat16")
    assert keys["optimizer.state.fp32_param.decoder.layers.mlp.router.weight"] == ((2, 8, 64), "float32")
    other = FakeModel(seed=5, dtype=torch.bfloat16)
    other_optimizer = FakeOptimizer(other, SINGLE, main_params=True, seed=5)
    load(tmp_path, [other], other_optimizer, SINGLE, OPTIONS)
    assert equal(other_optimizer.values(), optimizer.values()) and equal(
        other.tensors().values(), model.tensors().values()
    )
    # an fp32 run takes the exact values, and a mixed-precision run takes main parameters from an fp32 run's weights
    exact = FakeModel(seed=6)
    load(tmp_path, [exact], None, SINGLE, OPTIONS)
    main = {id(held.param): held.tensor for held in optimizer.held if held.state_name == "fp32_param"}
    assert all(torch.equal(exact.table[name].flatten(), main[id(param)]) for name, param in model.table.items())
    save_one(tmp_path / "fp32")
    load(tmp_path / "fp32", [other], other_optimizer, SINGLE, replace(OPTIONS, strictness="assume_ok_unexpected"))
    weights = FakeModel(expert_bias=True)
    assert all(
        torch.equal(held.tensor, next(p for n, p in weights.table.items() if other.table[n] is held.param).flatten())
        for held in other_optimizer.held
        if held.state_name == "fp32_param"
    )


def test_other_architecture_is_rejected_before_loading(tmp_path):
    save_one(tmp_path)
    layers = [layer_shapes(ffn=48), layer_shapes(ffn=48), layer_shapes(ffn=48)]
    model = FakeModel(layers)
    before = model.tensors()
    options = LoadOptions(RECORD | {"num_layers": 3, "moe_ffn_hidden_size": 48})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, [model], None, SINGLE, options)
    text = str(caught.value)
    assert (
        "decoder.layers.mlp.experts.experts.linear_fc1.weight: (2, 8, 64, 64) in the checkpoint, (3, 8, 96, 64) here"
        in text
    )
    assert "--num-layers (num_layers): 2 in the checkpoint, 3 here" in text and "--use-checkpoint-args" in text
    assert len(text.splitlines()) < 40
    assert equal(model.tensors().values(), before.values())


def test_other_head_count_with_equal_shapes_is_rejected(tmp_path, caplog):
    save_one(tmp_path)
    model = FakeModel(expert_bias=True)
    with pytest.raises(
        CheckpointError, match=r"--num-attention-heads \(num_attention_heads\): 4 in the checkpoint, 8 here"
    ):
        load(tmp_path, [model], None, SINGLE, LoadOptions(RECORD | {"num_attention_heads": 8}))
    assert load(tmp_path, [model], None, SINGLE, LoadOptions(RECORD | {"num_attention_heads": 8}, finetune=True))


def test_value_that_another_flag_gives_is_no_difference(tmp_path, caplog):
    """An imported checkpoint names the epsilon of latents, a preset may leave it to --norm-epsilon."""
    record, latent = RECORD | {"layernorm_epsilon": 1e-6}, "attention_latent_norm_epsilon"
    state = CheckpointState(3, record | {latent: 1e-6})
    save(tmp_path, state, [FakeModel()], None, SINGLE, SaveOptions())
    for here, differs in ((None, False), (1e-5, True)):
        caplog.clear()
        load(tmp_path, [FakeModel()], None, SINGLE, LoadOptions(record | {latent: here}))
        assert ("--attention-latent-norm-epsilon" in caplog.text) == differs


def test_strictness_levels_handle_missing_and_unexpected_keys(tmp_path, caplog):
    save_one(tmp_path)
    without, more = FakeModel(), FakeModel([layer_shapes(qk_norm=32)] * 2, expert_bias=True)
    assert load(tmp_path, [without], None, SINGLE, replace(OPTIONS, strictness="assume_ok_unexpected"))
    assert load(tmp_path, [without], None, SINGLE, replace(OPTIONS, strictness="log_unexpected"))
    assert "decoder.layers.mlp.router.expert_bias" in caplog.text
    refusal = "(?s)expert_bias of the checkpoint is not in this model.*--dist-ckpt-strictness log_unexpected"
    with pytest.raises(CheckpointError, match=refusal):
        load(tmp_path, [without], None, SINGLE, OPTIONS)
    with_mtp = FakeModel()
    with_mtp.buffer_table["mtp.layers.0.eh_proj.weight"] = torch.ones(8)
    save(tmp_path / "mtp", CheckpointState(3, RECORD), [with_mtp], None, SINGLE, SaveOptions())
    with pytest.raises(CheckpointError, match="(?s)eh_proj.*--mtp-num-layers 0.*--dist-ckpt-strictness log_unexpected"):
        load(tmp_path / "mtp", [without], None, SINGLE, OPTIONS)
    with pytest.raises(CheckpointError, match="q_layernorm.weight is not in the checkpoint"):
        load(tmp_path, [more], None, SINGLE, replace(OPTIONS, strictness="log_all", has_initial_weights=False))
    with pytest.raises(CheckpointError, match="q_layernorm.weight is not in the checkpoint"):
        load(tmp_path, [more], None, SINGLE, OPTIONS)
    assert load(tmp_path, [more], None, SINGLE, replace(OPTIONS, strictness="log_all"))
    assert "they keep their initial values" in caplog.text


@pytest.mark.parametrize(
    ("name", "is_needed"),
    [
        ("router.global_tokens_per_expert", False),
        ("router.ga_steps", False),
        *((f"router.{name}", True) for name in SAVED_NAMES),
    ],
)
def test_only_what_no_model_needs_may_stay_unread(tmp_path, name, is_needed):
    model = FakeModel()
    model.buffer_table[f"decoder.layers.0.mlp.{name}"] = torch.ones(8)
    model.buffer_table[f"decoder.layers.1.mlp.{name}"] = torch.ones(8)
    save(tmp_path, CheckpointState(1, RECORD), [model], None, SINGLE, SaveOptions())
    if not is_needed:
        assert load(tmp_path, [FakeModel()], None, SINGLE, OPTIONS)
        return
    with pytest.raises(CheckpointError, match=f"{name} of the checkpoint is not in this model"):
        load(tmp_path, [FakeModel()], None, SINGLE, replace(OPTIONS, finetune=True))


@pytest.mark.parametrize("rows", [640, 384])
def test_other_vocabulary_padding_is_accepted_for_same_vocabulary(tmp_path, rows, caplog):
    saved, saved_optimizer = save_one(tmp_path)
    model = FakeModel(vocab=rows, seed=3, expert_bias=True)
    optimizer = FakeOptimizer(model, SINGLE, seed=3)
    initial = model.tensors()
    with pytest.raises(CheckpointError, match="embedding.word_embeddings.weight"):
        load(tmp_path, [model], optimizer, SINGLE, OPTIONS)
    load(tmp_path, [model], optimizer, SINGLE, replace(OPTIONS, vocab_size=380))
    assert caplog.text.count(f"padded to 512 rows in the checkpoint and to {rows} here") == 1
    both = min(rows, 512)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert torch.equal(model.table[name][:both], saved.table[name][:both])
        assert torch.equal(model.table[name][both:], initial[name][both:])
    assert torch.equal(optimizer.held[0].tensor[: both * 64], saved_optimizer.held[0].tensor[: both * 64])
    with pytest.raises(CheckpointError, match="embedding.word_embeddings.weight"):
        load(tmp_path, [model], optimizer, SINGLE, replace(OPTIONS, vocab_size=500 if rows == 384 else 600))


def test_stacked_and_per_layer_keys_are_both_read(tmp_path):
    listed = RECORD | {"moe_layer_freq": [1, 1]}
    model = FakeModel(seed=1)
    save(tmp_path, CheckpointState(1, listed), [model], None, SINGLE, SaveOptions())
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in describe(tmp_path / "iter_0000001")
    other = FakeModel(seed=2)
    load(tmp_path, [other], None, SINGLE, OPTIONS)
    assert equal(other.tensors().values(), model.tensors().values())


# ---- several ranks


def _rank_save(rank, size, folder, distributed):
    ps = ParallelState.create(size, rank)
    random.seed(rank)
    model = FakeModel(seed=1, expert_bias=True)
    save(folder, state(), [model], FakeOptimizer(model, ps, distributed, seed=1), ps, SaveOptions())


def _rank_load(rank, size, folder, distributed):
    ps = ParallelState.create(size, rank)
    model = FakeModel(seed=2, expert_bias=True)
    optimizer = FakeOptimizer(model, ps, distributed, seed=2)
    found = load(folder, [model], optimizer, ps, OPTIONS)
    expected = FakeModel(seed=1, expert_bias=True)
    assert equal(model.tensors().values(), expected.tensors().values())
    assert equal(optimizer.values(), FakeOptimizer(expected, ps, distributed, seed=1).values())
    return random.getstate() == random.Random(rank).getstate() and found.rng_loaded


@pytest.mark.parametrize("distributed", [False, True])
def test_checkpoint_of_two_ranks_loads_on_any_number_of_ranks(tmp_path, distributed):
    run_ranks(_rank_save, 2, tmp_path, distributed)
    assert check(tmp_path / "iter_0000003") == []
    sizes = [(tmp_path / f"iter_0000003/__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.2 * min(sizes)
    assert run_ranks(_rank_load, 2, tmp_path, distributed) == [True, True]
    for other in (False, True):
        assert run_ranks(_rank_load, 1, tmp_path, other) == [True]
        assert run_ranks(_rank_load, 4, tmp_path, other)[:2] == [True, True]


def test_keys_are_independent_of_rank_count_and_optimizer(tmp_path):
    run_ranks(_rank_save, 3, tmp_path / "ranks", True)
    run_ranks(_rank_save, 1, tmp_path / "one", False)
    assert describe(tmp_path / "ranks/iter_0000003") == describe(tmp_path / "one/iter_0000003")


def _rank_mixed(rank, size, folder):
    """Save in the background while the model changes, then again at once."""
    ps = ParallelState.create(size, rank)
    model = FakeModel(seed=1, expert_bias=True)
    optimizer = FakeOptimizer(model, ps, True, seed=1)
    save(folder / "sync", state(), [model], optimizer, ps, SaveOptions())
    random.setstate(random.Random(0).getstate())
    saver = AsyncSaver()
    assert not saver.in_progress
    saver.start(folder / "async", state(), [model], optimizer, ps, SaveOptions())
    with torch.no_grad():
        for tensor in (*model.parameters(), *(held.tensor for held in optimizer.held)):
            tensor.zero_()
    assert saver.in_progress
    while saver.writing:
        time.sleep(0.01)
    saver.finish()
    assert not saver.in_progress
    assert latest_iteration(folder / "async") == 3
    saver.start(folder / "async", state(6), [model], optimizer, ps, SaveOptions())
    saver.start(folder / "async", state(9), [model], optimizer, ps, SaveOptions())
    saver.finish()
    assert latest_iteration(folder / "async") == 9


def test_async_save_equals_synchronous_save(tmp_path):
    run_ranks(_rank_mixed, 2, tmp_path)
    kinds = [FakeModel(seed=5, expert_bias=True), FakeModel(seed=6, expert_bias=True)]
    optimizers = [FakeOptimizer(model, SINGLE, seed=7) for model in kinds]
    for name, model, optimizer in zip(("sync", "async"), kinds, optimizers):
        load(tmp_path / name, [model], optimizer, SINGLE, replace(OPTIONS, ckpt_step=3))
    assert (
        equal(kinds[0].tensors().values(), kinds[1].tensors().values()) and kinds[0].table["output_layer.weight"].any()
    )
    assert equal(optimizers[0].values(), optimizers[1].values())
    assert sorted(path.name for path in (tmp_path / "async").glob("iter_*")) == [
        "iter_0000003",
        "iter_0000006",
        "iter_0000009",
    ]


def _rank_disagree(rank, size, folder):
    ps = ParallelState.create(size, rank)
    model = FakeModel([layer_shapes(ffn=32 + rank)] * 2)
    with pytest.raises(CheckpointError, match="disagree about decoder.layers.mlp.experts.experts.linear_fc1.weight"):
        save(folder, state(), [model], None, ps, SaveOptions())


def test_inconsistent_ranks_are_rejected(tmp_path):
    run_ranks(_rank_disagree, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []

"""Legacy checkpoints of Megatron-LM (`--ckpt-format torch`): the golden one, and files as other layouts and optimizers write them."""

import argparse
import json
import shutil

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer, fake_chunks
from harness import run_ranks

from moe_trainer.checkpoint.archive import load_bytes
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.index import check
from moe_trainer.checkpoint.layer_spec import fused_norms
from moe_trainer.checkpoint.manager import (
    CheckpointState,
    LoadOptions,
    SaveOptions,
    latest_iteration,
    load,
    read_saved_args,
    save,
    saved_padded_vocab_size,
)
from moe_trainer.checkpoint.megatron_legacy import writer as legacy_writer
from moe_trainer.checkpoint.megatron_legacy.names import decays, param_group_kind, tied_copies, tp_split
from moe_trainer.checkpoint.megatron_legacy.reader import open_file
from moe_trainer.checkpoint.rank_memory import (
    LayoutSizes,
    bucketing,
    buffer_offsets,
    global_name,
    module_order_key,
    shared_embedding_names,
    to_spec_name,
)
from moe_trainer.checkpoint.resolve import latest_valid
from moe_trainer.checkpoint.unpickle import to_builtin
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()


def loaded(folder, ps=SINGLE, distributed=False, **options):
    """(result of load, model, optimizer) of a checkpoint directory."""
    model = FakeModel(seed=1, ps=ps)
    optimizer = FakeOptimizer(model, ps, distributed=distributed, seed=1)
    return load(folder, [model], optimizer, ps, LoadOptions(RECORD, **options)), model, optimizer


def assert_same(mine, theirs):
    """Assert that two (found, model, optimizer) have the same weights and moments."""
    for (name, one), other in zip(mine[1].tensors().items(), theirs[1].tensors().values(), strict=True):
        assert torch.equal(one, other), name
    for one, other in zip(mine[2].held, theirs[2].held, strict=True):
        assert torch.equal(one.tensor, other.tensor), (one.param.info.names[0], one.state_name)


def test_golden_legacy_checkpoint_equals_its_torch_dist_twin(shared):
    """Megatron-LM wrote the same iteration of the same run in both formats."""
    legacy, twin = loaded(shared / "golden/ckpt/a2_torch"), loaded(shared / "golden/ckpt/a2_torch_dist")
    assert_same(legacy, twin)
    found = legacy[0]
    assert found.iteration == 5 and found.from_megatron and found.optim_loaded and found.rng_loaded
    assert found.state.consumed_train_samples == 20 and legacy[2].step == 5
    assert dict(found.state.scheduler) == dict(twin[0].state.scheduler)


def _compare_with_torch_dist(rank, size, shared, sizes):
    ps = ParallelState.create(size, rank, **sizes)
    assert_same(
        loaded(shared / "golden/ckpt/a2_torch", ps, True), loaded(shared / "golden/ckpt/a2_torch_dist", ps, True)
    )
    return True


@pytest.mark.parametrize("sizes", [dict(tp=2, pp=2, etp=2), dict(tp=2, cp=2, ep=4), dict(pp=2, ep=2)])
def test_every_mapping_reads_the_golden_checkpoint(shared, sizes):
    assert run_ranks(_compare_with_torch_dist, 4, shared, sizes) == [True] * 4


def test_inspection_of_a_legacy_folder_before_loading(shared):
    folder = shared / "golden/ckpt/a2_torch"
    assert read_saved_args(folder)["num_experts"] == 8
    assert latest_iteration(folder) == 5 and saved_padded_vocab_size(folder) == 512
    assert latest_valid(folder) == 5 and check(folder / "iter_0000005", hashes=True) == []


# ---- writing


def make_record(ps, **more):
    """The flags of a FakeModel's run under a layout."""
    return (
        RECORD
        | {
            "tensor_model_parallel_size": ps.tp.size,
            "pipeline_model_parallel_size": ps.pp.size,
            "expert_model_parallel_size": ps.ep.size,
            "expert_tensor_parallel_size": ps.etp.size,
            "world_size": ps.world.size,
            "optimizer": "adam",
            "weight_decay": 0.1,
            "untie_embeddings_and_output_weights": True,
        }
        | more
    )


def saved(folder, ps=SINGLE, distributed=False, main_params=False, dtype=torch.float32, vpp=1, wide="", **flags):
    """Save a FakeModel of seed 0 in the legacy format."""
    chunks = fake_chunks(ps, vpp, dtype=dtype) if vpp > 1 else [FakeModel(ps=ps, dtype=dtype, wide=wide)]
    optimizer = FakeOptimizer(
        chunks, ps, distributed=distributed, main_params=main_params, sgd=flags.get("optimizer") == "sgd"
    )
    optimizer.step = 7
    record = make_record(ps, use_distributed_optimizer=distributed, **flags)
    save(folder, CheckpointState(5, record, 20), chunks, optimizer, ps, SaveOptions(ckpt_format="torch"))


def test_saved_legacy_file_has_the_structure_of_the_golden_one(shared, tmp_path):
    """Names, order, shapes, types, groups and numbers: Megatron-LM finds an optimizer state by its number alone."""
    saved(tmp_path, lr=1e-3, min_lr=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
    ours = open_file(tmp_path / "iter_0000005/mp_rank_00/model_optim_rng.pt")
    golden = open_file(shared / "golden/ckpt/a2_torch/iter_0000005/mp_rank_00/model_optim_rng.pt")
    assert golden.keys() <= ours.keys()

    def form(value):
        return None if value is None else (tuple(value.shape), value.dtype)

    assert [(name, form(value)) for name, value in ours["model"].items()] == [
        (name, form(value)) for name, value in golden["model"].items()
    ]
    for number, state in golden["optimizer"]["state"].items():
        assert {name: form(value) for name, value in ours["optimizer"]["state"][number].items()} == {
            name: form(value) for name, value in state.items()
        }
    assert len(ours["optimizer"]["state"]) == len(golden["optimizer"]["state"])
    for mine, theirs in zip(ours["optimizer"]["param_groups"], golden["optimizer"]["param_groups"], strict=True):
        assert {name: mine[name] for name in theirs if name != "lr"} == {
            name: value for name, value in theirs.items() if name != "lr"
        }
        assert mine["lr"] == 1e-3
    assert sorted(path.name for path in (tmp_path / "iter_0000005").iterdir()) == ["mp_rank_00"]


def _round_trip(rank, size, folder, sizes, how):
    ps = ParallelState.create(size, rank, **sizes)
    saved(folder, ps, **how)
    return True


LAYOUTS = {
    "one": (1, {}, {}),
    "tp2 pp2": (4, dict(tp=2, pp=2, etp=2), {}),
    "tp2, full experts": (4, dict(tp=2, ep=4), {}),
    "interleaved": (2, dict(pp=2), dict(vpp=2)),
    "ep2, distributed": (4, dict(ep=2), dict(distributed=True)),
    "tp2 dp2, distributed": (4, dict(tp=2, etp=2), dict(distributed=True)),
    "bf16": (2, dict(ep=2), dict(main_params=True, dtype=torch.bfloat16)),
    "bf16, distributed": (2, dict(pp=2), dict(main_params=True, dtype=torch.bfloat16, distributed=True)),
    "te": (2, dict(tp=2, etp=2), dict(transformer_impl="transformer_engine", moe_grouped_gemm=True)),
    "bf16, routers in fp32": (1, {}, dict(main_params=True, dtype=torch.bfloat16, wide="router")),
    "sgd": (1, {}, dict(optimizer="sgd")),
    "a separate rate for embeddings": (1, {}, dict(decoupled_lr=1e-4)),
    "te, distributed": (
        2,
        dict(ep=2),
        dict(transformer_impl="transformer_engine", moe_grouped_gemm=True, distributed=True),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_legacy_checkpoints_load_under_another_layout(tmp_path, layout):
    size, sizes, how = LAYOUTS[layout]
    if size == 1:
        saved(tmp_path, **how)
    else:
        run_ranks(_round_trip, size, tmp_path, sizes, how)
    dtype, mains = how.get("dtype", torch.float32), how.get("main_params", False)
    wide = how.get("wide", "")
    model, expected = FakeModel(seed=1, dtype=dtype, wide=wide), FakeModel(dtype=dtype, wide=wide)
    sgd = how.get("optimizer") == "sgd"
    optimizer, theirs = (
        FakeOptimizer(each, SINGLE, main_params=mains, seed=seed, sgd=sgd) for each, seed in ((model, 1), (expected, 0))
    )
    found = load(tmp_path, [model], optimizer, SINGLE, LoadOptions(RECORD))
    assert (
        found.iteration == 5
        and not found.from_megatron
        and optimizer.step == 7
        and found.state.consumed_train_samples == 20
    )
    assert_same((None, model, optimizer), (None, expected, theirs))


def test_decoupled_lr_groups_precede_groups_without_decay(tmp_path):
    """As Megatron-LM main sorts them; its loader takes the parameters of a group for those of its own group in the same place."""
    saved(tmp_path, lr=1e-3, min_lr=0.0, decoupled_lr=1e-4)
    groups = open_file(tmp_path / "iter_0000005/mp_rank_00/model_optim_rng.pt")["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["max_lr"], group["params"][0]) for group in groups] == [
        (1.0, 1e-3, 0),
        (1.0, 1e-4, 38),
        (0.0, 1e-3, 40),
    ]


def test_main_parameters_with_attributes_are_read(tmp_path):
    """Megatron-LM marks its main parameters (tensor_model_parallel, ...), which changes how they are pickled."""
    saved(tmp_path, main_params=True, dtype=torch.bfloat16)
    path = tmp_path / "iter_0000005/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    for main in (main for group in content["optimizer"]["fp32_from_fp16_params"] for main in group):
        main.tensor_model_parallel, main.partition_dim = True, 0
    torch.save(content, path)
    assert b"_rebuild_from_type_v2" in path.read_bytes()
    model, expected = FakeModel(seed=1, dtype=torch.bfloat16), FakeModel(dtype=torch.bfloat16)
    optimizer, theirs = (
        FakeOptimizer(model, SINGLE, main_params=True, seed=1),
        FakeOptimizer(expected, SINGLE, main_params=True),
    )
    assert load(tmp_path, [model], optimizer, SINGLE, LoadOptions(RECORD)).optim_loaded
    assert_same((None, model, optimizer), (None, expected, theirs))


@pytest.mark.parametrize("case", ["b_deepseek_mtp", "c_qwen3moe", "d_dense_gpt2"])
def test_parameter_order_and_groups_equal_megatron(shared, case):
    """Recorded: the order in which its modules register them, and the groups of its optimizer."""
    meta = json.loads((shared / "golden" / case / "meta.json").read_text())
    names = sorted(sorted(meta["params"]), key=lambda name: module_order_key(name, name))
    assert names == list(meta["params"])
    for group in meta["param_groups"]:
        assert [
            name for name in names if decays(name, len(meta["params"][name]["shape"]), {}) is (group["wd_mult"] == 1.0)
        ] == group["params"]


def _own_random_states(rank, size, folder):
    ps = ParallelState.create(size, rank, tp=2, pp=2, etp=2)
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    saved(folder, ps)
    torch.manual_seed(99)
    found, _, _ = loaded(folder, ps)
    return found.rng_loaded and torch.equal(torch.get_rng_state(), before)


def test_every_rank_restores_its_own_random_state(tmp_path):
    assert run_ranks(_own_random_states, 4, tmp_path) == [True] * 4


# ---- what cannot be compared with a recorded file: hand-made numbers


def test_transformer_engine_parameter_order():
    """Norms before the weight they are fused with; of grouped experts all first weights, by number; of single ones expert by expert."""
    engine = {
        "transformer_impl": "transformer_engine",
        "moe_grouped_gemm": True,
        "multi_latent_attention": False,
        "num_experts": 16,
    }
    attention = (
        "self_attention.linear_proj.weight",
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
    )
    dense = [
        f"decoder.layers.0.{name}"
        for name in (*attention, "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
    ]
    experts = [
        f"mlp.experts.local_experts.{expert}.linear_fc{number}.weight" for number in (1, 2) for expert in (2, 10)
    ]
    routed = [
        f"decoder.layers.1.{name}"
        for name in (
            *attention,
            "pre_mlp_layernorm.weight",
            "mlp.router.weight",
            *experts,
            "mlp.shared_experts.linear_fc1.weight",
            "mlp.shared_experts.linear_fc2.weight",
        )
    ]
    written = {name: to_spec_name(name, engine, fused_norms(engine, name in routed)) for name in dense + routed}
    assert sorted(sorted(written), key=lambda name: module_order_key(name, written[name])) == dense + routed
    latent = [
        "linear_proj.weight",
        "linear_q_down_proj.weight",
        "q_layernorm.weight",
        "linear_q_up_proj.weight",
        "linear_kv_down_proj.weight",
        "kv_layernorm.weight",
        "linear_kv_up_proj.weight",
    ]
    latent = [f"decoder.layers.0.self_attention.{name}" for name in latent]
    engine |= {"multi_latent_attention": True}
    written = {name: to_spec_name(name, engine, fused_norms(engine, True)) for name in latent}
    assert sorted(sorted(written), key=lambda name: module_order_key(name, written[name])) == latent
    single = [name for name in routed if ".local_experts." in name]
    assert sorted(single, key=lambda name: module_order_key(name, name)) == [single[0], single[2], single[1], single[3]]


def test_experts_are_sharded_like_other_layers_by_default():
    assert LayoutSizes.from_record({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": None}).etp == 4
    assert LayoutSizes.from_record({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1}).etp == 1


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("self_attention.linear_q_down_proj.weight", (16, 64), (None, 1)),
        ("self_attention.linear_q_down_proj.weight", (8, 64), (0, 1)),
        ("self_attention.linear_kv_down_proj.weight", (12, 64), (None, 1)),
        ("self_attention.linear_kv_down_proj.weight", (6, 64), (0, 1)),
        ("mlp.linear_fc1.weight", (8, 64), (0, 2)),
        ("mlp.linear_fc1.bias", (8,), (0, 2)),
        ("mlp.linear_fc2.weight", (64, 4), (1, 1)),
        ("mlp.linear_fc2.bias", (64,), (None, 1)),
    ],
)
def test_tensor_parallel_split_over_two_ranks(name, shape, expected):
    """Down-projections of latent attention by Megatron-LM's local modules only, as their shape shows."""
    record = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_pos_emb_head_dim": 4, "swiglu": True}
    assert tp_split(f"decoder.layers.0.{name}", shape, record, 2) == expected


def test_decoupled_lr_and_weight_decay_by_parameter_name():
    assert [
        name
        for name in (
            "embedding.word_embeddings.weight",
            "embedding.position_embeddings.weight",
            "output_layer.weight",
            "decoder.final_layernorm.weight",
        )
        if param_group_kind(name, 2, {"decoupled_lr": 1e-4}).decoupled
    ] == ["embedding.word_embeddings.weight", "output_layer.weight"]
    norm = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert not decays(norm, 1, {}) and decays(norm, 1, {"apply_wd_to_qk_layernorm": True})
    assert not decays("decoder.layers.0.input_layernorm.weight", 1, {"apply_wd_to_qk_layernorm": True})


LARGE = {
    "world_size": 768,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "overlap_grad_reduce": True,
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.parametrize(
    "flags, pp, chunk, expert, expected",
    [
        (
            {},
            0,
            0,
            False,
            (96_000_000, 192, set(), False),
        ),  # 192 ranks hold the same, of 96 batches: a million elements for each of these
        ({}, 0, 0, True, (96_000_000, 96, set(), False)),
        ({}, 1, 0, False, (None, 192, set(), False)),
        ({}, 0, 1, False, (None, 192, set(), False)),
        ({"overlap_grad_reduce": False}, 0, 0, False, (None, 192, set(), False)),
        ({"ddp_bucket_size": 7}, 0, 0, False, (7, 192, set(), False)),
        ({"world_size": 8}, 0, 0, False, (40_000_000, 2, set(), False)),
        (
            {"untie_embeddings_and_output_weights": False, "ddp_pad_buckets_for_high_nccl_busbw": True},
            1,
            0,
            False,
            (None, 192, {"embedding.word_embeddings.weight", "output_layer.weight"}, True),
        ),
        (
            {"untie_embeddings_and_output_weights": False, "pipeline_model_parallel_size": 1},
            0,
            0,
            False,
            (192_000_000, 384, set(), False),
        ),
    ],
)
def test_bucket_sizes_follow_the_flags(flags, pp, chunk, expert, expected):
    record = LARGE | flags
    assert bucketing(record, LayoutSizes.from_record(record), pp, chunk, expert) == expected


def test_offsets_in_the_distributed_optimizer_buffer():
    """The last parameter first; each begins at a multiple of 64; the ends of buckets, multiples of 128, are not saved."""
    params = [("a", 100), ("b", 10), ("c", 70)]
    assert list(buffer_offsets(params, None, 1, frozenset(), False)) == [("c", 0, 70), ("b", 128, 10), ("a", 192, 100)]
    # buckets of 70 elements or more: c alone (the buffer continues at 128), b and a
    assert list(buffer_offsets(params, 70, 2, frozenset(), False)) == [("c", 0, 70), ("b", 70, 10), ("a", 134, 100)]
    # b is tied to another stage and alone: [c] up to 128 with the gap before b, [b], [a]
    assert list(buffer_offsets(params, None, 1, frozenset("b"), False)) == [
        ("c", 0, 70),
        ("b", 128, 10),
        ("a", 138, 100),
    ]


def test_grouped_expert_and_fused_norm_names_are_translated():
    assert (
        global_name("decoder.layers.1.mlp.experts.linear_fc1.weight3", 4, 8)
        == "decoder.layers.5.mlp.experts.local_experts.11.linear_fc1.weight"
    )
    assert (
        global_name("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", 2, 0)
        == "decoder.layers.2.input_layernorm.weight"
    )
    for written in ("conv1d_weight", "conv1d.weight"):  # of newer and older versions
        assert global_name(f"decoder.layers.0.mixer.{written}", 2, 0) == "decoder.layers.2.mixer.conv1d.weight"
    assert (
        global_name("mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight", 2, 0)
        == "mtp.layers.0.mtp_model_layer.pre_mlp_layernorm.weight"
    )
    te = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True, "num_experts": 8}
    for name, routed, written in (
        ("decoder.layers.0.pre_mlp_layernorm.weight", True, "decoder.layers.0.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.pre_mlp_layernorm.weight", False, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"),
        (
            "decoder.layers.0.input_layernorm.weight",
            True,
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
            True,
            "decoder.layers.0.mlp.experts.linear_fc2.weight3",
        ),
    ):
        assert to_spec_name(name, te, fused_norms(te, routed)) == written and global_name(written, 0, 0) == name
        assert to_spec_name(name, te | {"transformer_impl": "local"}, fused_norms(te, routed)) == name


def test_optimizer_entries_needed_only_by_megatron_are_written(tmp_path, monkeypatch):
    """Main parameters of fp32 weights, in a flat buffer, and the state of the loss scale."""
    scalars = {"step": 7, "grad_scaler": {"scale": 1024.0}}
    monkeypatch.setattr(FakeOptimizer, "scalars", lambda self: scalars)
    saved(tmp_path, distributed=True)
    folder = tmp_path / "iter_0000005/mp_rank_00"
    weights, optimizer = (open_file(folder / "model_optim_rng.pt")[name] for name in ("model", "optimizer"))
    assert optimizer["grad_scaler"] == {"scale": 1024.0} and [
        group["step"] for group in optimizer["optimizer"]["param_groups"]
    ] == [7, 7]
    (buffer,) = open_file(folder / "distrib_optim.pt")[0].values()
    head = weights["output_layer.weight"]  # the last one
    assert (
        torch.equal(buffer["param"][: head.numel()], head.flatten())
        and buffer["numel_unpadded"] == buffer["param"].numel() == buffer["exp_avg"].numel()
    )


def test_param_groups_record_their_own_hyperparameters(tmp_path):
    saved(tmp_path / "adam", lr=1e-3, min_lr=1e-4, decoupled_lr=5e-4, decoupled_min_lr=5e-5)
    saved(tmp_path / "sgd", optimizer="sgd", sgd_momentum=0.7)
    adam, sgd = (
        open_file(tmp_path / name / "iter_0000005/mp_rank_00/model_optim_rng.pt")["optimizer"]["param_groups"]
        for name in ("adam", "sgd")
    )
    found = [
        tuple(group[name] for name in ("wd_mult", "default_config", "lr", "max_lr", "min_lr", "weight_decay"))
        for group in adam
    ]
    assert found == [
        (1.0, True, 1e-3, 1e-3, 1e-4, 0.1),
        (1.0, False, 5e-4, 5e-4, 5e-5, 0.1),
        (0.0, True, 1e-3, 1e-3, 1e-4, 0.0),
    ]
    assert not any(
        group["is_decoupled_lr"] for group in adam
    )  # part of the identity of a group, and always off since core_v0.16
    assert all(group["momentum"] == 0.7 and "betas" not in group for group in sgd)


def test_parameters_without_a_legacy_location_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="several types .*separate buffers"):
        saved(tmp_path, distributed=True, main_params=True, dtype=torch.bfloat16, wide="router")
    name = "decoder.layers.0.self_attention.in_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name}: how a legacy checkpoint cuts it"):
        tp_split(name, (8, 8), {}, 2)
    with pytest.raises(CheckpointError, match=f"{name}: its place"):
        module_order_key(name, name)


# ---- copies of the embeddings on later stages, states that a rank does not have


class ModelWithMTP(FakeModel):
    """With one prediction layer, whose stage has the word embeddings too, as Megatron-LM's has."""

    def __init__(self, ps=SINGLE, seed=0, tied=False, **more):
        super().__init__(ps=ps, seed=seed, tied=tied, **more)
        if ps.pp.rank == ps.pp.size - 1:
            for rest, shape in {
                "enorm.weight": [64],
                "hnorm.weight": [64],
                "eh_proj.weight": [64, 128],
                "final_layernorm.weight": [64],
            }.items():
                self._add(f"mtp.layers.0.{rest}", self._draw(shape))
            if ps.pp.size > 1 and not tied:
                word = torch.randn(512, 64, generator=torch.Generator().manual_seed(seed))  # the first that is drawn
                self._add("embedding.word_embeddings.weight", word, tied=True, is_replica=True)


def _save_with_mtp(rank, size, folder, sizes, distributed, tied):
    ps = ParallelState.create(size, rank, **sizes)
    model = ModelWithMTP(ps, tied=tied)
    optimizer = FakeOptimizer(model, ps, distributed=distributed)
    optimizer.step = 7
    record = make_record(
        ps, use_distributed_optimizer=distributed, mtp_num_layers=1, untie_embeddings_and_output_weights=not tied
    )
    save(folder, CheckpointState(5, record, 20), [model], optimizer, ps, SaveOptions(ckpt_format="torch"))
    again = ModelWithMTP(ps, seed=1, tied=tied)
    theirs = FakeOptimizer(again, ps, distributed=distributed, seed=1)
    assert load(folder, [again], theirs, ps, LoadOptions(record)).optim_loaded
    assert_same((None, again, theirs), (None, model, optimizer))
    return True


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_stage_with_mtp_layers_stores_the_embeddings(tmp_path, distributed, tied):
    """It is read by its own layout and by one process, and its files have what Megatron-LM has in them."""
    run_ranks(_save_with_mtp, 2, tmp_path, dict(pp=2), distributed, tied)
    record = make_record(SINGLE, mtp_num_layers=1, untie_embeddings_and_output_weights=not tied)
    model, expected = ModelWithMTP(seed=1, tied=tied), ModelWithMTP(tied=tied)
    optimizer, theirs = (FakeOptimizer(each, SINGLE, seed=seed) for each, seed in ((model, 1), (expected, 0)))
    load(tmp_path, [model], optimizer, SINGLE, LoadOptions(record))
    assert_same((None, model, optimizer), (None, expected, theirs))
    folder = tmp_path / "iter_0000005/mp_rank_00_001"
    content = open_file(folder / "model_optim_rng.pt")
    names = [name for name, value in content["model"].items() if isinstance(value, torch.Tensor)]
    assert names[0] == "embedding.word_embeddings.weight" and names[-1] == "output_layer.weight"
    assert torch.equal(
        content["model"]["embedding.word_embeddings.weight"], expected.table["embedding.word_embeddings.weight"]
    )
    if not distributed:
        assert (
            sum(len(group["params"]) for group in content["optimizer"]["param_groups"])
            == len(names)
            == len(content["optimizer"]["state"])
        )
        return
    (buffer,) = open_file(folder / "distrib_optim.pt")[0].values()
    assert torch.equal(buffer["param"][-512 * 64 :], expected.table["embedding.word_embeddings.weight"].flatten())


def test_embeddings_shared_by_stages_have_their_own_bucket():
    untied = {"untie_embeddings_and_output_weights": True}
    word, head = "embedding.word_embeddings.weight", "output_layer.weight"
    assert (
        shared_embedding_names({}, 2) == {word, head}
        and shared_embedding_names({}, 1) == shared_embedding_names(untied, 2) == frozenset()
    )
    assert (
        shared_embedding_names(untied | {"mtp_num_layers": 1}, 2)
        == shared_embedding_names({"mtp_num_layers": 1}, 2)
        == {word}
    )
    assert tied_copies([word, head, "x"], untied, 1) == {word} and tied_copies([word, head, "x"], {}, 1) == {word, head}
    assert tied_copies([word, head], {}, 0) == frozenset()


def test_a_distributed_optimizer_of_experts_alone_is_read(tmp_path):
    """Megatron-LM's second expert-parallel rank stores None instead of the optimizer of the dense parameters."""
    run_ranks(_round_trip, 4, tmp_path, dict(ep=2), dict(distributed=True))
    path = tmp_path / "iter_0000005/mp_rank_00_001/distrib_optim.pt"
    dense, experts = torch.load(path, weights_only=False)
    assert (
        dense is None
        and torch.load(path.parents[1] / "mp_rank_00_000/distrib_optim.pt", weights_only=False)[0] is not None
    )
    expected = FakeModel()
    found, model, optimizer = loaded(tmp_path)
    assert_same((found, model, optimizer), (None, expected, FakeOptimizer(expected, SINGLE)))
    torch.save([None, None], path)
    text = refusal_with_optimizer(tmp_path)
    assert "elements" in text and "are stored" in text
    torch.save(experts, path)
    assert "of 1 optimizers" in refusal_with_optimizer(tmp_path)


def refusal_with_optimizer(folder) -> str:
    model = FakeModel(seed=1)
    with pytest.raises(CheckpointError) as caught:
        load(folder, [model], FakeOptimizer(model, SINGLE, seed=1), SINGLE, LoadOptions(RECORD))
    return str(caught.value)


# ---- damage


def load_error(folder, **options):
    with pytest.raises(CheckpointError) as caught:
        loaded(folder, **options)
    return str(caught.value)


@pytest.fixture
def golden_copy(shared, tmp_path):
    shutil.copytree(shared / "golden/ckpt/a2_torch", tmp_path / "copy")
    return tmp_path / "copy"


FILE = "iter_0000005/mp_rank_00/model_optim_rng.pt"


def test_changed_byte_is_detected(golden_copy):
    content = bytearray((golden_copy / FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (golden_copy / FILE).write_bytes(content)
    assert "mp_rank_00/model_optim_rng.pt is damaged" in load_error(golden_copy)


def test_truncated_file_is_detected(golden_copy):
    content = (golden_copy / FILE).read_bytes()
    (golden_copy / FILE).write_bytes(content[: len(content) // 2])
    assert "mp_rank_00/model_optim_rng.pt is damaged" in load_error(golden_copy)
    assert check(golden_copy / "iter_0000005")


def test_missing_file_is_named(tmp_path):
    run_ranks(_round_trip, 4, tmp_path, dict(tp=2, pp=2, etp=2), {})
    shutil.rmtree(tmp_path / "iter_0000005/mp_rank_01_001")
    assert "mp_rank_01_001/model_optim_rng.pt is missing" in load_error(tmp_path)


def test_file_that_no_rank_reads_is_named(golden_copy):
    folder = golden_copy / "iter_0000005"
    shutil.copytree(folder / "mp_rank_00", folder / "mp_rank_01")
    assert "mp_rank_01/model_optim_rng.pt is of a rank that the flags recorded" in load_error(golden_copy)


def change(golden_copy, edit):
    """Rewrite the golden file with another content."""
    content = load_bytes((golden_copy / FILE).read_bytes())
    content["args"] = argparse.Namespace(**to_builtin(content["args"]))
    edit(content)
    torch.save(content, golden_copy / FILE)


def test_missing_expert_file_is_named(golden_copy):
    change(golden_copy, lambda content: setattr(content["args"], "expert_model_parallel_size", 2))
    (golden_copy / "iter_0000005/mp_rank_00").rename(golden_copy / "iter_0000005/mp_rank_00_000")
    assert "mp_rank_00_001/model_optim_rng.pt is missing" in load_error(golden_copy)


def test_missing_or_misshapen_tensor_is_named(golden_copy):
    change(golden_copy, lambda content: content["model"].pop("decoder.layers.1.mlp.router.weight"))
    assert "decoder.layers.mlp.router.weight: 512 of 1024 elements are stored" in load_error(
        golden_copy, load_optim=False
    )


def test_missing_expert_is_named(golden_copy):
    change(
        golden_copy,
        lambda content: content["model"].pop("decoder.layers.1.mlp.experts.local_experts.7.linear_fc2.weight"),
    )
    assert "decoder.layers.mlp.experts.experts.linear_fc2.weight: 30720 of 32768 elements" in load_error(
        golden_copy, load_optim=False
    )


def test_optimizer_state_of_other_parameters_is_rejected(golden_copy):
    change(golden_copy, lambda content: content["optimizer"]["param_groups"][1]["params"].pop())
    assert "has 4 parameters, and 5 of the model belong to it" in load_error(golden_copy)
    found, model, _ = loaded(golden_copy, load_optim=False)
    assert found.iteration == 5
    weights = open_file(golden_copy / FILE)["model"]
    assert torch.equal(
        model.tensors()["decoder.layers.1.mlp.router.weight"], weights["decoder.layers.1.mlp.router.weight"]
    )


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """A legacy checkpoint of a distributed optimizer; read-only."""
    folder = tmp_path_factory.mktemp("distributed")
    saved(folder, distributed=True)
    return folder


def _add_old_expert_weights(content):
    content["model"]["decoder.layers.0.mlp.experts.weight1"] = torch.zeros(2, 2)


def _transpose_moment(content):
    state = content["optimizer"]["state"]
    state[3]["exp_avg"] = state[3]["exp_avg"].t().contiguous()


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda content: content.pop("args"), "holds no args"),
        (lambda content: setattr(content["args"], "num_layers", 3), "2 decoder layers together, and its args say 3"),
        (
            _add_old_expert_weights,
            "decoder.layers.0.mlp.experts.weight1 is of the retired --moe-use-legacy-grouped-gemm",
        ),
        (_transpose_moment, "the exp_avg of number 3 has shape"),
        (lambda content: content.update(optimizer=[content["optimizer"]] * 3), "a chain of 3 optimizers"),
    ],
)
def test_inconsistent_file_content_is_rejected_by_name(golden_copy, edit, message):
    change(golden_copy, edit)
    assert message in load_error(golden_copy)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda buffers: buffers.pop("buckets_coalesced"), "its buckets are stored one by one"),
        (lambda buffers: buffers.update({1: buffers[0]}), "2 buffers for 1 model chunks"),
        (
            lambda buffers: [tensors.update(exp_avg=tensors["exp_avg"][:-1]) for tensors in buffers[0].values()],
            "exp_avg of buffer 0 has",
        ),
    ],
)
def test_inconsistent_optimizer_buffer_is_rejected_by_name(distributed, tmp_path, edit, message):
    shutil.copytree(distributed, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "iter_0000005/mp_rank_00/distrib_optim.pt"
    buffers = torch.load(path, weights_only=False)
    edit(buffers)
    torch.save(buffers, path)
    assert message in load_error(tmp_path)


def test_models_from_before_megatron_core_are_refused(golden_copy):
    change(golden_copy, lambda content: content.update(model={"language_model": {}}))
    assert "no model of Megatron-Core" in load_error(golden_copy)


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(legacy_writer, "flush_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        saved(tmp_path)
    assert list(tmp_path.iterdir()) == []

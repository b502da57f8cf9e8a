"""Keys, boxes and placements, against the recorded content of Megatron-LM's own checkpoints."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer, layer_shapes
from harness import run_ranks

from arguments import parse_args
from arguments.layer_flags import difference, layer_letters
from moe_trainer.checkpoint.flavors import to_flavor
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.inspect import differences
from moe_trainer.checkpoint.manager import CheckpointState, SaveOptions, save
from moe_trainer.checkpoint.sharding import KeyScheme, make_shards, split_flat_range
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState


def saved_structure(folder, model, record, optimizer=None):
    """Save; return {key: None or [shape, sorted chunks]}."""
    save(folder, CheckpointState(5, record), [model], optimizer, ParallelState.single(), SaveOptions())
    return stored_structure(folder / "iter_0000005")


def stored_structure(folder):
    """Return the same for an existing checkpoint."""
    return {
        key: [list(entry.size), sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks)]
        if hasattr(entry, "chunks")
        else None
        for key, entry in read_index(folder).state_dict_metadata.items()
    }


def recorded_structure(path):
    """Return the same for a checkpoint that Megatron-LM wrote, without its re-run state."""
    return {
        key: [entry["global_shape"], sorted(entry["chunks"])] if entry["kind"] == "tensor" else None
        for key, entry in json.loads(path.read_text()).items()
        if not key.startswith("rerun_state")
    }


def test_keys_shapes_and_chunks_equal_megatrons_mixtral(shared, tmp_path):
    model = FakeModel()
    found = saved_structure(tmp_path, model, RECORD, FakeOptimizer(model, ParallelState.single()))
    assert found == recorded_structure(shared / "golden/ckpt/a2_torch_dist.metadata.json")
    types = {
        key: str(entry.properties.dtype)
        for key, entry in read_index(tmp_path / "iter_0000005").state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    make_checkpoint_state = json.loads((shared / "golden/ckpt/a2_torch_dist.metadata.json").read_text())
    assert types == {key: entry["dtype"] for key, entry in make_checkpoint_state.items() if entry["kind"] == "tensor"}
    assert (tmp_path / "iter_0000005/metadata.json").read_bytes() == (
        shared / "golden/ckpt/a2_torch_dist/iter_0000005/metadata.json"
    ).read_bytes()


def test_keys_shapes_and_chunks_equal_megatrons_qwen3moe(shared, tmp_path):
    layers = [layer_shapes(ffn=16, qkv=256, qk_norm=32, experts=16) for _ in range(4)]
    found = saved_structure(tmp_path, FakeModel(layers), RECORD | {"num_layers": 4, "num_experts": 16})
    assert found == recorded_structure(shared / "golden/ckpt/c_qwen3moe.metadata.json")


@pytest.mark.parametrize("case", ["a2_mixtral", "c_qwen3moe"])
def test_keys_equal_the_recorded_list(case, tmp_path):
    """A short form of the two tests above for a checkout without the reference facts."""
    expected = json.loads((Path(__file__).parents[1] / "data/checkpoint_keys.json").read_text())[case]
    if case == "a2_mixtral":
        model = FakeModel()
        found = saved_structure(tmp_path, model, RECORD, FakeOptimizer(model, ParallelState.single()))
    else:
        layers = [layer_shapes(ffn=16, qkv=256, qk_norm=32, experts=16) for _ in range(4)]
        found = saved_structure(tmp_path, FakeModel(layers), RECORD | {"num_layers": 4, "num_experts": 16})
    assert sum(value is None for value in found.values()) == expected.pop("objects")
    assert {key: [value[0], len(value[1])] for key, value in found.items() if value is not None} == expected


def _save_tp2pp2(rank, size, folder, distributed):
    ps = ParallelState.create(size, rank, tp=2, pp=2, etp=2)
    model = FakeModel(ps=ps)
    save(folder, CheckpointState(5, RECORD), [model], FakeOptimizer(model, ps, distributed), ps, SaveOptions())


def test_keys_shapes_and_chunks_of_tp2_pp2_equal_megatrons(shared, tmp_path):
    """The reference wrote its checkpoint from the same layout: every tensor, chunk and object, optimizer included."""
    run_ranks(_save_tp2pp2, 4, tmp_path, False)
    assert stored_structure(tmp_path / "iter_0000005") == recorded_structure(
        shared / "golden/ckpt/a2_tp2pp2.metadata.json"
    )


def test_flat_optimizer_ranges_become_chunks_of_the_same_tensors(tmp_path):
    """Twice the ranks and the distributed optimizer: keys and shapes stay, chunks are finer, values are the same."""
    run_ranks(_save_tp2pp2, 4, tmp_path / "plain", False)
    run_ranks(_save_tp2pp2, 8, tmp_path / "flat", True)
    plain, flat = (stored_structure(tmp_path / name / "iter_0000005") for name in ("plain", "flat"))
    assert {key: value and value[0] for key, value in plain.items()} == {
        key: value and value[0] for key, value in flat.items()
    }
    key = "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert len(flat[key][1]) > len(plain[key][1])
    assert differences(tmp_path / "plain/iter_0000005", tmp_path / "flat/iter_0000005") == []


def test_heterogeneous_layers_keep_their_numbers():
    for freq in ([0, 1], 2):
        scheme = KeyScheme.from_record(RECORD | {"moe_layer_freq": freq})
        assert scheme.locate("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight") == (
            "decoder.layers.1.mlp.experts.experts.linear_fc2.weight",
            (3,),
            (8,),
        )
        assert scheme.locate("decoder.layers.0.pre_mlp_layernorm.weight") == (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            (),
            (),
        )
        info = ParamInfo(("decoder.layers.0.mlp.linear_fc1.weight",))
        assert scheme.extra_state_keys(info) == ["decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"]


def test_mtp_layer_numbers_and_mla_norm_names():
    scheme = KeyScheme.from_record(RECORD)
    name = "mtp.layers.0.mtp_model_layer.input_layernorm.weight"
    assert scheme.locate(name) == ("mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight", (), ())
    assert scheme.locate("mtp.layers.0.enorm.weight") == ("mtp.layers.0.enorm.weight", (), ())
    assert scheme.locate("mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.2.linear_fc1.weight")[1:] == (
        (2,),
        (8,),
    )
    mla = KeyScheme.from_record(RECORD | {"multi_latent_attention": True})
    assert mla.locate(name)[0] == "mtp.layers.0.transformer_layer.input_layernorm.weight"
    assert mla.locate("decoder.layers.1.pre_mlp_layernorm.weight") == (
        "decoder.layers.pre_mlp_layernorm.weight",
        (1,),
        (2,),
    )


def test_gated_delta_net_projections_are_stored_separately():
    """As Megatron-Core splits them: the parts of in_proj and conv1d under separate names, the norm before in_proj with it."""
    scheme = KeyScheme.from_record(RECORD | {"experimental_attention_variant": "gdn", "linear_attention_freq": 2})
    name = "decoder.layers.0.self_attention.in_proj.weight"
    info = ParamInfo(
        (name,),
        sharded_dim=0,
        shard_rank=1,
        shard_count=2,
        parts=3,
        part_sizes=(4, 4, 8),
        part_names=("query", "key", "z"),
    )
    assert [
        (run.key, run.global_shape, run.offsets, run.shape, run.start) for run in scheme.placements(info, (8, 5))
    ] == [
        (f"{name}.query", (4, 5), (2, 0), (2, 5), 0),
        (f"{name}.key", (4, 5), (2, 0), (2, 5), 10),
        (f"{name}.z", (8, 5), (4, 0), (4, 5), 20),
    ]
    assert (
        scheme.locate("decoder.layers.0.input_layernorm.weight")[0]
        == "decoder.layers.0.self_attention.in_proj.layer_norm_weight"
    )
    assert (
        scheme.locate("decoder.layers.1.input_layernorm.weight")[0]
        == "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    )
    assert scheme.locate("mtp.layers.0.mtp_model_layer.input_layernorm.weight")[0].endswith(
        "linear_qkv.layer_norm_weight"
    )
    assert scheme.extra_state_keys(info) == ["decoder.layers.0.self_attention.in_proj._extra_state/shard_0_1"]


def test_fused_row_parts_are_stored_separately():
    scheme = KeyScheme.from_record(RECORD)
    name = ("decoder.layers.0.mlp.shared_experts.linear_fc1.bias",)

    def runs(shape, **info):
        return [
            (run.offsets, run.shape, run.start, run.global_shape)
            for run in scheme.placements(ParamInfo(name, **info), shape)
        ]

    assert runs((10,), sharded_dim=0, parts=2) == [((0, 0), (1, 5), 0, (2, 10)), ((0, 5), (1, 5), 5, (2, 10))]
    assert runs((10,), sharded_dim=0, parts=2, shard_rank=1, shard_count=3) == [
        ((0, 5), (1, 5), 0, (2, 30)),
        ((0, 20), (1, 5), 5, (2, 30)),
    ]
    assert runs((10,), sharded_dim=0, shard_rank=1, shard_count=3) == [((0, 10), (1, 10), 0, (2, 30))]
    assert runs((10,)) == [((0, 0), (1, 10), 0, (2, 10))]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 4, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_split_flat_range_covers_it_exactly_in_order(shape):
    numel = math.prod(shape)
    positions = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            flat, count = [], 0
            for offsets, sizes in split_flat_range(shape, start, stop):
                assert len(offsets) == len(sizes) == len(shape)
                flat += positions[tuple(slice(a, a + b) for a, b in zip(offsets, sizes))].flatten().tolist()
                count += 1
            assert flat == list(range(start, stop))
            assert count <= max(1, 2 * len(shape) - 1)


def test_chunks_of_a_flat_range_are_views():
    scheme = KeyScheme.from_record(RECORD)
    info = ParamInfo(
        tuple(f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight" for e in range(8)),
        stacked=True,
        sharded_dim=0,
        parts=2,
    )
    full = torch.zeros(2, 8, 64, 64)
    local = torch.arange(100, 30000, dtype=torch.float32)
    for piece in make_shards(scheme.placements(info, (8, 64, 64)), local, 100, 30000, "optimizer.state.exp_avg."):
        assert piece.key == "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"
        assert piece.data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        full[tuple(slice(a, a + b) for a, b in zip(piece.offsets, piece.sizes))] = piece.data
    expected = torch.arange(8 * 64 * 64, dtype=torch.float32)
    expected[:100] = expected[30000:] = 0
    assert torch.equal(full[1].flatten(), expected) and not full[0].any()


# ---- the real model


def built(shared, case, *more):
    """(chunk, record of its flags) of a golden case."""
    argv = json.loads((shared / "golden" / case / "meta.json").read_text())["argv"]
    args = parse_args([*argv, *more], world_size=1)
    return build_chunks(args, ParallelState.single(), 512)[0], args.as_dict()


def test_keys_of_the_real_models_equal_megatrons(shared, tmp_path):
    model, record = built(shared, "a2_mixtral")
    weights = {
        key: value
        for key, value in recorded_structure(shared / "golden/ckpt/a2_torch_dist.metadata.json").items()
        if not key.startswith("optimizer.")
    }
    assert saved_structure(tmp_path / "a2", model, record) == weights
    model, record = built(shared, "c_qwen3moe")
    assert saved_structure(tmp_path / "c", model, record) == recorded_structure(
        shared / "golden/ckpt/c_qwen3moe.metadata.json"
    )


def test_keys_of_the_real_deepseek_model(shared, tmp_path):
    """No recorded checkpoint of it exists: layers that differ, MLA, shared experts, expert bias, MTP."""
    found = saved_structure(tmp_path, *built(shared, "b_deepseek_mtp"))
    tensors = {key: value[0] for key, value in found.items() if value is not None}
    assert all(re.match(r"(decoder|mtp)\.layers\.\d|embedding\.|output_layer\.|decoder\.final", key) for key in tensors)
    for layer in ("decoder.layers.1.", "mtp.layers.0.transformer_layer."):
        assert tensors[layer + "mlp.experts.experts.linear_fc1.weight"] == [8, 48, 64]
        assert tensors[layer + "mlp.router.expert_bias"] == [8]
        assert tensors[layer + "input_layernorm.weight"] == [64]
        assert found[layer + "mlp.experts.experts.linear_fc1._extra_state/shard_7_8"] is None
        assert len(found[layer + "mlp.shared_experts.linear_fc1.weight"][1]) == 2
    assert tensors["decoder.layers.0.mlp.linear_fc1.weight"] == [256, 64]
    assert tensors["mtp.layers.0.eh_proj.weight"] == [64, 128]
    named = sum(len(param.info.names) for param in built(shared, "b_deepseek_mtp")[0].parameters())
    experts = 8 * 2 * sum("experts.experts.linear_fc1.weight" in key for key in tensors)
    biases = sum(key.endswith("expert_bias") for key in tensors)
    assert len(tensors) == named - experts + experts // 8 + biases


def test_names_of_gpt_and_hybrid_models_translate_into_each_other():
    for gpt, hybrid in (
        ("decoder.layers.3.input_layernorm.weight", "decoder.layers.6.input_layernorm.weight"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "decoder.layers.6.self_attention.linear_qkv.weight"),
        ("decoder.layers.3.pre_mlp_layernorm.weight", "decoder.layers.7.pre_mlp_layernorm.weight"),
        ("decoder.layers.3.mlp.router.expert_bias", "decoder.layers.7.mlp.router.expert_bias"),
        ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
        ("mtp.layers.0.final_layernorm.weight", "mtp.layers.0.final_layernorm.weight"),
        ("mtp.layers.1.mtp_model_layer.self_attention.linear_proj.weight", "mtp.layers.1.mtp_model_layer.layers.0.self_attention.linear_proj.weight"),
        ("mtp.layers.1.mtp_model_layer.mlp.router.weight", "mtp.layers.1.mtp_model_layer.layers.1.mlp.router.weight"),
        ("fp8.mtp.layers.0.mtp_model_layer.mlp.linear_fc1.scaling", "fp8.mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc1.scaling"),
    ):  # fmt: skip
        assert (to_flavor(gpt, hybrid=True), to_flavor(hybrid, hybrid=False)) == (hybrid, gpt)


def test_keys_of_depths_of_a_hybrid_model():
    """They keep the list of layers; its norms are named as those of the decoder."""
    scheme = KeyScheme.from_record(
        {
            "num_layers": 2,
            "num_experts": 4,
            "moe_layer_freq": [0, 1],
            "hybrid_layer_pattern": "ME/*E-/*E-",
            "mtp_num_layers": 2,
        }
    )
    inside = "mtp.layers.1.mtp_model_layer.layers."
    for name, key in (
        ("0.input_layernorm.weight", "0.self_attention.linear_qkv.layer_norm_weight"), ("1.pre_mlp_layernorm.weight", "1.pre_mlp_layernorm.weight"),
        ("2.pre_mlp_layernorm.weight", "2.mlp.linear_fc1.layer_norm_weight"),
    ):  # fmt: skip
        assert scheme.locate(inside + name) == (inside + key, (), ())
    expert = scheme.locate(inside + "1.mlp.experts.local_experts.2.linear_fc1.weight")
    assert expert == (inside + "1.mlp.experts.experts.linear_fc1.weight", (2,), (4,))
    assert scheme.locate("mtp.layers.1.enorm.weight") == ("mtp.layers.1.enorm.weight", (), ())


def test_layers_of_a_gpt_model_as_letters():
    gpt = {"num_layers": 4, "num_experts": 2, "moe_layer_freq": 2}
    assert layer_letters(gpt) == "*E*-*E*-"
    assert layer_letters(gpt | {"num_experts": None, "multi_latent_attention": True}) == "+-+-+-+-"
    linear = {"experimental_attention_variant": "gdn", "linear_attention_freq": 2}
    assert layer_letters(gpt | linear) == "GE*-GE*-"
    assert difference(gpt, {"hybrid_layer_pattern": "*E*-|*E*-"}) is None
    assert "layer 7 (from 0) is - in the checkpoint and none here" in difference(
        gpt, {"hybrid_layer_pattern": "*E*-*E*"}
    )

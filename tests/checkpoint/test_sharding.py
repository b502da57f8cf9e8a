"""Keys, boxes and placements, against the recorded content of Megatron-LM's own checkpoints."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer, layer_shapes

from arguments import parse_args
from moe_trainer.checkpoint.checkpoint import CheckpointState, SaveOptions
from moe_trainer.checkpoint.planner import global_plan
from moe_trainer.checkpoint.saving import PieceSavePlanner, _objects, _pieces
from moe_trainer.checkpoint.sharding import KeyScheme, boxes, pieces
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState


def content(model, record, optimizer=None):
    """What a save would store: {key: None or [shape, sorted chunks]}."""
    ps = ParallelState.single()
    state = CheckpointState(5, record)
    planner = PieceSavePlanner(_pieces(state, [model], optimizer), _objects(state, [model], optimizer, ps, SaveOptions()))
    _, index = global_plan([planner.create_local_plan()], True)
    return {key: [list(entry.size), sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks)]
            if hasattr(entry, "chunks") else None for key, entry in index.state_dict_metadata.items()}


def recorded(path):
    """The same of a checkpoint that Megatron-LM wrote; its re-run state is not ours to write."""
    return {key: [entry["global_shape"], sorted(entry["chunks"])] if entry["kind"] == "tensor" else None
            for key, entry in json.loads(path.read_text()).items() if not key.startswith("rerun_state")}


def test_keys_shapes_and_chunks_equal_megatrons_mixtral(shared):
    model = FakeModel()
    found = content(model, RECORD, FakeOptimizer(model, ParallelState.single()))
    assert found == recorded(shared / "golden/ckpt/a2_torch_dist.metadata.json")


def test_keys_shapes_and_chunks_equal_megatrons_qwen3moe(shared):
    layers = [layer_shapes(ffn=16, qkv=256, qk_norm=32, experts=16) for _ in range(4)]
    found = content(FakeModel(layers), RECORD | {"num_layers": 4, "num_experts": 16})
    assert found == recorded(shared / "golden/ckpt/c_qwen3moe.metadata.json")


@pytest.mark.parametrize("case", ["a2_mixtral", "c_qwen3moe"])
def test_keys_equal_the_recorded_list(case):
    """The same as the two tests above, in short, for a checkout without the reference facts."""
    expected = json.loads((Path(__file__).parents[1] / "data/checkpoint_keys.json").read_text())[case]
    if case == "a2_mixtral":
        model = FakeModel()
        found = content(model, RECORD, FakeOptimizer(model, ParallelState.single()))
    else:
        layers = [layer_shapes(ffn=16, qkv=256, qk_norm=32, experts=16) for _ in range(4)]
        found = content(FakeModel(layers), RECORD | {"num_layers": 4, "num_experts": 16})
    assert sum(value is None for value in found.values()) == expected.pop("objects")
    assert {key: [value[0], len(value[1])] for key, value in found.items() if value is not None} == expected


def test_tensor_parallel_chunks_equal_megatrons(shared):
    """The chunks of TP 2, PP 2 need nothing but other ParamInfo."""
    golden = recorded(shared / "golden/ckpt/a2_tp2pp2.metadata.json")
    scheme = KeyScheme.from_record(RECORD)
    for names, shape, dim, key in (
            (("decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc1.weight",), (32, 64), 0,
             "decoder.layers.mlp.experts.experts.linear_fc1.weight"),
            (("decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc2.weight",), (64, 16), 1,
             "decoder.layers.mlp.experts.experts.linear_fc2.weight"),
            (("decoder.layers.{l}.self_attention.linear_qkv.weight",), (64, 64), 0, "decoder.layers.self_attention.linear_qkv.weight"),
            (("embedding.word_embeddings.weight",), (256, 64), 0, "embedding.word_embeddings.weight")):
        found = set()
        for layer in range(2):
            for rank in range(2):
                experts = 8 if "{e}" in names[0] else 1
                info = ParamInfo(tuple(names[0].format(l=layer, e=e) for e in range(experts)), stacked=experts > 1,
                                 sharded_dim=dim, shard_rank=rank, shard_count=2)
                local = ((experts, *shape) if experts > 1 else shape)
                for run in scheme.placements(info, local):
                    assert run.key == key and list(run.global_shape) == golden[key][0]
                    found.add((run.offsets, run.shape))
        assert sorted([list(a), list(b)] for a, b in found) == golden[key][1]


def test_layers_that_differ_keep_their_numbers():
    for freq in ([0, 1], 2):
        scheme = KeyScheme.from_record(RECORD | {"moe_layer_freq": freq})
        assert scheme.locate("decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight") == (
            "decoder.layers.1.mlp.experts.experts.linear_fc2.weight", (3,), (8,))
        assert scheme.locate("decoder.layers.0.pre_mlp_layernorm.weight") == (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", (), ())
        info = ParamInfo(("decoder.layers.0.mlp.linear_fc1.weight",))
        assert scheme.extra_state_keys(info) == ["decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"]


def test_mtp_layers_keep_their_numbers_and_mla_its_norms():
    scheme = KeyScheme.from_record(RECORD)
    name = "mtp.layers.0.mtp_model_layer.input_layernorm.weight"
    assert scheme.locate(name) == ("mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.layer_norm_weight", (), ())
    assert scheme.locate("mtp.layers.0.enorm.weight") == ("mtp.layers.0.enorm.weight", (), ())
    assert scheme.locate("mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.2.linear_fc1.weight")[1:] == ((2,), (8,))
    mla = KeyScheme.from_record(RECORD | {"multi_latent_attention": True})
    assert mla.locate(name)[0] == name
    assert mla.locate("decoder.layers.1.pre_mlp_layernorm.weight") == ("decoder.layers.pre_mlp_layernorm.weight", (1,), (2,))


def test_biases_of_a_gated_layer_are_cut_like_its_rows():
    scheme = KeyScheme.from_record(RECORD)
    info = ParamInfo(("decoder.layers.0.mlp.shared_experts.linear_fc1.bias",))
    assert [(run.offsets, run.shape, run.start) for run in scheme.placements(info, (10,))] == [((0, 0), (1, 5), 0), ((0, 5), (1, 5), 5)]
    plain = KeyScheme.from_record(RECORD | {"swiglu": False})
    assert [run.shape for run in plain.placements(info, (10,))] == [(1, 10)]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 4, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_cover_every_range_exactly_and_in_order(shape):
    numel = math.prod(shape)
    positions = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            flat, count = [], 0
            for offsets, sizes in boxes(shape, start, stop):
                assert len(offsets) == len(sizes) == len(shape)
                flat += positions[tuple(slice(a, a + b) for a, b in zip(offsets, sizes))].flatten().tolist()
                count += 1
            assert flat == list(range(start, stop))
            assert count <= max(1, 2 * len(shape) - 1)


def test_pieces_of_a_flat_range_are_live_views():
    scheme = KeyScheme.from_record(RECORD)
    info = ParamInfo(tuple(f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight" for e in range(8)), stacked=True)
    whole = torch.zeros(2, 8, 64, 64)
    local = torch.arange(100, 30000, dtype=torch.float32)
    for piece in pieces(scheme.placements(info, (8, 64, 64)), local, 100, 30000, "optimizer.state.exp_avg."):
        assert piece.key == "optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.linear_fc1.weight"
        assert piece.data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        whole[tuple(slice(a, a + b) for a, b in zip(piece.offsets, piece.sizes))] = piece.data
    expected = torch.arange(8 * 64 * 64, dtype=torch.float32)
    expected[:100] = expected[30000:] = 0
    assert torch.equal(whole[1].flatten(), expected) and not whole[0].any()


# ---- the real model

def built(shared, case, *more):
    """(chunk on the meta device, record of its flags) of a golden case."""
    argv = json.loads((shared / "golden" / case / "meta.json").read_text())["argv"]
    args = parse_args([*argv, *more], world_size=1)
    return build_chunks(args, ParallelState.single(), 512, device="meta")[0], args.as_dict()


def test_keys_of_the_real_models_equal_megatrons(shared):
    model, record = built(shared, "a2_mixtral")
    weights = {key: value for key, value in recorded(shared / "golden/ckpt/a2_torch_dist.metadata.json").items()
               if not key.startswith("optimizer.")}
    assert content(model, record) == weights
    model, record = built(shared, "c_qwen3moe")
    assert content(model, record) == recorded(shared / "golden/ckpt/c_qwen3moe.metadata.json")


def test_keys_of_the_real_deepseek_model(shared):
    """No recorded checkpoint of it exists: layers that differ, MLA, shared experts, expert bias, MTP."""
    found = content(*built(shared, "b_deepseek_mtp"))
    tensors = {key: value[0] for key, value in found.items() if value is not None}
    assert all(re.match(r"(decoder|mtp)\.layers\.\d|embedding\.|output_layer\.|decoder\.final", key) for key in tensors)
    for layer in ("decoder.layers.1.", "mtp.layers.0.mtp_model_layer."):
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

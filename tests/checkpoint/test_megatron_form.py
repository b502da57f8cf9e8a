"""Keys, types and the optimizer's entry of a checkpoint are those that Megatron-LM's loaders expect.

megatron_checkpoints.json describes checkpoints that Megatron-LM d98e8a64 wrote (torch's AdamW, CPU): of the optimizer all but the current rate.
"""

import json
from pathlib import Path

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer
from harness import run_ranks

from arguments import parse_args
from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.archive import load_bytes
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.manager import CheckpointState, LoadOptions, SaveOptions, load, save
from moe_trainer.checkpoint.reading import read_object
from moe_trainer.checkpoint.sharding import KeyScheme
from moe_trainer.model.build import build_chunks
from moe_trainer.optim.loss_scale import DynamicLossScale
from moe_trainer.parallel.state import ParallelState

CASES = json.loads((Path(__file__).parents[1] / "data/megatron_checkpoints.json").read_text())
SINGLE = ParallelState.single()


def normalize(value):
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {str(key): normalize(item) for key, item in value.items() if key != "lr"}
    return [normalize(item) for item in value] if isinstance(value, (list, tuple)) else value


def without(entry, *keys):
    """The entry of the optimizer without the keys that only this program has."""
    if isinstance(entry, dict):
        return {key: without(item, *keys) for key, item in entry.items() if key not in keys}
    return [without(item, *keys) for item in entry] if isinstance(entry, list) else entry


@pytest.mark.parametrize("case", CASES)
def test_keys_types_and_objects_equal_megatron(case, tmp_path, monkeypatch):
    expected = CASES[case]
    args = parse_args(expected["argv"].split(), world_size=1)
    record = args.as_dict()
    apart = "0" in expected["optimizer"]
    model = build_chunks(args, SINGLE, 512)[0]
    optimizer = FakeOptimizer(model, SINGLE, main_params=bool(record["bf16"]))
    kinds = [(1.0, False), (0.0, False), *([(1.0, True)] if apart else [])]
    monkeypatch.setattr(
        optimizer,
        "scalars",
        lambda: {
            "step": 5,
            "param_groups": [
                {"wd_mult": wd, "is_decoupled_lr": False, "is_expert_parallel": expert} for wd, expert in kinds
            ],
        },
        raising=False,
    )
    save(
        tmp_path,
        CheckpointState(5, record, scheduler=dict.fromkeys(expected["opt_param_scheduler"], 1)),
        [model],
        optimizer,
        SINGLE,
        SaveOptions(),
    )
    folder = tmp_path / "iter_0000005"
    index = read_index(folder)
    found = {
        key: [list(entry.size), str(entry.properties.dtype).removeprefix("torch.")]
        if hasattr(entry, "chunks")
        else None
        for key, entry in index.state_dict_metadata.items()
    }
    assert found == expected["keys"]
    common = common_state.read(folder, index)
    assert without(normalize(common["optimizer"]), "bias_correction") == expected["optimizer"]
    assert common["content_metadata"] == expected["content_metadata"]
    assert sorted(common["opt_param_scheduler"]) == expected["opt_param_scheduler"]
    (state,) = read_object(folder, index, "rng_state/shard_0.0_1.1")
    kinds = {key: sorted(value) if isinstance(value, dict) else type(value).__name__ for key, value in state.items()}
    assert {key: kinds[key] for key in expected["rng_state"]} == expected["rng_state"]
    # releases up to core_v0.18 read the same from a file
    file = load_bytes((folder / "common.pt").read_bytes())
    assert (
        file.keys() == common.keys()
        and normalize(file["optimizer"]) == normalize(common["optimizer"])
        and file["args"] == common["args"]
    )


def test_common_state_loads_with_weights_only(tmp_path):
    """It reads with weights_only and argparse.Namespace among the safe classes."""
    model = FakeModel()
    save(tmp_path, CheckpointState(5, RECORD), [model], FakeOptimizer(model, SINGLE), SINGLE, SaveOptions())
    with torch.serialization.safe_globals([__import__("argparse").Namespace]):
        found = torch.load(tmp_path / "iter_0000005/common.pt", weights_only=True)
    assert found["optimizer"].keys() == {"state", "param_groups"} and vars(found["args"])["num_layers"] == 2


def read_optimizer_entry(folder, ckpt_format):
    """The entry of a checkpoint's optimizer, from where Megatron-LM reads it."""
    if ckpt_format == "torch":
        return load_bytes((folder / "mp_rank_00/model_optim_rng.pt").read_bytes())["optimizer"]
    return common_state.read(folder, read_index(folder))["optimizer"]


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_loss_scale_is_stored_as_a_tensor(tmp_path, monkeypatch, ckpt_format, distributed):
    """Megatron-LM's scaler moves it to its device; the counters stay numbers."""
    model = FakeModel(dtype=torch.float16)
    optimizer = FakeOptimizer(model, SINGLE, distributed=distributed, main_params=True)
    scalars = optimizer.scalars() | {"grad_scaler": {"scale": 4096.0, "growth_tracker": 3, "hysteresis_tracker": 1}}
    monkeypatch.setattr(optimizer, "scalars", lambda: scalars)
    record = RECORD | {"fp16": True, "use_distributed_optimizer": distributed}
    save(tmp_path, CheckpointState(5, record), [model], optimizer, SINGLE, SaveOptions(ckpt_format=ckpt_format))
    entry = read_optimizer_entry(tmp_path / "iter_0000005", ckpt_format)
    assert normalize(entry["grad_scaler"]) == {
        "scale": {"tensor": [4096.0], "dtype": "torch.float32"},
        "growth_tracker": 3,
        "hysteresis_tracker": 1,
    }
    _, found, _ = common_state.parse({"args": common_state.argparse.Namespace(), "optimizer": entry})
    scale = DynamicLossScale(1.0)
    scale.load_state_dict(found["grad_scaler"])
    assert scale.state_dict() == scalars["grad_scaler"]


@pytest.mark.parametrize(
    "flags, dtypes",
    [
        ("--bf16", (torch.bfloat16, torch.float32)),
        ("--bf16 --grad-reduce-in-bf16", (torch.bfloat16,) * 2),
        ("--fp16", (torch.float16,) * 2),
        ("", (torch.float32,) * 2),
    ],
)
def test_optimizer_buffers_are_keyed_by_param_and_grad_dtype(tmp_path, flags, dtypes):
    """The gradient dtype is the parameter dtype if Megatron-LM does not reduce in fp32."""
    args = parse_args(
        [*CASES[next(iter(CASES))]["argv"].split(), *flags.split(), "--use-distributed-optimizer"], world_size=1
    ).as_dict()
    names = ("bf16", "fp16", "accumulate_allreduce_grads_in_fp32", "use_distributed_optimizer")
    model = FakeModel(dtype=dtypes[0])
    save(
        tmp_path,
        CheckpointState(5, RECORD | {name: args[name] for name in names}),
        [model],
        FakeOptimizer(model, SINGLE, distributed=True, main_params=bool(flags)),
        SINGLE,
        SaveOptions(ckpt_format="torch"),
    )
    (buffer,) = [
        value
        for key, value in load_bytes((tmp_path / "iter_0000005/mp_rank_00/distrib_optim.pt").read_bytes()).items()
        if key == 0
    ]
    assert list(buffer) == [dtypes]


def _save_mapped(rank, size, folder, sizes):
    ps = ParallelState.create(size, rank, **sizes)
    model = FakeModel(ps=ps, dtype=torch.bfloat16)
    record = RECORD | {"use_distributed_optimizer": True, "bf16": True}
    save(
        folder,
        CheckpointState(5, record),
        [model],
        FakeOptimizer(model, ps, distributed=True, main_params=True),
        ps,
        SaveOptions(),
    )


@pytest.mark.parametrize("sizes", [dict(tp=2, pp=2, etp=2), dict(pp=2, ep=2), {}])
def test_every_mapping_writes_the_same_keys_and_random_states(tmp_path, sizes):
    run_ranks(_save_mapped, 4, tmp_path, sizes)
    index = read_index(tmp_path / "iter_0000005")
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    objects = [key for key in index.state_dict_metadata if key.startswith("rng_state")]
    assert sorted(objects) == sorted(f"rng_state/shard_{p}.{t}_{pp}.{tp}" for p in range(pp) for t in range(tp))
    states = [read_object(tmp_path / "iter_0000005", index, key) for key in objects]
    assert all(
        len(place) == 4 // (tp * pp) and all(len(state["rng_tracker_states"]) == 3 for state in place)
        for place in states
    )
    if tp > 1:
        first, second = (
            states[objects.index(f"rng_state/shard_0.{t}_{pp}.2")][0]["rng_tracker_states"]["model-parallel-rng"]
            for t in (0, 1)
        )
        assert not torch.equal(first, second)
    stored = {key.split(".")[2] for key in index.state_dict_metadata if key.startswith("optimizer.")}
    assert stored == {"exp_avg", "exp_avg_sq", "param"}


@pytest.mark.parametrize("main_params", [False, True])
def test_main_parameters_are_read_under_both_names(tmp_path, main_params):
    """`param` as Megatron-LM calls them, fp32 weights included, and `fp32_param` as older checkpoints of ours do."""
    dtype, flags = (torch.bfloat16, {"bf16": True}) if main_params else (torch.float32, {})
    model = FakeModel(dtype=dtype)
    optimizer = FakeOptimizer(model, SINGLE, distributed=True, main_params=main_params)
    for name, record in (("new", RECORD | flags | {"use_distributed_optimizer": True}), ("old", RECORD | flags)):
        save(tmp_path / name, CheckpointState(5, record), [model], optimizer, SINGLE, SaveOptions())
        other = FakeModel(seed=1, dtype=dtype)
        fresh = FakeOptimizer(other, SINGLE, distributed=True, main_params=main_params, seed=1)
        assert load(tmp_path / name, [other], fresh, SINGLE, LoadOptions(record)).optim_loaded
        assert all(torch.equal(a, b) for a, b in zip(fresh.values(), optimizer.values(), strict=True))
        stored = {
            key.split(".")[2]
            for key in read_index(tmp_path / name / "iter_0000005").state_dict_metadata
            if key.startswith("optimizer.")
        }
        assert stored == {"exp_avg", "exp_avg_sq"} | (
            {"param"} if name == "new" else {"fp32_param"} if main_params else set()
        )


def test_mtp_layers_of_older_checkpoints_are_found():
    name = "mtp.layers.0.mtp_model_layer.mlp.router.weight"
    found = [scheme.locate(name)[0] for scheme in KeyScheme.from_record(RECORD).alternatives()]
    assert found[0] == "mtp.layers.0.transformer_layer.mlp.router.weight" and name in found


def test_optimizer_step_is_read_from_its_state_first():
    """A group may still hold the step of the program that wrote an earlier checkpoint."""
    inner = {"param_groups": [{"step": 3}], "state": {"common_step": torch.tensor(8.0)}}
    args = common_state.argparse.Namespace()
    for entry, step in (
        (inner, 8),
        ({"optimizer": inner}, 8),
        ({0: inner, 1: inner}, 8),
        ({"optimizer": {"param_groups": [{"step": 3.0}]}}, 3),
    ):
        assert common_state.parse({"args": args, "optimizer": entry})[1] == {"step": step}


def test_step_of_sgd_and_lion_defaults_to_the_iteration():
    """Megatron-LM's SGD and Lion do not save a step."""
    sgd = {"state": {}, "param_groups": [{"momentum": 0.9, "weight_decay": 0.1}]}
    args = common_state.argparse.Namespace(optimizer="sgd")
    assert common_state.parse({"args": args, "iteration": 7, "optimizer": sgd})[1] == {"step": 7}

"""The command that inspects checkpoints: ls, verify, diff, and the exit codes."""

import pickle
import re
import runpy
import shutil
import sys
from dataclasses import astuple

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer, layer_shapes
from commands import call_main
from harness import run_ranks
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from moe_trainer.checkpoint import verify
from moe_trainer.checkpoint.directory import TRACKER
from moe_trainer.checkpoint.folder_format import detect_format
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.inspect import main
from moe_trainer.checkpoint.manager import CheckpointState, SaveOptions, save
from moe_trainer.checkpoint.native_index import truncated_files
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()
ARGS = RECORD | {"untie_embeddings_and_output_weights": True}


def write(folder, iteration=3, seed=1, model=None, args=ARGS, **options):
    model = model or FakeModel(seed=seed, expert_bias=True)
    save(
        folder,
        CheckpointState(iteration, args),
        [model],
        FakeOptimizer(model, SINGLE, seed=seed),
        SINGLE,
        SaveOptions(**options),
    )
    return folder / f"iter_{iteration:07d}"


@pytest.fixture
def call(capsys):
    """Run the command; returns (exit code, standard output, standard error)."""
    return lambda *argv: astuple(call_main(main, argv, capsys))


def edit_index(folder, change):
    index = read_index(folder)
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


# ---- ls


def test_ls_lists_stored_tensors_and_logical_ones(tmp_path, call):
    write(tmp_path)
    code, out, _ = call("ls", tmp_path)
    assert code == 0 and "iteration 3" in out and "written by moe-trainer" in out
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in out and "[2, 8, 64, 64]" in out
    code, out, _ = call(
        "ls", tmp_path / "iter_0000003", "--expand", "--match", r"^decoder.*experts\.5\.linear_fc2|layers.1.input_lay"
    )
    names = [line.split()[0] for line in out.splitlines()[2:]]
    assert names == [
        "decoder.layers.0.mlp.experts.local_experts.5.linear_fc2.weight",
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.mlp.experts.local_experts.5.linear_fc2.weight",
        "optimizer.state.exp_avg.decoder.layers.1.input_layernorm.weight",
        "optimizer.state.exp_avg_sq.decoder.layers.1.input_layernorm.weight",
    ]


def _save_cut(rank, size, folder):
    ps = ParallelState.create(size, rank, tp=2, pp=2, etp=2)
    model = FakeModel(ps=ps, seed=1, expert_bias=True)
    save(folder, CheckpointState(3, ARGS), [model], FakeOptimizer(model, ps, True, seed=1), ps, SaveOptions())


def test_checksums_are_independent_of_the_layout(tmp_path, call):
    write(tmp_path / "one")
    run_ranks(_save_cut, 4, tmp_path / "four")
    one, four = (
        sorted(call("ls", tmp_path / name, "--checksums", *more)[1].splitlines()[2:])
        for name, more in (("one", ()), ("four", ()))
    )
    assert one == four and len(one) > 20
    write(tmp_path / "other", seed=2)
    other = sorted(call("ls", tmp_path / "other", "--checksums")[1].splitlines()[2:])
    assert not set(one) & set(other)
    code, out, _ = call("diff", tmp_path / "one", tmp_path / "four")
    assert code == 0 and re.fullmatch(r"all tensors are equal \([1-9]\d*\)\n", out), out


# ---- verify


def problems(call, folder):
    code, out, err = call("verify", folder)
    assert code == 1 and err == "", (code, err)
    lines = [line for line in out.splitlines() if not line.startswith("note:")]
    assert f"{len(lines) - 1} problem" in lines[-1]
    return out


def test_a_valid_checkpoint_is_reported_as_valid(tmp_path, call, shared):
    write(tmp_path, verify_integrity=True)
    assert "is whole" in call("verify", tmp_path)[1]
    code, out, _ = call("verify", shared / "golden/ckpt/a2_torch_dist")
    assert code == 0 and "is whole" in out and "note" not in out


def test_a_missing_expert_of_one_layer_is_named(tmp_path, call):
    folder = write(tmp_path)
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"

    def lose(index):
        entry = index.state_dict_metadata[key]
        entry.chunks[:] = [chunk for chunk in entry.chunks if tuple(chunk.offsets[:2]) != (1, 5)]

    edit_index(folder, lose)
    out = problems(call, folder)
    assert (
        "decoder.layers.1.mlp.experts.local_experts.5.linear_fc1.weight is missing" in out
        and len(out.splitlines()) == 2
    )


def test_missing_or_duplicate_tensor_chunks_are_reported(tmp_path, call):
    folder = write(tmp_path)
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"

    def lose_gate(index):
        entry = index.state_dict_metadata[key]
        entry.chunks[:] = [chunk for chunk in entry.chunks if tuple(chunk.offsets) != (0, 2, 0, 0)]

    edit_index(folder, lose_gate)
    assert (
        "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight: 2048 of 4096 elements are stored"
        in problems(call, folder)
    )

    def twice(index):
        chunks = index.state_dict_metadata[key].chunks
        chunks.append(next(chunk for chunk in chunks if tuple(chunk.offsets) == (0, 2, 32, 0)))

    edit_index(folder, twice)
    assert "local_experts.2.linear_fc1.weight: some of its elements are stored twice" in problems(call, folder)


def test_missing_and_unexpected_entries_are_reported(tmp_path, call, monkeypatch):
    listed = ARGS | {"moe_layer_freq": [1, 1]}
    folder = write(tmp_path, args=listed)

    def lose(index):
        for key in (
            "decoder.layers.1.self_attention.linear_proj.weight",
            "output_layer.weight",
            "optimizer.state.exp_avg_sq.decoder.layers.0.mlp.router.weight",
        ):
            del index.state_dict_metadata[key]

    edit_index(folder, lose)
    out = problems(call, folder)
    for line in (
        "decoder.layers.1.self_attention.linear_proj.weight is missing",
        "output_layer.weight is missing",
        "optimizer.state.exp_avg_sq.decoder.layers.0.mlp.router.weight is missing",
        "optimizer.state.exp_avg.output_layer.weight is foreign: there is no such weight",
    ):
        assert line in out.splitlines(), line
    parse = verify.common_state.parse

    def smaller(common):
        state, *rest = parse(common)
        return (CheckpointState(3, {**state.args, "num_experts": 6, "num_layers": 1, "moe_layer_freq": 1}), *rest)

    monkeypatch.setattr(verify.common_state, "parse", smaller)
    out = problems(call, write(tmp_path / "whole", args=listed))
    assert "decoder.layers.1.* is foreign: the model has 1 such layers" in out
    assert "decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.weight is foreign: the model has 6 experts" in out


def test_unexpected_tensor_and_file_are_reported(tmp_path, call):
    model = FakeModel(seed=1)
    model.adapter = torch.nn.Parameter(torch.ones(3))
    model.adapter.info = ParamInfo(("adapter.weight",))
    with torch.no_grad():
        model.table["decoder.final_layernorm.weight"][3] = float("nan")
    folder = write(tmp_path, model=model)
    (folder / "__9_0.distcp").write_bytes(b"x")
    out = problems(call, folder)
    assert "adapter.weight is foreign" in out and "__9_0.distcp belongs to no entry" in out
    assert "decoder.final_layernorm.weight at (0,) holds NaN" in out


@pytest.mark.parametrize("file", ["metadata.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_damaged_files_are_named(tmp_path, call, file, damage):
    folder = write(tmp_path)
    path = folder / file
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        middle = len(content) // 2
        content[middle:] = b"" if damage == "cut" else bytes(byte ^ 0xFF for byte in content[middle:])
        path.write_bytes(content)
    code, out, err = call("verify", folder)
    if file == ".metadata" and damage == "missing" and code == 2:
        raise AssertionError(err)
    assert code == 1 and file in out, (code, out, err)


def test_verify_detects_one_changed_byte_in_any_tensor(tmp_path, call):
    """One changed byte in the middle of any entry of the file is found, and its tensor is named."""
    folder = write(tmp_path)
    index = read_index(folder)
    path = folder / "__0_0.distcp"
    full = path.read_bytes()
    places = [place for place in index.storage_data if place.offset is not None]
    for place in places[::40]:
        info = index.storage_data[place]
        content = bytearray(full)
        content[info.offset + info.length // 2] ^= 1
        path.write_bytes(content)
        assert f"{place.fqn} cannot be read" in problems(call, folder)
    path.write_bytes(full)
    index.storage_data.pop(MetadataIndex("decoder.final_layernorm.weight", torch.Size([0])))
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert "no sound index" in problems(call, folder)


# ---- diff


def test_diff_names_the_expert_that_differs(tmp_path, call):
    write(tmp_path / "a")
    model = FakeModel(seed=1, expert_bias=True)
    with torch.no_grad():
        model.table["decoder.layers.1.mlp.experts.linear_fc2.weight"][6, 0, 0] += 0.5
    write(tmp_path / "b", iteration=7, model=model)
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and "(flag) iteration: 3 and 7" in out
    assert (
        "decoder.layers.1.mlp.experts.local_experts.6.linear_fc2.weight: differs by up to 5.000e-01 in 1 of 2048 elements"
        in out
    )
    last = out.splitlines()[-1]
    assert re.fullmatch(r"1 logical tensors differ: [1-9]\d+ equal, 1 not", last), last
    assert call("diff", tmp_path / "a", tmp_path / "b", "--atol", "1")[0] == 0


def test_diff_treats_stacked_and_listed_layers_as_equal(tmp_path, call):
    write(tmp_path / "stacked")
    write(tmp_path / "listed", args=ARGS | {"moe_layer_freq": [1, 1]})
    code, out, _ = call("diff", tmp_path / "stacked", tmp_path / "listed")
    assert code == 0 and "(flag) moe_layer_freq: 1 and [1, 1]" in out and "all tensors are equal" in out


def test_diff_reports_differences_in_structure(tmp_path, call):
    write(tmp_path / "a")
    model = FakeModel(seed=1, dtype=torch.bfloat16)
    save(tmp_path / "b", CheckpointState(3, ARGS), [model], None, SINGLE, SaveOptions())
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert f"decoder.layers.0.mlp.router.expert_bias: only in {tmp_path}/a/iter_0000003" in out
    assert "output_layer.weight: (512, 64) float32 and (512, 64) bfloat16" in out
    assert f"optimizer.state.exp_avg.* (45 tensors): only in {tmp_path}/a/iter_0000003" in out
    differ, equal, not_equal, alone = map(
        int,
        re.fullmatch(
            r"(\d+) logical tensors differ: (\d+) equal, (\d+) not, (\d+) only in the first", out.splitlines()[-1]
        ).groups(),
    )
    listed = sum(
        ": " in line and "tensors): only in" not in line
        for line in out.splitlines()[:-1]
        if not line.startswith("(flag)")
    )
    grouped = sum(map(int, re.findall(r"\((\d+) tensors\): only in", out)))
    assert equal == 0 and not_equal + alone == differ == listed + grouped
    assert "optimizer" not in call("diff", tmp_path / "a", tmp_path / "b", "--weights-only")[1]


# ---- what cannot be looked at


def test_errors_exit_with_code_2_and_one_line(tmp_path, call):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr/metadata.json").write_text('{"sharded_backend": "zarr"}')
    write(tmp_path / "ckpt")
    for argv, words in (
        (("ls", tmp_path / "nowhere"), "does not exist"),
        (("verify", tmp_path / "file"), "is not a directory"),
        (("ls", tmp_path / "empty"), "neither a checkpoint nor a folder of checkpoints"),
        (("verify", tmp_path / "ckpt", "--ckpt-step", 4), "iter_0000004 does not exist. Complete checkpoints"),
        (
            ("ls", tmp_path / "zarr"),
            "'zarr'; only torch_dist and legacy checkpoints (mp_rank_* folders) and Hugging Face folders can be looked at",
        ),
        (("diff", tmp_path / "ckpt", tmp_path / "nowhere"), "does not exist"),
    ):
        code, out, err = call(*argv)
        assert code == 2 and words in err and len(err.splitlines()) == 1 and out == "", argv
    (tmp_path / "ckpt" / TRACKER).write_text("many")
    assert call("ls", tmp_path / "ckpt")[0] == 2
    for argv in ((), ("ls",), ("copy", "x"), ("diff", "x"), ("ls", "x", "--match", "(")):
        assert call(*argv)[0] == 2
    (tmp_path / "ckpt/iter_0000003/__0_0.distcp").unlink()
    code, _, err = call("diff", tmp_path / "ckpt/iter_0000003", tmp_path / "ckpt/iter_0000003")
    assert code == 2 and "__0_0.distcp is missing" in err


def test_inspect_runs_as_a_module(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    for argv, code in ((["ls", str(tmp_path)], 0), (["ls", "nowhere"], 2)):
        monkeypatch.setattr(sys, "argv", ["inspect", *argv])
        monkeypatch.delitem(sys.modules, "moe_trainer.checkpoint.inspect", raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("moe_trainer.checkpoint.inspect", run_name="__main__")
        assert ended.value.code == code
        out, err = capsys.readouterr()
        assert ("output_layer.weight" in out, err == "") == (code == 0, code == 0)


# ---- legacy folders


def _save_legacy(rank, size, folder):
    ps = ParallelState.create(size, rank, tp=2, pp=2, etp=2)
    model = FakeModel(ps=ps, seed=1)
    record = ARGS | {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "world_size": 4,
        "optimizer": "adam",
        "weight_decay": 0.1,
        "use_distributed_optimizer": True,
    }
    save(
        folder,
        CheckpointState(3, record),
        [model],
        FakeOptimizer(model, ps, True, seed=1),
        ps,
        SaveOptions(ckpt_format="torch"),
    )


@pytest.fixture(scope="module")
def legacy(tmp_path_factory):
    """A legacy checkpoint of four ranks with distrib_optim.pt files; read-only."""
    folder = tmp_path_factory.mktemp("legacy")
    run_ranks(_save_legacy, 4, folder)
    return folder


def test_ls_and_diff_read_the_golden_legacy_folder(call, shared):
    """Megatron-LM wrote the same iteration in both formats."""
    golden = shared / "golden/ckpt"
    listings = []
    for name in ("a2_torch", "a2_torch_dist"):
        code, out, _ = call("ls", golden / name, "--expand", "--checksums")
        assert code == 0 and ("in the legacy format" in out) == (name == "a2_torch")
        listings.append([line for line in out.splitlines() if "float32" in line])
    assert listings[0] == listings[1] and len(listings[0]) == 135
    code, out, _ = call("verify", golden / "a2_torch/iter_0000005")
    assert code == 0 and "is whole: 135 logical tensors, 2.3 MiB read" in out and "note" not in out
    code, out, _ = call("diff", golden / "a2_torch", golden / "a2_torch_dist")
    assert code == 0 and out.endswith("all tensors are equal (135)\n")


def test_shards_of_a_legacy_folder_are_merged(tmp_path, legacy, call):
    write(tmp_path, model=FakeModel(seed=1))
    code, out, _ = call("diff", legacy, tmp_path)
    # the distributed optimizer's own copy of the weights is compared with the fp32 weights of the other
    assert code == 0 and out.endswith("all tensors are equal (180)\n")
    code, out, _ = call("ls", legacy)
    assert code == 0 and "tensor_model_parallel_size 2, pipeline_model_parallel_size 2" in out and "8 files" in out
    code, out, _ = call("verify", legacy)
    assert code == 0 and "180 logical tensors" in out


def test_diff_compares_main_parameters_under_both_names(tmp_path, call):
    """They are `param` with a distributed optimizer, `fp32_param` without; those of fp32 weights are stored with one alone."""
    for dtype, flags in ((torch.float32, {}), (torch.bfloat16, {"bf16": True})):
        model = FakeModel(seed=1, dtype=dtype)
        folders = []
        for name, record in (
            ("plain", ARGS | flags),
            ("distributed", ARGS | flags | {"use_distributed_optimizer": True}),
        ):
            optimizer = FakeOptimizer(model, SINGLE, main_params=bool(flags), seed=1)
            save(tmp_path / str(dtype) / name, CheckpointState(3, record), [model], optimizer, SINGLE, SaveOptions())
            folders.append(tmp_path / str(dtype) / name)
        code, out, _ = call("diff", *folders)
        assert code == 0 and "all tensors are equal" in out
    changed = FakeModel(seed=1)
    with torch.no_grad():
        changed.table["decoder.final_layernorm.weight"][0] += 1
    save(
        tmp_path / "changed",
        CheckpointState(3, ARGS),
        [changed],
        FakeOptimizer(changed, SINGLE, seed=1),
        SINGLE,
        SaveOptions(),
    )
    assert call("diff", tmp_path / str(torch.float32) / "distributed", tmp_path / "changed")[0] == 1


def test_verify_names_missing_parts_of_a_legacy_folder(tmp_path, legacy, call):
    def copied(name):
        shutil.copytree(legacy, tmp_path / name)
        return tmp_path / name / "iter_0000003"

    folder = copied("gone")
    (folder / "mp_rank_01_000/model_optim_rng.pt").unlink()
    assert "mp_rank_01_000/model_optim_rng.pt is missing" in problems(call, folder)
    code, out, err = call("ls", folder)
    assert (code, out) == (2, "") and "mp_rank_01_000/model_optim_rng.pt is missing" in err

    folder = copied("changed")
    path = folder / "mp_rank_00_001/distrib_optim.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    out = problems(call, folder)
    assert f"{path} is damaged" in out and "checksum" in out and len(out.splitlines()) == 2

    folder = copied("more")
    (folder / "mp_rank_02_000").mkdir()
    (folder / "mp_rank_02_000/model_optim_rng.pt").write_bytes(b"x")
    code, out, _ = call("verify", folder)
    assert code == 1 and "mp_rank_02_000/model_optim_rng.pt" in out

    folder = copied("without state")
    (folder / "mp_rank_00_000/distrib_optim.pt").unlink()
    code, out, _ = call("verify", folder)
    assert (
        code == 0
        and re.search("note: its optimizer state cannot be read: .*mp_rank_00_000/distrib_optim.pt is missing", out)
        and "45 logical tensors" in out
    )
    assert "its optimizer state cannot be read" in call("ls", folder)[1]


def test_diff_counts_states_missing_on_one_side():
    from moe_trainer.checkpoint.inspect import MAX_LISTED, _grouped

    lines = [f"optimizer.state.exp_avg.decoder.layers.{number}.w: only in a" for number in range(MAX_LISTED + 1)]
    lines += ["optimizer.state.exp_avg_sq.x: only in a", "decoder.w: differs by up to 1"]
    assert list(_grouped(lines)) == [
        "decoder.w: differs by up to 1",
        f"optimizer.state.exp_avg.* ({MAX_LISTED + 1} tensors): only in a",
        "optimizer.state.exp_avg_sq.x: only in a",
    ]


def test_lock_file_is_removed_only_by_its_own_run(tmp_path):
    from moe_trainer.checkpoint.directory import LOCK, acquire_lock, release_lock

    assert acquire_lock(tmp_path) is None and (tmp_path / LOCK).exists()
    release_lock(tmp_path)
    assert not (tmp_path / LOCK).exists() and acquire_lock(tmp_path) is None
    (tmp_path / LOCK).write_text("host other, process 1, since 2026-01-01 00:00:00")
    release_lock(tmp_path)  # another run's
    assert (tmp_path / LOCK).exists()


class HybridModel(FakeModel):
    """The layers of a FakeModel by sublayer, with the same values, under the names of a hybrid model."""

    def __init__(self):
        shapes = layer_shapes().items()
        attention = {name: shape for name, shape in shapes if name.startswith(("input", "self"))}
        experts = {name: shape for name, shape in shapes if name not in attention}
        super().__init__([attention, experts, attention, experts])

    def _add(self, path, value, **more):
        super()._add(path.replace("final_layernorm", "final_norm"), value, **more)


def test_diff_of_a_gpt_and_a_hybrid_model_translates_names(tmp_path, call):
    gpt = write(tmp_path / "gpt", model=FakeModel())
    pattern = {"hybrid_layer_pattern": "*E*E", "num_layers": 4}
    hybrid = write(tmp_path / "hybrid", model=HybridModel(), args=ARGS | pattern)
    code, out, _ = call("diff", gpt, hybrid, "--weights-only")
    assert code == 0 and "all tensors are equal" in out
    code, out, _ = call("diff", hybrid, gpt)
    assert ": only in" not in out and "optimizer.state.exp_avg.decoder.layers.3.mlp.router.weight: differs" in out


def test_a_file_that_lacks_its_last_byte_is_cut_off(tmp_path):
    index = Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo("file", 3, 7)})
    for size, problems in ((10, 0), (9, 1)):
        (tmp_path / "file").write_bytes(bytes(size))
        assert len(truncated_files(tmp_path, index)) == problems


def test_the_format_of_a_folder_follows_its_files(tmp_path):
    def found(*paths):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for path, *content in paths:
            (folder / path).write_text(*content or [""])
        return detect_format(folder)

    native, ranks, index = ("metadata.json", '{"sharded_backend": "torch_dist"}'), ("mp_rank_00",), (".metadata",)
    model = ("config.json",), ("model.safetensors",)
    assert found(native) == found(native, ranks, index) == "torch_dist"
    assert found(("metadata.json", '{"sharded_backend": "zarr"}'), ranks) == "zarr"
    assert found(ranks) == found(ranks, index) == found(ranks, model[0]) == "torch"
    assert found(index) == "torch_dcp" and found(model[0]) is None
    assert found(*model) == found(*model, native) == "huggingface"

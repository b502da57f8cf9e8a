"""Files that describe a run: the configuration of every rank, the map of parameter groups, an execution trace."""

import json

import pytest
from commands import run
from training.tiny import MOCK, TINY

JOB = [*TINY, *MOCK, "--train-iters", "2"]


def test_configuration_and_parameter_groups_are_written(tmp_path):
    mapping = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --decoupled-lr 1e-4 --global-batch-size 8".split()
    done = run(
        [*JOB, *mapping, "--config-logger-dir", "config", "--dump-param-to-param-group-map", "maps/groups.json"],
        tmp_path,
        4,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "config").iterdir()) == [
        "arguments.json",
        *(f"model.rank_{rank}.json" for rank in range(4)),
    ]
    settings = json.loads((tmp_path / "config" / "arguments.json").read_text())
    assert settings["hidden_size"] == 32 and settings["decoupled_lr"] == 1e-4
    model = json.loads((tmp_path / "config" / "model.rank_3.json").read_text())
    assert model["groups"]["pp"] == [1, 3] and model["groups"]["ep"] == [2, 3]
    (chunk,) = model["chunks"]
    names = [name for param in chunk["parameters"].values() for name in param["names"]]
    assert any(name.startswith("decoder.layers.1.mlp.experts") for name in names) and not any(
        "layers.0." in name for name in names
    )
    experts = next(param for param in chunk["parameters"].values() if param["kind"] == "expert")
    assert len(experts["names"]) == experts["shape"][0] == 2 and experts["dtype"] == "float32"
    assert "TopKRouter" in chunk["modules"].values()

    groups = json.loads((tmp_path / "maps" / "groups.json").read_text())
    of = {name: groups["param_groups"][place] for name, place in groups["param_to_param_group"].items()}
    assert (
        of["decoder.final_layernorm.weight"]["wd_mult"] == 0.0
        and of["decoder.layers.0.self_attention.linear_proj.weight"]["wd_mult"] == 1.0
    )
    assert of["output_layer.weight"]["is_decoupled_lr"] and of["embedding.word_embeddings.weight"]["is_decoupled_lr"]
    parts = [name for name, group in of.items() if group["is_expert_parallel"]]
    assert len(parts) == 2 * 4 * 2 and all(
        ".experts." in name for name in parts
    )  # layers, experts, matrices: of all ranks


@pytest.mark.parametrize(
    "flags", [["--config-logger-dir", "file/x"], ["--dump-param-to-param-group-map", "file/x.json"]]
)
def test_a_file_that_cannot_be_written_is_reported_before_training(tmp_path, flags):
    (tmp_path / "file").write_text("")
    done = run([*JOB, *flags], tmp_path, 2)
    assert done.returncode == 2 and " ".join(flags) in done.stderr and "Traceback" not in done.stderr
    assert "iteration        1/" not in done.stdout


def test_an_execution_trace_is_next_to_the_profile(tmp_path):
    flags = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 0 --tensorboard-dir board"
    done = run([*JOB, *flags.split(), "--pytorch-profiler-collect-chakra"], tmp_path)
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "board" / "profile" / "chakra_rank0_iterations2-2.json").read_text())
    names = {node["name"] for node in trace["nodes"]}
    assert any("mm" in name for name in names)
    assert (tmp_path / "board" / "profile" / "rank0_iterations2-2.json").exists()
    done = run([*JOB, "--pytorch-profiler-collect-chakra"], tmp_path)
    assert "--pytorch-profiler-collect-chakra has no effect without --profile" in done.stderr

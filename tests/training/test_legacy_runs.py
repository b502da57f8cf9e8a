"""--ckpt-format torch, --ckpt-convert-format and --override-ckpt-iteration through the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import golden_workspace, read_metrics, run
from safetensors.torch import load_file
from training.test_resume import outputs
from training.tiny import MOCK, TINY

from moe_trainer.checkpoint.common_state import read as read_common
from moe_trainer.checkpoint.folder_format import detect_format
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.logical import logical_tensors, read_logical

VARIANTS = {
    "experts apart, bf16": ("--bf16 --use-distributed-optimizer --expert-model-parallel-size 2", 2),
    "mla, mtp, bias": (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --mtp-num-layers 1 --tensor-model-parallel-size 2 "
        "--sequence-parallel --use-distributed-optimizer",
        2,
    ),
    "interleaved, local": (
        "--transformer-impl local --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
        2,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_resumes_bitwise_from_its_legacy_checkpoint(tmp_path, variant):
    flags, world_size = VARIANTS[variant]
    argv = [*TINY, *MOCK, *flags.split(), "--ckpt-format", "torch", "--train-iters", "4"]
    finished = run([*argv, *outputs(tmp_path / "whole", "--save-interval", "2")], tmp_path, world_size)
    assert finished.returncode == 0, finished.stderr
    half = Path("ckpt", "iter_0000002")
    shutil.copytree(tmp_path / "whole" / half, tmp_path / "half" / half)
    (tmp_path / "half/ckpt/latest_checkpointed_iteration.txt").write_text("2")
    assert detect_format(tmp_path / "half" / half) == "torch"
    finished = run([*argv, *outputs(tmp_path / "half")], tmp_path, world_size)
    assert finished.returncode == 0, finished.stderr
    names = ("iteration", "consumed_samples", "lm loss", "grad_norm")
    whole, half = (
        [[record[name] for name in names] for record in read_metrics(tmp_path / folder / "metrics.jsonl")]
        for folder in ("whole", "half")
    )
    assert whole[2:] == half and len(whole) == 4
    one, other = (load_file(tmp_path / folder / "final.safetensors") for folder in ("whole", "half"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_golden_checkpoints_are_unchanged_by_conversion_and_back(shared, tmp_path):
    """Convert from one format to the other and back, each time under another layout: all tensors are unchanged."""
    cwd = golden_workspace(shared, tmp_path)
    argv = json.loads((shared / "golden/a2_mixtral/meta.json").read_text())["argv"]
    argv = argv[: argv.index("--save")] + argv[argv.index("--save") + 2 :]
    ways = (
        ("a2_torch", "torch_dist", 2, "--pipeline-model-parallel-size 2"),
        (None, "torch", 2, "--expert-model-parallel-size 2"),
        (None, "torch_dist", 1, ""),
    )
    folder = shared / "golden/ckpt/a2_torch"
    for number, (_, form, world_size, flags) in enumerate(ways):
        target = tmp_path / f"converted{number}"
        finished = run(
            [
                *argv,
                *flags.split(),
                "--load",
                str(folder),
                "--ckpt-convert-format",
                form,
                "--ckpt-convert-save",
                str(target),
            ],
            cwd,
            world_size,
        )
        assert finished.returncode == 0, finished.stderr
        folder = target / form
        assert (
            detect_format(folder / "iter_0000005") == form
            and (folder / "latest_checkpointed_iteration.txt").read_text() == "5"
        )
    one, other = (path / "iter_0000005" for path in (shared / "golden/ckpt/a2_torch_dist", folder))
    indices = [read_index(path) for path in (one, other)]
    expected, found = ({each.name: each for each in logical_tensors(index)} for index in indices)
    assert expected.keys() <= found.keys()
    for name, tensor in expected.items():
        assert torch.equal(read_logical(one, indices[0], tensor), read_logical(other, indices[1], found[name])), name


def test_conversion_needs_no_training_flags(shared, tmp_path):
    cwd = golden_workspace(shared, tmp_path)
    source = shared / "golden/ckpt/a2_torch"
    finished = run(
        [
            "--load",
            str(source),
            "--use-checkpoint-args",
            "--ckpt-convert-format",
            "torch_dist",
            "--ckpt-convert-save",
            str(tmp_path / "to"),
            "--distributed-backend",
            "gloo",
        ],
        cwd,
        1,
    )
    assert finished.returncode == 0, finished.stderr
    source_index, made = (read_index(path / "iter_0000005") for path in (source, tmp_path / "to/torch_dist"))
    schedules = [
        read_common(path / "iter_0000005", index)["opt_param_scheduler"]
        for path, index in ((source, source_index), (tmp_path / "to/torch_dist", made))
    ]
    assert schedules[0] == schedules[1] and schedules[0]["max_lr"] == 0.001
    states = [
        {tensor.name for tensor in logical_tensors(index) if tensor.name.startswith("optimizer.")}
        for index in (source_index, made)
    ]
    assert states[0] and states[0] <= states[1]


def test_conversion_of_a_missing_checkpoint_is_refused(tmp_path):
    finished = run(
        [
            *TINY,
            *MOCK,
            "--train-iters",
            "4",
            "--load",
            str(tmp_path / "none"),
            "--ckpt-convert-format",
            "torch",
            "--ckpt-convert-save",
            str(tmp_path / "to"),
        ],
        tmp_path,
        1,
    )
    assert finished.returncode == 2 and "could not find the metadata file" in finished.stderr
    assert not (tmp_path / "to").exists()


def test_override_ckpt_iteration_sets_the_first_iteration(tmp_path):
    argv = [*TINY, *MOCK, *outputs(tmp_path)]
    assert run([*argv, "--train-iters", "8", "--exit-interval", "2"], tmp_path, 1).returncode == 0
    (tmp_path / "metrics.jsonl").unlink()
    assert run([*argv, "--train-iters", "8", "--override-ckpt-iteration", "6"], tmp_path, 1).returncode == 0
    assert [record["iteration"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [7, 8]
    shutil.rmtree(tmp_path / "ckpt")

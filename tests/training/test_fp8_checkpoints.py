"""The state of delayed scaling in checkpoints: any layout can resume with it, and runs with and without fp8 can load each other."""

import logging

import torch
from harness import run_ranks
from training.layouts import make_argv, make_run
from training.resuming import load_and_save, train_and_save

from moe_trainer.checkpoint.inspect import describe, differences
from moe_trainer.checkpoint.manager import load
from moe_trainer.checkpoint.options import LoadOptions
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.iteration import iter_quantized_gemms
from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step

FP8 = "--fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max --first-last-layers-bf16 --num-layers-at-end-in-bf16 0".split()
TP = "--tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall".split()
EP = "--expert-model-parallel-size 2 --use-distributed-optimizer --moe-token-dispatcher-type alltoall".split()


def _run(argv):
    return make_run(argv, 0, ParallelState.single(), 2)


def _load(run, folder, **options):
    return load(folder, run.chunks, run.optimizer, run.ps, LoadOptions(run.args.as_dict(), load_rng=False, **options))


def _scales(run) -> dict[str, torch.Tensor]:
    return {gemms.name: gemms.scaling.clone() for gemms in iter_quantized_gemms(run.chunks)}


def test_fp8_scales_are_unchanged_across_layouts(tmp_path):
    argv = [*make_argv("plain"), *FP8]
    run_ranks(train_and_save, 2, [*argv, *TP], tmp_path / "tp")
    run_ranks(load_and_save, 2, [*argv, *EP], tmp_path / "tp", tmp_path / "ep")
    folders = [tmp_path / name / "iter_0000002" for name in ("tp", "ep")]
    assert differences(*folders) == []
    assert sum(key.startswith("fp8.decoder.layers.") for key in describe(folders[0])) == 3 * 4, (
        "three layers of four are quantised"
    )
    run = _run(argv)
    assert not any(scale.any() for scale in _scales(run).values())
    _load(run, tmp_path / "ep")
    found = _scales(run)
    assert all((scale[:, 0] > 0).all() and (scale[:, 1:3] > 0).all() for scale in found.values()) and len(found) == 12


def test_checkpoints_load_between_runs_with_and_without_fp8(tmp_path, caplog):
    plain, low = make_argv("plain"), [*make_argv("plain"), *FP8]
    run_ranks(train_and_save, 1, plain, tmp_path / "plain")
    run_ranks(train_and_save, 1, low, tmp_path / "low")
    with caplog.at_level(logging.WARNING):
        _load(_run(plain), tmp_path / "low", strictness="raise_all")
        assert not caplog.records, "unused scales are not surplus tensors"
        run = _run(low)
        _load(run, tmp_path / "plain", strictness="raise_all")
    assert "they start from initial values" in caplog.text and not any(scale.any() for scale in _scales(run).values())
    train_step(run, TrainState(iteration=2), 4)
    longer = _run([*low, "--fp8-amax-history-len", "5"])
    caplog.clear()
    _load(longer, tmp_path / "low")
    assert "they start from initial values" in caplog.text
    fresh = _run(low)
    _load(fresh, tmp_path / "low", finetune=True)
    assert not any(scale.any() for scale in _scales(fresh).values()), "another training has other maxima"

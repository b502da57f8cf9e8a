"""Run `pretrain.pretrain` in forked ranks: the command line without the start of an interpreter."""

import os
from pathlib import Path

import torch
from commands import read_metrics
from emulated_cuda.run import on_device
from harness import run_ranks
from mock_data import shorten
from safetensors.torch import load_file

import arguments
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.training import initialize
from moe_trainer.training import pretrain as pretrain_module


def pretrain(
    argv: list[str], folder: Path, world_size: int = 1, device: bool = False
) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Run a job in `folder`; returns the records of its metrics file and the exported weights. device: on emulated devices, one for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = ["--metrics-file", "metrics.jsonl", "--export-weights", "final.safetensors"]
    job = [*argv, *outputs], folder
    if not device:
        codes = run_ranks(_rank, world_size, *job)
    elif world_size == 1:
        codes = [on_device(_on_device, 0, 1, *job)]
    else:
        codes = on_device(_on_device, *job, ranks=world_size, devices=world_size)
    assert codes == [0] * world_size
    weights = folder / "final.safetensors"
    return read_metrics(folder / "metrics.jsonl"), load_file(weights) if weights.exists() else {}


def _on_device(rank, n, argv, folder):
    shorten()
    return _rank(rank, n, argv, folder)


def _rank(rank, n, argv, folder):
    # the harness has joined the ranks and parts them
    initialize._init_process_group = pretrain_module.close_groups = lambda *_: None
    os.chdir(folder)
    return pretrain_module.pretrain(arguments.parse_args(argv, n), LaunchEnv(rank, n, rank, "127.0.0.1", 1, "test"))

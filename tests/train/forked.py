"""The whole of `train.pretrain` in forked ranks: what the command line does, without paying for an interpreter each time."""

import os
from pathlib import Path

import torch
from commands import read_metrics
from harness import run_ranks
from safetensors.torch import load_file

import arguments
from moe_trainer import initialize, train
from moe_trainer.place import Place


def pretrain(argv: list[str], folder: Path, world_size: int = 1) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Run a job in `folder`; returns the records of its metrics file and the exported weights."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = ["--metrics-file", "metrics.jsonl", "--export-weights", "final.safetensors"]
    assert run_ranks(_rank, world_size, [*argv, *outputs], folder) == [0] * world_size
    weights = folder / "final.safetensors"
    return read_metrics(folder / "metrics.jsonl"), load_file(weights) if weights.exists() else {}


def _rank(rank, n, argv, folder):
    # the harness has joined the ranks and parts them; a forked process must not touch CUDA
    initialize._join = train.close_groups = lambda *given: None
    torch.cuda.is_available = lambda: False
    os.chdir(folder)
    return train.pretrain(arguments.parse_args(argv, n), Place(rank, n, rank, "127.0.0.1", 1, "test"))

"""Trainings on a device with and without CUDA graphs, shared by the tests of graphs."""

import torch
from training.layouts import MODEL, make_argv, shallow

from arguments import parse_args
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace

EXPERTS = ("--num-experts", "--moe-router-topk", "--moe-aux-loss-coeff", "--moe-z-loss-coeff", "--moe-grouped-gemm")
STEPS = 3  # one without graphs, one that captures, one that only replays


def local(modules: str = "") -> list[str]:
    return [
        "--cuda-graph-impl",
        "local",
        "--cuda-graph-warmup-steps",
        "1",
        *(["--cuda-graph-modules", *modules.split()] if modules else []),
    ]


def full() -> list[str]:
    return [
        "--cuda-graph-impl",
        "full_iteration",
        "--cuda-graph-warmup-steps",
        "1",
        "--no-check-for-nan-in-loss-and-grad",
    ]


def same_accumulation_flags(graph: list[str]) -> list[str]:
    """Return the flags for eager training to sum gradients in the order of graphed training, which uses hooks."""
    return [] if graph == full() else ["--no-gradient-accumulation-fusion"]


def dense() -> list[str]:
    """The tiny model without experts."""
    kept, drop = [], False
    for word in MODEL:
        drop = word in EXPERTS if word.startswith("--") else drop
        kept += [] if drop else [word]
    return kept


def line(kind: str, flags: str = "") -> list[str]:
    """Return the flags of a model of two layers, or of four where a rank has two stages of a pipeline."""
    argv = dense() if kind == "dense" else make_argv(kind)
    return [*(argv if "--num-virtual" in flags else shallow(argv)), *flags.split()]


def train(argv: list[str], prepare=None):
    torch.manual_seed(7)  # dropout draws from the global generator
    return training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), STEPS, prepare=prepare, device="cuda")


def list_differences(eager, graphed) -> list[str]:
    """Return the names of results that differ between two trainings."""
    found = [
        name
        for name in ("losses", "grad_norms", "dropped", "per_layer", "evaluation")
        if getattr(eager, name) != getattr(graphed, name)
    ]
    return found + [name for name, tensor in eager.weights.items() if not tensor.equal(graphed.weights[name])]

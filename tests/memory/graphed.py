"""Trainings on a device with and without CUDA graphs, shared by the tests of graphs."""

from collections import Counter

import torch
from memory.hybrid_ep_on_device import use_stand_in
from training.layouts import MODEL, create_groups, make_argv, shallow

from arguments import parse_args
from moe_trainer.memory.graph_capture import CapturedGraph
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


class Observer:
    """An observer of an iteration, which has no graphs then and counts on the host."""

    def attach(self) -> None:
        pass

    on_retry = before_update = attach


def train_ranks(
    rank: int, n: int, argvs: list[list[str]], steps: int, crowded: int | None = None, observed: int | None = None
) -> list:
    """For on_device, on several ranks: results of trainings, and the counts of every step.

    With HybridEP's stand-in. crowded: in this step the first MoE layer sends all tokens to the same experts. observed: this step has an observer.
    Counts: captures, replays, and in the last step waits of the host by file.
    """
    return [train_counted(argv, rank, create_groups(argv, rank, n), steps, crowded, observed) for argv in argvs]


def train_counted(
    argv: list[str],
    rank: int,
    ps: ParallelState,
    steps: int,
    crowded: int | None = None,
    observed: int | None = None,
):
    import emulation

    use_stand_in()
    torch.manual_seed(7)  # forced routing draws from the global generator
    counts, step, capture, replay = [], training_trace.train_step, CapturedGraph.capture, CapturedGraph.replay

    def counted_step(run, state, *rest):
        counts.append(Counter())
        if state.iteration == crowded:
            run.chunks[0].moe_layers()[0].router.weight.data.zero_()
        if state.iteration == observed:
            rest = (*rest, Observer())
        if state.iteration == 1:
            run.optimizer.wait_params()  # as an evaluation before the capture does
        if state.iteration < steps - 1:
            return step(run, state, *rest)
        with emulation.Ledger(emulation.DEVICE()) as ledger:
            result = step(run, state, *rest)
        for (_, place), times in ledger.waits.items():
            counts[-1][place.partition(":")[0]] += times
        return result

    def counted_capture(graph, run):
        counts[-1]["captures"] += 1
        return capture(graph, run)

    def counted_replay(graph):
        counts[-1]["replays"] += 1
        return replay(graph)

    training_trace.train_step = counted_step
    CapturedGraph.capture, CapturedGraph.replay = counted_capture, counted_replay
    try:
        outcome = training_trace.train(parse_args(argv, ps.world.size), rank, ps, steps, device="cuda")
    finally:
        training_trace.train_step, CapturedGraph.capture, CapturedGraph.replay = step, capture, replay
    return outcome, counts

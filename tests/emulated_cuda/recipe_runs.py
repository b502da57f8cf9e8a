"""Small forms of recipes on emulated devices, for tests/verification/prove_recipes.py."""

import torch
from training.layouts import create_groups

from arguments import parse_args
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace


def run_small(rank: int, world_size: int, argv: list[str]) -> tuple[list, list[float], int, dict[str, int]]:
    """Train on this rank's device. Returns losses, norms, graphs captured, and waits of the last iteration by file."""
    import emulation

    ps = ParallelState.single() if world_size == 1 else create_groups(argv, rank, world_size)
    ledgers, captured, step, begin = [], [], training_trace.train_step, torch.cuda.CUDAGraph.capture_begin

    def watched(*args):
        with emulation.Ledger(emulation.DEVICE()) as ledger:
            ledgers.append(ledger)
            return step(*args)

    def counted(graph, *args, **kwargs):
        captured.append(graph)
        return begin(graph, *args, **kwargs)

    training_trace.train_step, torch.cuda.CUDAGraph.capture_begin = watched, counted
    try:
        trace = training_trace.train(parse_args(argv, world_size), rank, ps, 6, device="cuda")
    finally:
        training_trace.train_step, torch.cuda.CUDAGraph.capture_begin = step, begin
    waits: dict[str, int] = {}
    for (_, line), times in ledgers[-1].waits.items():
        file = line.partition(":")[0]
        waits[file] = waits.get(file, 0) + times
    return trace.losses, trace.grad_norms, len(captured), waits

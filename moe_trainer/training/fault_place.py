"""Where a result that is rejected was made: the module, the expert and the microbatch (guard/anomaly.py), the rank and its device, the samples."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from moe_trainer.guard.anomaly import BEHIND, FORWARD, Chunk, Fault, Rows, Search, gradients_at_fault
from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import stages
from moe_trainer.moe.experts import Experts
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import info_of
from moe_trainer.run import Run, TrainState


def find_fault(run: Run, state: TrainState, again: Callable[[], list[Tensor]]) -> str:
    """The first number that is not finite, and the rank that has it. again: repeats the iteration, without graphs, and gives its sums.

    Collective.
    """
    ps = run.ps
    chunks = [Chunk(number, chunk, partial(global_name, chunk)) for number, chunk in stages(run.chunks, ps)]
    search = Search(chunks, lambda: ps.trace.microbatch, _rows_of_experts(run.chunks))
    with search.watching():
        sums = again()
    for index, pair in enumerate(sums, start=1):
        if not torch.isfinite(pair[0]):
            search.note(Fault(index, FORWARD, chunks[-1].number, BEHIND, "the loss is not finite, and all modules' results are"))
    mine = search.earliest()
    if mine is None and (names := gradients_at_fault(run.grads.owned_views())):
        mine = Fault(BEHIND, 1, 0, 0, f"the sum of the gradients of {', '.join(names[:3])} is not finite, and each of them is")
    told = collectives.all_gather_object((mine, _whose(run, state, mine)), ps.world)
    faults = [(fault, whose) for fault, whose in told if fault is not None]
    if not faults:
        return "nothing that is not finite was found in it"
    fault = min(fault for fault, _ in faults)
    return f"{fault.text}, on {' and '.join(whose for found, whose in faults if found == fault)}"


def device_of(run: Run) -> str:
    """Host and number of this rank's device, "node7 3"; the host alone on CPU."""
    device = run.runtime.device
    return platform.node() + (f" {device.index or 0}" if device.type == "cuda" else "")


def global_name(chunk: Transformer, path: str) -> str:
    """A module's path in the whole model: a chunk counts its layers from its first one."""
    words = path.split(".")
    if words[:2] == ["decoder", "layers"] and len(words) > 2:
        words[2] = str(chunk.layout.layers[int(words[2])])
    return ".".join(words) if path else ("output_layer and loss" if chunk.layout.has_loss else "the pipeline stage")


def _whose(run: Run, state: TrainState, fault: Fault | None) -> str:
    ps = run.ps
    text = f"rank {ps.world.rank} ({device_of(run)}; tp {ps.tp.rank}, cp {ps.cp.rank}, pp {ps.pp.rank}, ep {ps.ep.rank}, dp {ps.dp.rank})"
    if fault is None or not 0 < fault.microbatch < BEHIND:
        return text
    size = run.args.training.micro_batch_size
    start = state.consumed_train_samples + ((fault.microbatch - 1) * ps.dp.size + ps.dp.rank) * size
    return f"{text}, samples {start} to {start + size - 1} of the run"


def _rows_of_experts(chunks: list[Transformer]) -> Rows:
    """Tells the experts that the rows of a module's input and output belong to."""
    # noted before anything runs: what a sharded module gathers for its pass carries no names
    names = {id(module): [name.partition(".linear_fc1")[0] for name in info_of(module.linear_fc1.weight).names]
             for chunk in chunks for module in chunk.modules() if isinstance(module, Experts)}

    def rows(module: nn.Module, args: tuple) -> tuple[list[str], list[int]] | None:
        own = names.get(id(module))
        return None if own is None else (own, list(args[2])[:len(own)])

    return rows

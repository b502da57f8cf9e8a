"""Which experts serve which task: tokens of every expert, counted in the forward passes of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_trainer.drawing.load_map import Panel, busiest_text, load_map
from moe_trainer.drawing.report_page import Figure
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.layer import MoELayer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

_SHADES = " .:-=+*#%@"


class RoutingCounter:
    """Counts the tokens of this rank's routers by task.

    Without sequence parallelism too, every rank of tp routes its own tokens, so counts of all ranks can be added.
    """

    def __init__(self, chunks: Sequence[Transformer], ps: ParallelState):
        self._layers = [layer for chunk in chunks for layer in chunk.moe_layers()]
        self._ps = ps
        self._counts: dict[str, dict[int, Tensor]] = {}

    @contextmanager
    def counting(self, task: str) -> Iterator[None]:
        """Count what the block routes for a task."""
        counts = self._counts.setdefault(task, {})
        hooks = [self._hook(layer, counts) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def _hook(layer: MoELayer, counts: dict[int, Tensor]) -> Any:
        def count(module: torch.nn.Module, inputs: tuple[Tensor, PassInputs], output: tuple[Tensor, Tensor]) -> None:
            routing_TE, valid = output[1], inputs[1].valid
            if valid is not None:
                routing_TE = routing_TE & valid.mask_T.unsqueeze(1)
            tokens_E = routing_TE.sum(0)
            index = layer.layer_number - 1
            counts[index] = counts.get(index, torch.zeros_like(tokens_E)) + tokens_E

        return layer.router.register_forward_hook(count)

    def gather(self) -> dict[str, dict[str, list]]:
        """Return for every task its MoE layers, from 0 as in metrics.jsonl, and their tokens per expert. Collective."""
        local = {
            task: {layer: counts_E.tolist() for layer, counts_E in counts.items()}
            for task, counts in self._counts.items()
        }
        total: dict[str, dict[int, list[int]]] = {}
        for of_rank in collectives.all_gather_object(local, self._ps.world):
            for task, layers in of_rank.items():
                for layer, counts_E in layers.items():
                    before = total.setdefault(task, {}).get(layer, [0] * len(counts_E))
                    total[task][layer] = [sum(pair) for pair in zip(before, counts_E, strict=True)]
        return {
            task: {"layers": sorted(layers), "tokens_per_expert": [layers[layer] for layer in sorted(layers)]}
            for task, layers in total.items()
        }


def routing_table(routing: Mapping[str, Mapping[str, Sequence]]) -> str:
    """Return one line per task and layer: the load of every expert as a shade, and the busiest ones with their shares.

    An expert with the mean load has the shade in the middle; the darkest has twice as much or more.
    """
    rows = []
    for task, table in routing.items():
        for layer, counts in zip(table["layers"], table["tokens_per_expert"], strict=True):
            mean = max(sum(counts) / len(counts), 1e-9)
            shades = "".join(_SHADES[min(int(count / mean / 2 * len(_SHADES)), len(_SHADES) - 1)] for count in counts)
            rows.append((task, str(layer), shades, busiest_text(counts)))
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"  {task.ljust(widths[0])}  layer {layer.rjust(widths[1])}  |{shades}|  {shares}"
        for task, layer, shades, shares in rows
    ]
    return "\n".join(["experts by task (load of experts 0, 1, ...; busiest experts and their shares):", *lines])


def routing_figures(routing: Mapping[str, Mapping[str, Sequence]]) -> Iterator[Figure]:
    """Yield a map of loads for each task, all with the same rows and columns."""
    for task, table in routing.items():
        if table["layers"]:
            title, heading = f"loads of experts in task {task}", "Tokens of experts, over the mean of their layer"
            panel = Panel("", table["tokens_per_expert"])
            yield Figure(f"Experts that serve {task}", load_map(title, heading, table["layers"], [panel]))

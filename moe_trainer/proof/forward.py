"""Where a forward pass parts: what every attention and feed-forward part put out in the first step, by rank.

Each rank sums its rows of every output (the sums of values and of squares, one entry a channel). The one process holds all rows, so it
sums those of every data, context and tensor rank apart, as the topology deals them out. The first part in order of execution whose
sums differ is where to look, and the rank whose sums differ is who computed it. Only asked when a loss or gradient of the first step
differs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe_trainer.parallel.params import info_of
from moe_trainer.proof.topology import Topology
from moe_trainer.run import Run

Coordinates = tuple[int, int, int]
"""Data, context and tensor rank."""


@dataclass
class Watch:
    """Sums of outputs: (data, context, tensor rank) -> name of the part -> [2, H] fp64. Switch it off after the first step."""

    on: bool = True
    sums: dict[Coordinates, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, at: Coordinates, name: str, rows: Tensor) -> None:
        """Add some rows of an output."""
        flat = rows.detach().double().reshape(-1, rows.shape[-1])
        mine = torch.stack([flat.sum(0), flat.square().sum(0)]).cpu()
        self.sums[at][name] = self.sums[at].get(name, 0) + mine


def watch_rank(run: Run) -> Watch:
    """Watch the outputs of this rank's layers. With sequence parallelism a tensor rank has rows of its own."""
    ps = run.ps
    at = (ps.dp.rank, ps.cp.rank, ps.tp.rank if run.args.parallel.sequence_parallel else 0)
    watch = Watch()
    for name, part in _parts(run):
        def add(_module: nn.Module, _inputs: tuple, y: Tensor, name: str = name) -> None:
            if watch.on and not any(chunk.activations.replaying for chunk in run.chunks):
                watch.add(at, name, y)

        part.register_forward_hook(add)
    return watch


def watch_whole(run: Run, topology: Topology, data_ranks: int) -> Watch:
    """Watch a run on whole sequences, and sum what each rank of a topology would hold; microbatch i is data rank i % data_ranks's."""
    watch = Watch()
    held = {divmod(index, topology.tp): topology.positions(index, run.args.data.seq_length) for index in range(topology.shards)}

    def hook(name: str, y_SBH: Tensor) -> None:
        data = watch.calls[name] % data_ranks
        watch.calls[name] += 1
        for (context, tensor), here in held.items():
            watch.add((data, context, tensor), name, y_SBH[here])

    for name, part in _parts(run):
        part.register_forward_hook(lambda _module, _inputs, y, name=name: hook(name, y) if watch.on else None)
    return watch


def _parts(run: Run) -> list[tuple[str, nn.Module]]:
    """Attention and feed-forward parts of all layers by global name, in order of execution."""
    found = []
    for chunk in run.chunks:
        for layer in chunk.modules():
            if hasattr(layer, "self_attention") and hasattr(layer, "mlp"):
                name = info_of(next(layer.input_layernorm.parameters())).names[0].removesuffix(".input_layernorm.weight")
                found += [(f"{name}.self_attention", layer.self_attention), (f"{name}.mlp", layer.mlp)]
    return found

"""Sums of the outputs of every attention and MLP in the first step, by rank.

Each rank sums its tokens of every output (values and squares, one entry per channel). The one process holds all tokens,
so it sums those of every data, context and tensor rank separately, as the mapping shards them. The first output in
execution order whose sums differ is where to look, and the rank whose sums differ computed it. Used only if a loss or
gradient of the first step differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_trainer.debug.module_tracer import ModuleTracer
from moe_trainer.model.module_names import named_transformer_layers
from moe_trainer.training.run import TrainRun
from moe_trainer.verification.sequence_sharding import SequenceSharding, track_lengths

Coordinates = tuple[int, int, int]
"""Data, context and tensor rank."""


class ActivationSums:
    """Sums of the outputs of modules until the tracer is stopped.

    Attributes:
        sums: coordinates -> name of the module -> [2, H] fp64.
    """

    def __init__(self) -> None:
        self.tracer = ModuleTracer()
        self.sums: dict[Coordinates, dict[str, Tensor]] = defaultdict(dict)

    def add(self, coordinates: Coordinates, name: str, output: Tensor) -> None:
        """Add some tokens of an output."""
        output_TH = output.detach().double().reshape(-1, output.shape[-1])
        sums = torch.stack([output_TH.sum(0), output_TH.square().sum(0)]).cpu()
        self.sums[coordinates][name] = self.sums[coordinates].get(name, 0) + sums

    def observe(self, run: TrainRun, add: Callable[[str, Tensor], None]) -> ActivationSums:
        """Call `add(name, output)` for every output of the attentions and MLPs of all layers."""
        for chunk in run.chunks:
            for _, layer in named_transformer_layers([chunk]):
                for part, module in layer.sublayers.items():
                    name = f"{layer.name}.{part}"

                    def look(_inputs: tuple, output: Tensor, name: str = name) -> None:
                        add(name, output)

                    self.tracer.on_output(module, look, chunk.activations)
        return self


def record_rank_sums(run: TrainRun) -> ActivationSums:
    """Sum the outputs of this rank's layers. With sequence parallelism tensor ranks have different tokens."""
    ps, recorder = run.ps, ActivationSums()
    coordinates = (ps.dp.rank, ps.cp.rank, ps.tp.rank if run.args.parallel.sequence_parallel else 0)
    return recorder.observe(run, partial(recorder.add, coordinates))


def record_reference_sums(
    run: TrainRun, sharding: SequenceSharding, num_data_ranks: int, micro_batch_size: int
) -> ActivationSums:
    """Sum the outputs of a run on full sequences for each rank of a mapping.

    Args:
        run: of the one process, with microbatches of any size.
        sharding: of the sequences.
        num_data_ranks: of the mapping; microbatch i belongs to data rank i % num_data_ranks.
        micro_batch_size: of the mapping.
    """
    recorder, get_lengths = ActivationSums(), track_lengths(run)
    num_sequences: Counter[str] = Counter()

    def add(name: str, y_SBH: Tensor) -> None:
        for y_SH in y_SBH.unbind(1):
            data_rank = num_sequences[name] // micro_batch_size % num_data_ranks
            num_sequences[name] += 1
            for index in range(sharding.num_shards):
                positions = sharding.positions(index, get_lengths())
                recorder.add((data_rank, *divmod(index, sharding.tp)), name, y_SH[positions])

    return recorder.observe(run, add)

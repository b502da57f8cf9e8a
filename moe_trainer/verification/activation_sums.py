"""Sums of the outputs of every attention and MLP in the first step, by rank.

Each rank sums its tokens of every output (values and squares, one entry per channel). The one process holds all tokens,
so it sums those of every data, context and tensor rank separately, as the layout shards them. The first output in
execution order whose sums differ is where to look, and the rank whose sums differ computed it. Used only if a loss or
gradient of the first step differs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe_trainer.parallel.params import get_param_info
from moe_trainer.training.context import TrainContext
from moe_trainer.verification.sequence_sharding import SequenceSharding

Coordinates = tuple[int, int, int]
"""Data, context and tensor rank."""


@dataclass
class ActivationSums:
    """Sums of outputs while `is_recording`: coordinates -> name of the module -> [2, H] fp64."""

    is_recording: bool = True
    sums: dict[Coordinates, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, coordinates: Coordinates, name: str, output: Tensor) -> None:
        """Add some tokens of an output."""
        output_TH = output.detach().double().reshape(-1, output.shape[-1])
        sums = torch.stack([output_TH.sum(0), output_TH.square().sum(0)]).cpu()
        self.sums[coordinates][name] = self.sums[coordinates].get(name, 0) + sums


def record_rank_sums(run: TrainContext) -> ActivationSums:
    """Sum the outputs of this rank's layers. With sequence parallelism tensor ranks have different tokens."""
    ps = run.ps
    coordinates = (ps.dp.rank, ps.cp.rank, ps.tp.rank if run.args.parallel.sequence_parallel else 0)
    recorder = ActivationSums()
    for name, module in _list_modules(run):

        def add(_module: nn.Module, _inputs: tuple, y: Tensor, name: str = name) -> None:
            if recorder.is_recording and not any(chunk.activations.is_recomputing for chunk in run.chunks):
                recorder.add(coordinates, name, y)

        module.register_forward_hook(add)
    return recorder


def record_reference_sums(run: TrainContext, sharding: SequenceSharding, num_data_ranks: int) -> ActivationSums:
    """Sum the outputs of a run on full sequences for each rank of a layout.

    Microbatch i belongs to data rank i % num_data_ranks.
    """
    recorder = ActivationSums()
    positions = {
        divmod(index, sharding.tp): sharding.positions(index, run.args.data.seq_length)
        for index in range(sharding.num_shards)
    }

    def add(name: str, y_SBH: Tensor) -> None:
        data_rank = recorder.calls[name] % num_data_ranks
        recorder.calls[name] += 1
        for (context_rank, tensor_rank), index in positions.items():
            recorder.add((data_rank, context_rank, tensor_rank), name, y_SBH[index])

    for name, module in _list_modules(run):
        module.register_forward_hook(
            lambda _module, _inputs, y, name=name: add(name, y) if recorder.is_recording else None
        )
    return recorder


def _list_modules(run: TrainContext) -> list[tuple[str, nn.Module]]:
    """List the attentions and MLPs of all layers with their global names, in execution order."""
    modules = []
    for chunk in run.chunks:
        for layer in chunk.modules():
            if hasattr(layer, "self_attention") and hasattr(layer, "mlp"):
                norm_name = get_param_info(next(layer.input_layernorm.parameters())).names[0]
                name = norm_name.removesuffix(".input_layernorm.weight")
                modules += [(f"{name}.self_attention", layer.self_attention), (f"{name}.mlp", layer.mlp)]
    return modules

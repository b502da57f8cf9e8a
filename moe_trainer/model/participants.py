"""The participants of a model, and statistics that any of its modules can register."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from arguments import Arguments
from moe_trainer.layers.qk_clip import MaxLogits
from moe_trainer.layers.sparse_attention import IndexerLosses
from moe_trainer.model.mtp import MTPMetrics
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.participant import ExpertBalance
from moe_trainer.moe.receive.agreement import ReceiveBuffers
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.participant import MeanStatistic, Participant, Participants, StepMetrics
from moe_trainer.quantization.iteration import QuantizedLayers


def collect_participants(
    chunks: Sequence[Transformer], args: Arguments, ps: ParallelState, device: torch.device
) -> Participants:
    """Return what takes part in the iterations of a model, in the order in which it communicates. Collective."""
    found: list[Participant] = [
        QuantizedLayers(chunks, ps),
        ExpertBalance(chunks, args, ps, device),
        MTPMetrics(chunks),
        IndexerLosses(chunks, ps, args.model, device),
    ]
    if names := _statistic_names(chunks, ps):
        found.append(ModuleStatistics(chunks, names, ps, device))
    return Participants([*found, MaxLogits(chunks, ps, args.model, device, args.output.log_max_attention_logit)])


def make_receive_buffers(
    chunks: Sequence[Transformer], args: Arguments, ps: ParallelState, device: torch.device
) -> ReceiveBuffers:
    """Return the buffers of the experts, which may be too small for an iteration."""
    return ReceiveBuffers(chunks, ps, device, args.moe.moe_expert_rank_capacity_factor is not None)


class ModuleStatistics(Participant):
    """Every MeanStatistic of the modules: those of one name are averaged over layers, microbatches and ranks."""

    def __init__(self, chunks: Sequence[nn.Module], names: Sequence[str], ps: ParallelState, device: torch.device):
        self._chunks, self._names, self._ps, self._device = chunks, names, ps, device

    def begin_step(self, iteration: int) -> None:
        self.discard()

    def reduced_sums(self) -> Tensor:
        table_N2 = torch.zeros(len(self._names), 2, dtype=torch.float64, device=self._device)
        for statistic in _iter_statistics(self._chunks):
            table_N2[self._names.index(statistic.name)] += statistic.sums
        return collectives.all_reduce(table_N2.flatten(), self._ps.world)

    def end_step(self, sums: Sequence[float], num_microbatches: int) -> StepMetrics:
        return StepMetrics(
            {name: total / max(count, 1.0) for name, total, count in zip(self._names, sums[::2], sums[1::2])}
        )

    def discard(self) -> None:
        for statistic in _iter_statistics(self._chunks):
            statistic.sums.zero_()


def _iter_statistics(chunks: Sequence[nn.Module]) -> Iterator[MeanStatistic]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, MeanStatistic))


def _statistic_names(chunks: Sequence[nn.Module], ps: ParallelState) -> list[str]:
    """Return the names of all stages' statistics. Collective over the stages."""
    local = {statistic.name for statistic in _iter_statistics(chunks)}
    return sorted(set().union(*collectives.all_gather_object(local, ps.pp)))

"""Queries multiplied by a factor of their position (--attn-temperature-tuning): longer contexts get sharper attention.

The softmax over more keys is flatter; a factor that grows with the logarithm of the position makes up for that.
Positions are those of the rotary tables (layers/rotary.py). Llama 4 has the factor in layers without rotary positions
and counts positions from one; Mistral 4 has it in all layers and counts from zero.
Source: Scalable-Softmax (arXiv 2501.19399).
"""

import torch
from torch import Tensor

from arguments.model import ModelArgs
from arguments.query_temperature import QUERY_TEMPERATURES, QueryTemperatureKind
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.rotary import skips_rope
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import ContextGroups


class QueryTemperature:
    """The factors of one layer; tables are made on first use of a length and cached.

    Args:
        groups: ranks that share a sequence.
    """

    def __init__(self, model: ModelArgs, kind: QueryTemperatureKind, groups: ContextGroups):
        self._first = kind.first
        self._scale, self._floor = model.attn_temperature_scale, model.attn_temperature_floor
        self._sequence = SequenceShard.over(groups)
        self._tables: dict[tuple, Tensor] = {}

    @staticmethod
    def of(model: ModelArgs, layer_number: int, groups: ContextGroups) -> "QueryTemperature | None":
        """Return the factors of a layer, counted from 1; None if it has none."""
        name = model.attn_temperature_tuning
        kind = None if name is None else QUERY_TEMPERATURES[name]
        if kind is None or (kind.without_rope and not skips_rope(model, layer_number)):
            return None
        return QueryTemperature(model, kind, groups)

    def factors(self, length: int, visible: AttentionMask | None, device: torch.device) -> Tensor:
        """Return the factors of the local queries, fp32 [S, 1, 1, 1].

        Args:
            length: S, number of local positions.
            visible: of the microbatch.
        """
        if visible is not None and visible.cache is not None and not visible.cache.is_prefill:
            return self._at(visible.cache.last_positions)
        if visible is not None and visible.packed is not None:
            packed = visible.packed
            shard = self._sequence.of(packed.padded_lengths, packed.cp_size)
            return self._at(to_device(shard.local(packed.positions(), 0), device))
        key = length, device
        if key not in self._tables:
            self._tables = {key: self._at(self._sequence.positions(length * self._sequence.cp.size, device))}
        return self._tables[key]

    def _at(self, positions_S: Tensor) -> Tensor:
        passed = torch.floor((positions_S + self._first).float() / self._floor)
        return (1.0 + self._scale * torch.log1p(passed)).view(-1, 1, 1, 1)

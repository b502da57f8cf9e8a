"""Rotary frequencies of a model, and cos/sin tables of the local positions.

Positions are those in the full sequence, also with --reset-position-ids: Megatron-LM's rotary embedding ignores the
position ids. Only packed sequences (THD) have positions of their own.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from arguments.layer_pattern import uses_window
from arguments.mechanisms.sublayers import always_rotates, variant_of
from arguments.model import ModelArgs
from moe_trainer.ops.packed_sequences import Packed
from moe_trainer.ops.rope import inverse_frequencies, llama3_scaling, rope_tables, yarn_frequencies, yarn_mscale
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group

Tables = tuple[Tensor, Tensor]


class Rotary:
    """Frequencies of one model; tables are made on first use of a length and cached."""

    def __init__(
        self,
        inv_freq: Tensor,
        position_scale: float = 1.0,
        amplitude: float = 1.0,
        sequence: SequenceShard | None = None,
    ):
        self.inv_freq = inv_freq
        self.sequence = sequence or SequenceShard(Group.single("cp"))
        self.position_scale = position_scale
        self.amplitude = amplitude
        self._tables: dict[tuple, Tables] = {}

    def tables_at(self, positions_S: Tensor) -> Tables:
        """Return cos, sin of positions, fp32 [S, R/2]."""
        if self.inv_freq.device != positions_S.device:
            self.inv_freq = self.inv_freq.to(positions_S.device)
        return rope_tables(self.inv_freq, positions_S, self.position_scale, self.amplitude)

    def tables(self, length: int, device: torch.device, packed: Packed | None = None) -> Tables:
        """Return cos, sin of the local positions in a sequence of `length`, fp32 [length / cp, R/2]."""
        if packed is not None:
            shard = self.sequence.of(packed.padded_lengths, packed.cp_size)
            return self.tables_at(to_device(shard.local(packed.positions(), 0), device))
        key = (length, device)
        if key not in self._tables:
            self._tables = {key: self.tables_at(self.sequence.positions(length, device))}
        return self._tables[key]


def make_rotary(model: ModelArgs, sequence: SequenceShard | None = None) -> Rotary | None:
    """Build the rotary embedding of the flags; None for learned or absent positions, and where layers have their own.

    Latent attention rotates --qk-pos-emb-head-dim features (--rope-type), also where the embedding adds positions;
    others --rotary-percent of --kv-channels.

    Args:
        sequence: the local positions; None for all.

    Raises:
        ValueError: for unsupported position types.
    """
    kind = model.position_embedding_type
    has_other_positions = kind in ("learned_absolute", "none")
    if variant_of(model).compresses_keys or has_other_positions and not always_rotates(model):
        return None
    if kind not in ("rope", "yarn") and not has_other_positions:
        raise ValueError(f"--position-embedding-type {kind} is not built; use rope, yarn, learned_absolute or none")
    if model.multi_latent_attention:
        yarn, dim = model.rope_type != "rope", model.qk_pos_emb_head_dim
        if not yarn:
            dim = int(dim * model.rotary_percent)
    else:
        yarn, dim = kind == "yarn", int(model.kv_channels * model.rotary_percent)
    if yarn:
        return _make_yarn(model, dim, sequence)
    inv_freq = inverse_frequencies(dim, model.rotary_base)
    if model.use_rope_scaling and not model.multi_latent_attention:
        high = model.rope_scaling_high_freq_factor
        inv_freq = llama3_scaling(inv_freq, model.rope_scaling_factor, high_freq_factor=high)
    factor = None if model.multi_latent_attention else model.rotary_seq_len_interpolation_factor
    return Rotary(inv_freq, position_scale=1.0 / factor if factor else 1.0, sequence=sequence)


def make_layer_rotaries(
    model: ModelArgs, layer_numbers: Iterable[int], sequence: SequenceShard | None = None
) -> list[Rotary | None]:
    """Return the rotary embedding of each of the layers (counted from 1); those with the same settings share it.

    --rotary-base-per-layer, and --window-rotary-percent and --window-rope-unscaled of layers with a window. Layers of
    multi-token prediction copy the last one.
    """
    made: dict[tuple, Rotary | None] = {}
    rotaries = []
    for number in layer_numbers:
        changes = _layer_changes(model, number)
        key = tuple(changes.items())
        if key not in made:
            made[key] = make_rotary(replace(model, **changes), sequence)
        rotaries.append(made[key])
    return rotaries


def _layer_changes(model: ModelArgs, layer_number: int) -> dict[str, Any]:
    """Return the rotary settings of a layer that are not those of the model."""
    changes: dict[str, Any] = {}
    if bases := model.rotary_base_per_layer:
        changes["rotary_base"] = bases[min(layer_number, len(bases)) - 1]
    if not uses_window(model, layer_number):
        return changes
    if model.window_rotary_percent is not None:
        changes["rotary_percent"] = model.window_rotary_percent
    if model.window_rope_unscaled:
        changes |= {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
        if model.position_embedding_type == "yarn":
            changes["position_embedding_type"] = "rope"
        if model.rope_type == "yarn":
            changes["rope_type"] = "rope"
    return changes


def make_compressed_rotary(model: ModelArgs, *, is_compressed: bool) -> Rotary:
    """Build the rotary embedding of a layer of DeepSeek-V4: one base without compressed keys, another one with them.

    --rope-type yarn scales the second kind only; without its temperature, as in the published model.
    """
    if not is_compressed:
        return Rotary(inverse_frequencies(model.qk_pos_emb_head_dim, model.rotary_base))
    if model.rope_type == "rope":
        return Rotary(inverse_frequencies(model.qk_pos_emb_head_dim, model.csa_compress_rotary_base))
    rotary = _make_yarn(model, model.qk_pos_emb_head_dim, None, model.csa_compress_rotary_base)
    rotary.amplitude = 1.0
    return rotary


def _make_yarn(model: ModelArgs, dim: int, sequence: SequenceShard | None, base: float | None = None) -> Rotary:
    """Build YaRN. Defaults of unset flags: original context 4096, beta 32 and 1 (DeepSeek-V2/V3)."""
    factor = model.rotary_scaling_factor
    inv_freq = yarn_frequencies(
        dim,
        base or model.rotary_base,
        factor,
        model.yarn_original_max_position_embeddings or 4096,
        model.yarn_beta_fast or 32.0,
        model.yarn_beta_slow or 1.0,
        model.yarn_correction_range_round_to_int is not False,
    )
    amplitude = yarn_mscale(factor, model.mscale) / yarn_mscale(factor, model.mscale_all_dim)
    return Rotary(inv_freq, amplitude=amplitude, sequence=sequence)


def skips_rope(model: ModelArgs, layer_number: int) -> bool:
    """Return whether a layer (counted from 1) has no rotary positions: --no-rope-freq.

    An integer N skips every N-th layer; a list has one flag per layer, 1 = skip, the last one also for multi-token
    prediction.
    """
    freq = model.no_rope_freq
    if not freq:
        return False
    if isinstance(freq, int):
        return layer_number % freq == 0
    return bool(freq[min(layer_number, len(freq)) - 1])

"""Convert rotary position settings that differ between layers: a table for each type of layer, or a base per layer.

Types are "full_attention" and "sliding_attention". Only the layers with full attention may have a scaling of their
own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.checkpoint.hf.converters.layer_patterns import layer_bases, layers_without_rope, windowed_layers
from moe_trainer.checkpoint.hf.converters.rotary import read_rotary, write_rotary

_FULL, _WINDOW = "full_attention", "sliding_attention"


def read_typed_rotary(config: Config) -> Flags:
    """Read `rope_parameters` with a table for each type of layer in `layer_types`.

    Raises:
        CheckpointError: for a missing table, or for scalings that no flag supports.
    """
    tables = config.get("rope_parameters") or {}
    kinds = config.get("layer_types") or [_FULL] * config["num_hidden_layers"]
    for kind in dict.fromkeys(kinds):
        if not isinstance(tables.get(kind), Mapping):
            raise CheckpointError(f"config.json: rope_parameters has no table for {kind!r}, and layer_types has")
    rest = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    flags = {kind: read_rotary({**rest, "rope_parameters": tables[kind]}) for kind in dict.fromkeys(kinds)}
    if len(flags) == 1:
        return flags[kinds[0]]
    full, window = flags[_FULL], dict(flags[_WINDOW])
    read = dict(full)
    base, share = window.pop("rotary_base"), window.pop("rotary_percent", 1.0)
    if base != full["rotary_base"]:
        read["rotary_base_per_layer"] = [float(flags[kind]["rotary_base"]) for kind in kinds]
    if share != full.get("rotary_percent", 1.0):
        read["window_rotary_percent"] = share
    scaling = {key: value for key, value in full.items() if key not in ("rotary_base", "rotary_percent")}
    if scaling != window:
        if window:
            raise CheckpointError(
                f"config.json: the rotary scalings {tables[_FULL]} of full attention and {tables[_WINDOW]} of sliding "
                "attention differ; no flag stands for one in windows only"
            )
        read["window_rope_unscaled"] = True
    return read


def write_typed_rotary(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write a table for each type of layer.

    Raises:
        CheckpointError: if layers of a type have different bases.
    """
    tables, slides = {}, windowed_layers(flags)
    for kind in (_FULL, _WINDOW):
        of_kind = dict(flags)
        of_kind["rotary_base"] = _only_base(flags, [slide == (kind == _WINDOW) for slide in slides], kind)
        if kind == _WINDOW and flags.get("window_rotary_percent") is not None:
            of_kind["rotary_percent"] = flags["window_rotary_percent"]
        if kind == _WINDOW and flags.get("window_rope_unscaled"):
            of_kind |= {"position_embedding_type": "rope", "use_rope_scaling": False}
            of_kind["rotary_seq_len_interpolation_factor"] = None
        written = write_rotary(of_kind)
        scaling = dict(written["rope_scaling"] or {"rope_type": "default"})
        scaling.pop("type", None)
        share = of_kind.get("rotary_percent")
        tables[kind] = {**scaling, "rope_theta": written["rope_theta"]} | (
            {"partial_rotary_factor": 1.0 if share is None else share}
        )
    return {"rope_parameters": tables}


def _only_base(flags: Mapping[str, Any], of_kind: Sequence[bool], kind: str) -> float:
    bases = set(base for base, is_kind in zip(layer_bases(flags), of_kind, strict=True) if is_kind)
    if len(bases) > 1:
        raise CheckpointError(
            f"--rotary-base-per-layer has {', '.join(map(str, sorted(bases)))} in layers with {kind}; this model type "
            "has one base for each type of layer"
        )
    return bases.pop() if bases else layer_bases(flags)[0]


def read_listed_rotary(config: Config) -> Flags:
    """Read `layer_rope_theta`: the base of every layer, 0 for none without positions.

    Raises:
        CheckpointError: for a list of another length, or without a base.
    """
    flags, bases = read_rotary(config), config.get("layer_rope_theta")
    if bases is None:
        return flags
    bases = [float(base) for base in bases]
    rotated = [base for base in bases if base]
    if len(bases) != config["num_hidden_layers"] or not rotated or min(bases) < 0:
        raise CheckpointError(
            f"config.json: layer_rope_theta is {config['layer_rope_theta']!r}; a base for each of the "
            f"{config['num_hidden_layers']} layers is needed, or 0, and not 0 in all"
        )
    if len(rotated) < len(bases):
        flags["no_rope_freq"] = [int(not base) for base in bases]
    if len(set(rotated)) > 1 or rotated[0] != flags["rotary_base"]:
        flags["rotary_base_per_layer"] = [base or rotated[0] for base in bases]
    return flags


def write_listed_rotary(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write `layer_rope_theta`, and the first base as that of the model."""
    pairs = zip(layer_bases(flags), layers_without_rope(flags), strict=True)
    return write_rotary(flags) | {"layer_rope_theta": [0 if skips else base for base, skips in pairs]}


TYPED_ROPE = ConfigConverter(read_typed_rotary, write_typed_rotary)
LISTED_ROPE = ConfigConverter(read_listed_rotary, write_listed_rotary)

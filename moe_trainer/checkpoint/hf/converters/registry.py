"""Conversions between config.json and flags that take more than another name: a module for each topic.

A reader gets the full config.json and returns flags by destination, a writer gets all flags and returns keys. Mapping
files list the converters of each family.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from arguments.mtp import num_mtp_depths
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters import (
    attention,
    experts,
    hybrid,
    linear_attention,
    rotary,
    rotary_by_layer,
    windows,
)
from moe_trainer.checkpoint.hf.converters import kimi_delta_attention as kimi_delta
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags


def _negated(key: str, dest: str) -> ConfigConverter:
    """Return the converter of a switch that is on where its flag is off."""
    return ConfigConverter(lambda config: {dest: not config.get(key, False)}, lambda flags: {key: not flags.get(dest)})


def _read_scaled_embedding(config: Config) -> Flags:
    """Read the switch of AFMoE: embeddings times the root of the hidden size."""
    return {"embedding_multiplier": config["hidden_size"] ** 0.5} if config.get("mup_enabled") else {}


def _write_scaled_embedding(flags: Mapping[str, Any]) -> dict[str, Any]:
    factor, root = flags.get("embedding_multiplier") or 1.0, flags["hidden_size"] ** 0.5
    if factor not in (1.0, root):
        raise CheckpointError(
            f"--embedding-multiplier {factor}: an AFMoE model has 1 or the root of --hidden-size {root}"
        )
    return {"mup_enabled": factor == root}


def _read_mtp(config: Config) -> Flags:
    return {"mtp_num_layers": config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or None}


def _write_mtp(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_nextn_predict_layers": num_mtp_depths(flags)}


# tensors give their number
TENSOR_MTP = ConfigConverter(lambda _: {}, lambda flags: {"mtp_num_hidden_layers": num_mtp_depths(flags)})
TIED = _negated("tie_word_embeddings", "untie_embeddings_and_output_weights")
NORMALIZED = _negated("norm_topk_prob", "moe_router_pre_softmax")
SCALED_EMBEDDING = ConfigConverter(_read_scaled_embedding, _write_scaled_embedding)
MTP = ConfigConverter(_read_mtp, _write_mtp)
# the default of transformers is a row of the published vocabulary, which this one may not have
NO_PADDING = ConfigConverter(lambda _: {}, lambda _: {"pad_token_id": None})
_MODULES = (
    rotary,
    rotary_by_layer,
    attention,
    windows,
    linear_attention,
    kimi_delta,
    hybrid,
    experts,
)
CONVERTERS: Mapping[str, ConfigConverter] = MappingProxyType(
    {
        name.lower(): value
        for names in (*map(vars, _MODULES), dict(globals()))
        for name, value in names.items()
        if isinstance(value, ConfigConverter)
    }
)
"""All converters, by the names that mapping files have for them."""

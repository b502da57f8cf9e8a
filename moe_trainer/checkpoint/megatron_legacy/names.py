"""Files, shards and groups of a model in Megatron-LM's legacy checkpoints (`--ckpt-format torch`).

A file of a legacy checkpoint holds what one rank had in memory (rank_memory.py): tensors sharded for its
tensor-parallel rank, and an optimizer that identifies parameters by number, in groups of weight decay.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from arguments.mup import DECOUPLED_LR_WEIGHTS, is_lr_scaled, recorded_width_mult
from moe_trainer.checkpoint.errors import CheckpointError

MODEL_FILE = "model_optim_rng.pt"
STATE_FILE = "distrib_optim.pt"
LATENT_DOWN = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
_ROWS = tuple(
    "word_embeddings.weight output_layer.weight output_layer.bias linear_qkv.weight linear_qkv.bias "
    "linear_q_proj.weight linear_q_up_proj.weight linear_kv_up_proj.weight linear_fc1.weight linear_fc1.bias "
    "eh_proj.weight softmax_offset mixer.dt_bias mixer.A_log mixer.D mixer.norm.weight".split()
)
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight", "mixer.out_proj.weight")
_WHOLE = re.compile(
    r"(layernorm|norm)\.(weight|bias)$|(linear_proj|linear_fc2)\.bias$|router\.|position_embeddings\.weight$|gate_weight$|\.indexer\.|latent_proj\."
)


def tp_split(name: str, shape: Sequence[int], record: Mapping[str, Any], count: int) -> tuple[int | None, int]:
    """Return (dimension or None, parts) in which a tensor of a file is sharded over `count` ranks.

    Raises:
        CheckpointError: for an unknown tensor.
    """
    if count == 1:
        return None, 1
    if name.endswith(_COLUMNS):
        return 1, 1
    if name.endswith(_ROWS):
        gated = ".linear_fc1." in name and any(
            record.get(flag) for flag in ("swiglu", "quick_geglu", "gated_linear_unit")
        )
        return 0, 2 if gated else 1
    if named := named_parts(name, record):
        return 0, len(named)
    if _WHOLE.search(name):
        return None, 1
    for end, flags in (
        ("linear_q_down_proj.weight", ("q_lora_rank",)),
        ("linear_kv_down_proj.weight", ("kv_lora_rank", "qk_pos_emb_head_dim")),
    ):
        if name.endswith(end):  # local modules shard it, Transformer Engine's replicate it
            return (None if shape[0] == sum(int(record[flag]) for flag in flags) else 0), 1
    raise CheckpointError(
        f"{name}: how a legacy checkpoint cuts it among {count} tensor-parallel ranks is not known; "
        "save it with --ckpt-format torch_dist"
    )


def named_parts(name: str, record: Mapping[str, Any]) -> dict[str, int]:
    """Return the parts of a tensor that native checkpoints store as one for each, and their sizes; {} for others.

    Raises:
        CheckpointError: if the flags do not give the sizes.
    """
    if ".mixer." not in name:
        return {}
    try:
        head_dim = int(record["mamba_head_dim"])
        heads = int(record.get("mamba_num_heads") or 2 * int(record["hidden_size"]) // head_dim)
        inner, states = heads * head_dim, int(record["mamba_num_groups"]) * int(record["mamba_state_dim"])
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{name}: the recorded flags do not give the sizes of Mamba layers: {error!r}") from error
    channels = {"x": inner, "B": states, "C": states}
    if ".in_proj.weight" in name:
        return {"z": inner, **channels, "dt": heads}
    return channels if ".conv1d." in name else {}


def decays(name: str, ndim: int, record: Mapping[str, Any]) -> bool:
    """Return whether a parameter is in a group with weight decay."""
    if record.get("apply_wd_to_qk_layernorm") and re.search(r"\.[qk]_layernorm\.weight$", name):
        return True
    return ndim > 1 and not name.endswith(".bias")


class ParamGroupKind(NamedTuple):
    """A parameter group: with weight decay, with the rate of --decoupled-lr, with a rate that muP scales."""

    decayed: bool
    decoupled: bool
    scaled: bool = False


def param_group_kind(name: str, ndim: int, record: Mapping[str, Any]) -> ParamGroupKind:
    decoupled = record.get("decoupled_lr") is not None
    scaled = recorded_width_mult(record) != 1.0 and is_lr_scaled(name, ndim, record["optimizer"], decoupled)
    return ParamGroupKind(decays(name, ndim, record), decoupled and name.endswith(DECOUPLED_LR_WEIGHTS), scaled)


def tied_copies(names: Collection[str], record: Mapping[str, Any], pp: int) -> frozenset[str]:
    """Return the names of a model chunk that are copies of a tensor of the first pipeline stage.

    The stage of the MTP layers has the word embeddings too, tied or not; the last stage of a model with tied embeddings
    has them as its output layer.
    """
    tied = not record.get("untie_embeddings_and_output_weights")
    return frozenset(
        name for name in names if pp > 0 and (name.startswith("embedding.") or (tied and name == "output_layer.weight"))
    )

"""How sparse attention reaches the selected keys (--dsa-attention-form): masked or gathered, from shapes alone.

Masked (ops/block_attention.py): heads are computed from all latents, every query is multiplied with all keys it may
see, and unselected keys are masked. Gathered (ops/absorbed_mla.py): a query is multiplied with the latents of its
selected keys. Packed documents are not considered: masked attention skips more than is counted here.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from arguments.mechanisms.formats import FLAGS, quantized_format
from arguments.mechanisms.sublayers import variant_of

if TYPE_CHECKING:
    from arguments.container import Arguments
    from arguments.model import ModelArgs
    from arguments.settings import Settings

GATHER_COST_FACTOR = 384
"""Cost of moving one gathered element (and scattering its gradient), in multiply-adds; shared by the heads of a rank.

On one core (AVX-512, fp32) about 100 fits the measured times of 8 and 32 heads. On a GPU, where it has not been
measured, memory time weighs more against GEMMs: with 384 the estimate (estimate/layer_time.py) finds gathered attention
of DeepSeek-V3.2 faster on an H100 from the length on at which it is chosen, with 128 and with 16 heads per rank. So on
a CPU some sequences are masked that would be faster gathered (docs/records/measured_once.md).
"""


def is_sparse(model: ModelArgs | Settings, length: int) -> bool:
    """Return whether keys are selected at this sequence length: not in warm-up, nor with at most top-k keys."""
    return variant_of(model).selects_keys and not model.dsa_indexer_warmup and model.dsa_indexer_topk < length


# Multiply-adds of forward and backward for one query, one head and one key, with D and E the widths of key and value, R
# and W those of the latent without and with its rotated key: masked 4 D + 3 E for a mean of (S + 1) / 2 keys; gathered
# 4 W + 4 R for `topk` keys, plus GATHER_COST_FACTOR * W / heads. The up-projection costs the same either way: masked,
# it runs on all positions; gathered, on all queries and outputs.


def masked_attention_cost(model: ModelArgs | Settings, length: int) -> float:
    """Return the multiply-adds of one query and head."""
    return (length + 1) / 2 * (4 * (model.qk_head_dim + model.qk_pos_emb_head_dim) + 3 * model.v_head_dim)


def gathered_attention_cost(model: ModelArgs | Settings, heads: int) -> float:
    """Return the multiply-adds of one query and head; `heads` are those of this rank."""
    width = model.kv_lora_rank + model.qk_pos_emb_head_dim
    return model.dsa_indexer_topk * (4 * width + 4 * model.kv_lora_rank + GATHER_COST_FACTOR * width / heads)


GATHER_CONFLICTS = MappingProxyType(
    {
        **dict.fromkeys(
            (flags.name for flags in FLAGS),
            "with latents the up-projection is not a separate GEMM that could be quantized",
        ),
        "attention_dropout": "it draws by blocks of consecutive keys",
        "dsa_indexer_use_sparse_loss": (
            "without it the indexers' loss multiplies every query with all keys of every head"
        ),
    }
)
"""Flags that prevent gathering keys, with the reason."""


def find_gather_conflict(model: ModelArgs | Settings, quantized: str | None) -> str | None:
    """Return a destination of GATHER_CONFLICTS that prevents gathering keys, or None.

    `quantized`: destination of the flag with which linear layers compute in a low precision.
    """
    if quantized:
        return quantized
    if model.attention_dropout:
        return "attention_dropout"
    if model.dsa_indexer_loss_coeff and not model.dsa_indexer_use_sparse_loss:
        return "dsa_indexer_use_sparse_loss"
    return None


def gather_unsupported_reason(model: ModelArgs | Settings, heads: int, length: int, quantized: bool) -> str | None:
    """Return why sparse attention masks keys instead of gathering them; None if it gathers.

    `heads` are those of this rank, `length` is that of the full sequence, `quantized`: linear layers
    compute in a low precision.
    """
    if not is_sparse(model, length):
        return "attention is dense"
    conflict = find_gather_conflict(model, FLAGS[0].name if quantized else None)
    if conflict is not None:
        return GATHER_CONFLICTS[conflict]
    if model.dsa_attention_form != "auto":
        return None if model.dsa_attention_form == "gathered" else "--dsa-attention-form masked"
    if masked_attention_cost(model, length) <= gathered_attention_cost(model, heads):
        return f"{length} positions are too few for gathering to be faster"
    return None


def use_gathered_keys(args: Arguments) -> bool:
    """Return whether sparse attention gathers keys under these flags."""
    heads = args.model.num_attention_heads // args.parallel.tensor_model_parallel_size
    quantized = quantized_format(args.precision) is not None
    return gather_unsupported_reason(args.model, heads, args.data.seq_length, quantized) is None

"""How sparse attention reaches the chosen keys (--dsa-attention-form): masked or gathered, from shapes alone. For the layer and for plans.

Masked (ops/block_attention.py), heads are made of all latents, every query is multiplied with all keys that it may see, and those that are
not chosen are struck out. Gathered (ops/latent_attention.py), a query is multiplied with the latents of its chosen keys. Multiply-adds of
forward and backward for one query, one head and one key, D and E the widths of key and value, R and W of the latent without and with its
rotated key:

    masked      4 D + 3 E           of a mean of (S + 1) / 2 keys
    gathered    4 W + 4 R           of `topk` keys, and MOVING * W / heads of this rank: rows are gathered and their gradients scattered, which
                                    costs memory's time once for all heads

The up-projection costs the same either way: all positions of it are multiplied masked, all queries and outputs gathered.
Documents are not looked at: in a sequence of many short ones masked attention leaves out more than is counted here.

MOVING: on one core (AVX-512, fp32) about 100 tell the measured times of 8 and of 32 heads. On a GPU, where this has not been measured, memory's
time weighs more beside products: with 384 the planner (planner/layer_time.py) finds gathered attention of DeepSeek-V3.2 faster on an H100 from where
on it is taken, with 128 and with 16 heads of a rank. So on a CPU some sequences are masked that were faster gathered
(scripts/bench_results/sparse_keys.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from arguments.sparse_keys import cannot_gather

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.model import ModelArgs
    from arguments.settings import Settings

MOVING = 384


def chooses(model: ModelArgs | Settings, length: int) -> bool:
    """Is attention sparse in a sequence of so many positions? Not in the warm-up, nor where there are no more keys than are chosen."""
    return model.experimental_attention_variant == "dsa" and not model.dsa_indexer_warmup and model.dsa_indexer_topk < length


def masked_cost(model: ModelArgs | Settings, length: int) -> float:
    """Of one query and head, in multiply-adds."""
    return (length + 1) / 2 * (4 * (model.qk_head_dim + model.qk_pos_emb_head_dim) + 3 * model.v_head_dim)


def gathered_cost(model: ModelArgs | Settings, heads: int) -> float:
    """Of one query and head, in multiply-adds. heads: of this rank."""
    width = model.kv_lora_rank + model.qk_pos_emb_head_dim
    return model.dsa_indexer_topk * (4 * width + 4 * model.kv_lora_rank + MOVING * width / heads)


def why_masked(model: ModelArgs | Settings, heads: int, length: int, quantized: bool) -> str | None:
    """Why sparse attention masks; None: it gathers. heads: of this rank; length: of the whole sequence; quantized: see cannot_gather."""
    if not chooses(model, length):
        return "attention is dense"
    problem = cannot_gather(model, quantized)
    if problem is not None:
        return problem[1]
    if model.dsa_attention_form != "auto":
        return None if model.dsa_attention_form == "gathered" else "--dsa-attention-form masked"
    if masked_cost(model, length) <= gathered_cost(model, heads):
        return f"{length} positions are too few for it to pay"
    return None


def gathers(args: Arguments) -> bool:
    """Does the model of a command line gather?"""
    precision, heads = args.precision, args.model.num_attention_heads // args.parallel.tensor_model_parallel_size
    return why_masked(args.model, heads, args.data.seq_length, bool(precision.fp8 or precision.fp4)) is None

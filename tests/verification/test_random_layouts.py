"""Draws cover every kind of attention and experts, and are valid for the trainer."""

import arguments
from arguments.mechanisms.selections import expert_split
from moe_trainer.verification.random_layouts import draw_cases

KINDS = {
    "sparse attention": lambda a: (
        a.model.experimental_attention_variant == "dsa"
        and a.model.dsa_indexer_loss_coeff
        and not a.model.dsa_indexer_warmup
    ),
    "gathered keys": lambda a: (
        a.model.dsa_attention_form == "gathered" and a.model.dsa_indexer_topk < a.data.seq_length
    ),
    "indexer warm-up": lambda a: a.model.dsa_indexer_warmup,
    "more keys chosen than exist": lambda a: (
        a.model.experimental_attention_variant == "dsa" and a.model.dsa_indexer_topk >= a.data.seq_length
    ),
    "gated DeltaNet": lambda a: a.model.experimental_attention_variant == "gdn",
    "latent experts": lambda a: a.moe.moe_latent_size,
    "quantile balancing": lambda a: a.moe.moe_router_load_balancing_type == "quantile_balancing",
    "packed sequences": lambda a: a.packed_capacity,
    "muP": lambda a: a.model.width_mult != 1.0,
    "none of them": lambda a: (
        a.model.experimental_attention_variant is None and expert_split(a.moe) is None and not a.moe.moe_latent_size
    ),
}


def test_every_kind_is_drawn():
    drawn = [arguments.parse_args(list(case.argv), case.world_size) for case in draw_cases(60, 4, seed=0)]
    counts = {name: sum(bool(kind(args)) for args in drawn) for name, kind in KINDS.items()}
    assert all(counts.values()), counts

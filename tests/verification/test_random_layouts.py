"""Draws cover every kind of attention and experts, and are valid for the trainer."""

import random

import arguments
from arguments.container import OPTIONS
from arguments.flag_status import get_flag_status
from arguments.mechanisms.selections import expert_split
from moe_trainer.verification import random_layouts
from moe_trainer.verification.random_layouts import draw_cases, factorizations

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


NOT_DRAWN = set(
    """
    apply_residual_connection_post_layernorm qk_layernorm_all_heads qk_layernorm_after_rope qk_l2_norm
    qk_l2_norm_rope_layers_only squared_relu quick_geglu enable_hyper_connections add_qkv_bias add_attention_output_bias
    add_output_layer_bias attention_value_scale mtp_hybrid_override_pattern moe_apply_probs_on_input
    moe_router_sparsemixer_jitter
    attention_multiplier
    """.split()
)
"""Flags that change the function and that tests of layers and mappings choose, instead of draws or more than these."""


def test_flags_that_change_the_function_are_drawn(monkeypatch):
    """A new one says with which values: flag(..., draws=...). What needs others is drawn by what draws these."""
    drawn = set()
    monkeypatch.setattr(random_layouts, "make_case", lambda _mapping, values, _bf16: drawn.update(values))
    rng, mappings = random.Random(0), list(factorizations(8))
    for _ in range(1500):
        random_layouts.draw(rng, rng.choice(mappings))
    wanted = {
        dest
        for dest, option in OPTIONS.items()
        if option.section in ("model", "moe") and "always" in option.restore and option.role == "model"
        if get_flag_status(dest)[0] == "acts" and set(option.needs) <= {"num_experts", "attention"}
    }
    assert wanted >= NOT_DRAWN and wanted - drawn - NOT_DRAWN == set()

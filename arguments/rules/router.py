"""Which layers have experts, how tokens choose them, and how the choice is balanced."""

from collections.abc import Iterator

from arguments.moe import SELECTING
from arguments.rules.derived_sizes import DerivedSizes, as_list, balancing_types, divides, positive, quotient
from arguments.settings import Limit, Settings, Violation

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none")
MANY_EXPERTS = 32


# Derived values.


def resolve_single_values(s: Settings, _f: DerivedSizes) -> None:
    for dest in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        values = as_list(getattr(s, dest))
        if isinstance(getattr(s, dest), list | tuple) and len(values) == 1:
            _set_keeping_source(s, dest, values[0])


def _set_keeping_source(s: Settings, dest: str, value: object) -> None:
    """Store another form of the value that the user gave, with its source."""
    source = s.source[dest]
    s.set_derived(dest, value, "")
    s.source[dest] = source


def note_router_dtype(s: Settings, f: DerivedSizes) -> None:
    if f.experts and f.experts >= MANY_EXPERTS and s.moe_router_dtype is None:
        s.note(
            f"{s.shown('num_experts')}: with this many experts the router is more stable in fp32 (--moe-router-dtype "
            "fp32); it now computes in the activation type."
        )


def note_no_balancing(s: Settings, f: DerivedSizes) -> None:
    is_even = s.moe_router_force_load_balancing or s.moe_router_topk == f.experts
    chosen = {"sinkhorn", "quantile_balancing", "none"}.intersection(balancing_types(s))
    losses = any(as_list(s.moe_aux_loss_coeff))
    if s.is_eval_only:
        return
    if f.experts and f.experts > 1 and not (losses or chosen or is_even or s.moe_router_enable_expert_bias):
        s.note(
            f"{s.shown('num_experts')}: nothing balances the load of the experts; give --moe-aux-loss-coeff above 0 or "
            "--moe-router-enable-expert-bias (--moe-router-load-balancing-type none: on purpose)."
        )


# Checks.


def check_layer_frequency(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    freq = s.moe_layer_freq
    if f.experts is None:
        return
    if isinstance(freq, list | tuple):
        strange = sorted({str(entry) for entry in freq if entry not in (0, 1)})
        if strange:
            yield s.violation(
                "{moe_layer_freq:flag} holds {entries}; each entry is 0 (dense) or 1 (experts).",
                entries=", ".join(strange),
            )
        if f.layers is not None and len(freq) != f.layers:
            yield s.violation(
                "{moe_layer_freq:flag} describes {count} layers, but {num_layers}; give one entry for each layer.",
                kind="build",
                count=len(freq),
            )
    elif not positive(freq):
        yield s.violation("{moe_layer_freq} must be at least 1 (every N-th layer has experts).")


def check_topk(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts is None:
        return
    if not positive(s.moe_router_topk):
        yield s.violation("{moe_router_topk} must be at least 1.")
    elif s.moe_router_topk > f.experts:
        yield s.violation(
            "{moe_router_topk} is more than {num_experts}: a token cannot choose more experts than there are."
        )


def check_top1_pre_softmax(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if (
        f.experts
        and s.moe_router_topk == 1
        and s.moe_router_score_function == "softmax"
        and not s.moe_router_pre_softmax
        and balancing_types(s) != ["sinkhorn"]
        and s.finermoe_output_granularity is None
    ):
        yield s.violation(
            "{moe_router_topk} with {moe_router_score_function} needs {moe_router_pre_softmax:flag}: softmax over a "
            "single choice is always 1, and the router would not learn."
        )


def check_probs_on_input(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.moe_apply_probs_on_input and s.moe_router_topk != 1:
        yield s.violation(
            "{moe_apply_probs_on_input:flag} needs {moe_router_topk:flag} 1, not {topk}, as in Megatron-LM.",
            topk=s.moe_router_topk,
        )


def check_expert_bias_scores(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    softmax = s.moe_router_score_function == "softmax"
    if f.experts and s.moe_router_enable_expert_bias and softmax and s.moe_router_group_topk:
        yield s.violation(
            "{moe_router_enable_expert_bias} with {moe_router_score_function} cannot be combined with "
            "{moe_router_group_topk}: groups with a bias need sigmoid or sqrtsoftplus."
        )


def check_sparsemixer(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.moe_router_sparsemixer_jitter is not None and s.moe_router_topk != 2:
        yield s.violation(
            "{moe_router_sparsemixer_jitter:flag} needs {moe_router_topk:flag} 2: SparseMixer has two choices."
        )


def limit_sparsemixer(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    """List what chooses or weighs experts in a way that SparseMixer is not defined for."""
    is_on = f.experts is not None and s.moe_router_sparsemixer_jitter is not None
    text = "{moe_router_sparsemixer_jitter:flag} cannot be combined with {:flag}: "
    yield Limit(
        is_on and s.moe_router_score_function != "softmax",
        "{moe_router_sparsemixer_jitter:flag} cannot be combined with {moe_router_score_function}: its weights are "
        "shares of a softmax.",
    )
    for dest in (
        "moe_router_pre_softmax",
        "moe_router_group_topk",
        "moe_router_enable_expert_bias",
        "moe_enable_routing_replay",
        "moe_n_hash_layers",
        "finermoe_intermediate_granularity",
        "finermoe_output_granularity",
    ):
        yield Limit(
            is_on and bool(getattr(s, dest)), text + "its two experts are those of the largest logits.", (dest,)
        )
    yield Limit(
        is_on and s.moe_router_fusion, text + "the kernel computes one softmax of both experts.", ("moe_router_fusion",)
    )
    for kind in SELECTING:
        yield Limit(
            is_on and kind in balancing_types(s),
            "{moe_router_sparsemixer_jitter:flag} cannot be combined with {moe_router_load_balancing_type:flag} "
            f"{kind}, which balances by its choice of experts.",
        )


def check_hash_layers(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts is None or not positive(s.moe_n_hash_layers):
        return
    if f.layers is not None and s.moe_n_hash_layers > f.layers:
        yield s.violation("{moe_n_hash_layers} is more than {num_layers}.")
    if s.moe_router_topk == 1 and s.moe_router_score_function != "softmax":
        yield s.violation(
            "{moe_n_hash_layers} needs {moe_router_topk:flag} of at least 2 with {moe_router_score_function}: the "
            "normalized weight of a single expert is always 1, and the router would not learn."
        )


def limit_hash_routing(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        f.experts is not None and positive(s.moe_n_hash_layers) and s.moe_use_upcycling,
        "{moe_n_hash_layers} cannot be combined with {moe_use_upcycling:flag}: a dense model has no table of experts.",
    )


def check_group_topk(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    topk, groups = s.moe_router_group_topk, s.moe_router_num_groups
    if f.experts is None or topk is None:
        return
    if groups is None:
        yield s.violation(
            "{moe_router_group_topk} needs {moe_router_num_groups:flag}: into how many groups the experts fall."
        )
        return
    if not positive(groups) or not divides(groups, f.experts):
        yield s.violation("{num_experts} must be a multiple of {moe_router_num_groups}: groups are equally large.")
    if not positive(topk) or (positive(groups) and topk > groups):
        yield s.violation("{moe_router_group_topk} must be between 1 and {moe_router_num_groups}.")
        return
    per_group = quotient(f.experts, groups)
    if per_group is not None and positive(s.moe_router_topk) and topk * per_group < s.moe_router_topk <= f.experts:
        yield s.violation(
            "{moe_router_topk} is more than the {available} experts of {moe_router_group_topk} groups with {per_group} "
            "experts each.",
            "moe_router_num_groups",
            available=topk * per_group,
            per_group=per_group,
        )
    scored = s.moe_router_group_score_topk
    if scored is not None and per_group is not None and scored > per_group:
        yield s.violation(
            "{moe_router_group_score_topk} is more than the {per_group} experts of a group.",
            "moe_router_num_groups",
            per_group=per_group,
        )


def check_balancing_lists(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    kinds, coeffs = balancing_types(s), as_list(s.moe_aux_loss_coeff)
    unknown = [kind for kind in kinds if kind not in BALANCING]
    if unknown:
        yield s.violation(
            "{moe_router_load_balancing_type:flag} {unknown}: needs {accepted}.",
            unknown=" ".join(unknown),
            accepted=", ".join(BALANCING),
        )
    if f.experts and len(kinds) != len(coeffs) and (len(kinds) > 1 or len(coeffs) > 1):
        yield s.violation(
            "{moe_router_load_balancing_type} names {count} and {moe_aux_loss_coeff} gives {num_coeffs} values; give "
            "one coefficient for each.",
            count=len(kinds),
            num_coeffs=len(coeffs),
        )


def check_selecting_balancing_alone(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    kinds = balancing_types(s)
    mixed = [kind for kind in SELECTING if kind in kinds]
    if f.experts and mixed and len(kinds) > 1:
        yield s.violation(
            "{moe_router_load_balancing_type}: {balancing} chooses experts by itself and cannot be combined with other "
            "kinds of balancing.",
            balancing=mixed[0],
        )


def check_selecting_balancing_coeff(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    kinds = balancing_types(s)
    selecting = [kind for kind in SELECTING if kind in kinds]
    if f.experts and selecting and any(as_list(s.moe_aux_loss_coeff)):
        yield s.violation(
            "{moe_aux_loss_coeff} must be 0 with {moe_router_load_balancing_type:flag} {balancing}, which balances "
            "without a loss.",
            balancing=selecting[0],
        )


def check_quantile_balancing(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts is None or "quantile_balancing" not in balancing_types(s):
        return
    for dest in ("moe_router_fusion", "moe_router_group_topk"):
        if getattr(s, dest):
            yield s.violation(
                "{moe_router_load_balancing_type:flag} quantile_balancing cannot be combined with {}.", dest
            )
    if positive(s.moe_router_topk) and s.moe_router_topk >= f.experts:
        yield s.violation(
            "{moe_router_load_balancing_type:flag} quantile_balancing needs {moe_router_topk} to be below "
            "{num_experts}: a token's threshold is the best expert that it does not choose."
        )
    elif (
        positive(s.micro_batch_size)
        and positive(s.seq_length)
        and not divides(f.experts, s.micro_batch_size * s.seq_length * s.moe_router_topk)
    ):
        yield s.violation(
            "{moe_router_load_balancing_type:flag} quantile_balancing needs an even share per expert: "
            "{micro_batch_size} times {seq_length} times {moe_router_topk} must be a multiple of {num_experts}."
        )


def check_routing_replay(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.moe_routing_replay_path is not None and not s.moe_enable_routing_replay:
        yield s.violation("{moe_routing_replay_path:flag} needs {moe_enable_routing_replay:flag}.")


def limit_routing_replay(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    is_on = f.experts is not None and s.moe_enable_routing_replay
    for kind in SELECTING:
        yield Limit(
            is_on and kind in balancing_types(s),
            "{moe_enable_routing_replay:flag} cannot be combined with {moe_router_load_balancing_type:flag} "
            f"{kind}, which balances by its choice of experts.",
        )
    granularities = ("finermoe_intermediate_granularity", "finermoe_output_granularity")
    yield Limit(
        is_on and any(getattr(s, dest) is not None for dest in granularities),
        "{moe_enable_routing_replay:flag} cannot be combined with {finermoe_intermediate_granularity:flag} and "
        "{finermoe_output_granularity:flag}: their experts are chosen slice by slice.",
    )
    yield Limit(
        is_on and s.moe_routing_replay_path is not None and s.cuda_graph_impl != "none",
        "{moe_routing_replay_path:flag} cannot be combined with {cuda_graph_impl:flag}: a graph would route every "
        "microbatch as the captured one.",
    )


SCORING = (
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_group_score_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
)
"""How scores become weights and a choice, where sinkhorn does not do both."""


def note_scoring_with_sinkhorn(s: Settings, f: DerivedSizes) -> None:
    ignored = [s.shown(dest) for dest in SCORING if s.given(dest) and getattr(s, dest)]
    if f.experts and "sinkhorn" in balancing_types(s) and ignored:
        s.note(
            f"{', '.join(ignored)}: no effect with {s.flag('moe_router_load_balancing_type')} sinkhorn, which "
            "computes weights and choice of experts differently."
        )


def note_expert_bias_with_quantiles(s: Settings, f: DerivedSizes) -> None:
    if f.experts and s.moe_router_enable_expert_bias and "quantile_balancing" in balancing_types(s):
        s.note(
            f"{s.flag('moe_router_enable_expert_bias')} does not affect the choice of experts with "
            f"{s.flag('moe_router_load_balancing_type')} quantile_balancing, which has another bias."
        )

"""Ours: DeepSeek sparse attention, what it needs and what it is not built for."""

from collections.abc import Iterator

from arguments.rules.facts import Facts, as_list, broken, positive, say
from arguments.settings import Settings, Violation
from arguments.sparse_keys import cannot_gather

VARIANT, WARMUP, COEFF = "experimental_attention_variant", "dsa_indexer_warmup", "dsa_indexer_loss_coeff"
FORM = "dsa_attention_form"
ALLGATHER = ("allgather", "all_gather")
NOT_BUILT = (
    ("qk_clip", "it looks at the logits of all keys, not of the chosen ones"),
    ("log_max_attention_logit", "it looks at the logits of all keys, not of the chosen ones"),
    ("softmax_type", "the loss of the indexers has no place for an attention sink"),
    ("window_size", "the indexers choose the keys"),
    ("linear_attention_freq", "every layer has an indexer"),
    ("cuda_graph_impl", "the loss of the indexers is noted outside of graphs"),
)
FROZEN = (
    ("use_torch_fsdp2", "it shards parameters that do not change"),
    ("use_megatron_fsdp", "it shards parameters that do not change"),
    ("fp8_param_gather", "weights in 8 bits have their values in the optimizer's state, and frozen ones have none"),
)


# Derived and normalised values.


def warmup_chooses_nothing(s: Settings, _f: Facts) -> None:
    """So that the flags of both stages differ in one."""
    if s.dsa_indexer_warmup and s.dsa_indexer_use_sparse_loss:
        s.note(f"{s.flag('dsa_indexer_use_sparse_loss')}: over all keys with {s.flag(WARMUP)}, which chooses none.")
        s.set_derived("dsa_indexer_use_sparse_loss", False, "nothing is chosen in the warm-up")


def indexers_without_a_loss(s: Settings, _f: Facts) -> None:
    if s.experimental_attention_variant == "dsa" and not s.dsa_indexer_loss_coeff and not s.dsa_indexer_warmup:
        s.note(f"{s.flag(COEFF)} is not given: the indexers of sparse attention get no gradient, and choose keys as they are.")


# Checks.


def _not_beside(s: Settings, dest: str, others: tuple[tuple[str, str], ...]) -> Iterator[Violation]:
    for other, why in others:
        if s.values[other] != s.default(other):
            yield broken(s, f"{say(s, dest)} cannot be combined with {say(s, other)}: {why}.", dest, other)


def sparse_attention_fits(s: Settings, f: Facts) -> Iterator[Violation]:
    if s.experimental_attention_variant != "dsa":
        return
    if not s.multi_latent_attention:
        yield broken(s, f"{say(s, VARIANT)} needs --multi-latent-attention.", VARIANT, "multi_latent_attention")
    for dest in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        if s.values[dest] is None:
            yield broken(s, f"{say(s, VARIANT)} needs {s.flag(dest)}.", dest, VARIANT)
    yield from _indexer_heads(s)
    yield from _not_beside(s, VARIANT, NOT_BUILT)
    kinds = as_list(s.cp_comm_type)
    if f.cp > 1 and any(kind not in ALLGATHER for kind in kinds):
        yield broken(
            s, f"{say(s, VARIANT)} with {say(s, 'context_parallel_size')} needs --cp-comm-type allgather in every layer: a query chooses "
            f"among the keys of the whole sequence. It is {' '.join(kinds)}.", "cp_comm_type", VARIANT, "context_parallel_size")


def _indexer_heads(s: Settings) -> Iterator[Violation]:
    width = s.dsa_indexer_head_dim
    if not positive(width):
        return
    if s.dsa_indexer_rotate_activation and width & (width - 1):
        yield broken(
            s, f"{say(s, 'dsa_indexer_head_dim')} must be a power of two for the Hadamard rotation, or add "
            "--no-dsa-indexer-rotate-activation.", "dsa_indexer_head_dim", "dsa_indexer_rotate_activation")
    if positive(s.qk_pos_emb_head_dim) and width < s.qk_pos_emb_head_dim:
        yield broken(
            s, f"{say(s, 'dsa_indexer_head_dim')} must be at least {say(s, 'qk_pos_emb_head_dim')}: so many channels of the indexer are "
            "rotated by position.", "dsa_indexer_head_dim", "qk_pos_emb_head_dim")


def gathering_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.dsa_attention_form != "gathered" or s.experimental_attention_variant != "dsa" or s.dsa_indexer_warmup:
        return
    problem = cannot_gather(s, bool(s.fp8 or s.fp4))
    if problem is None:
        return
    dest, why = problem
    if dest == "dsa_indexer_use_sparse_loss":
        yield broken(s, f"{say(s, FORM)} with {say(s, COEFF)} needs {s.flag(dest)}: {why}.", FORM, COEFF, dest)
        return
    dest = "fp4" if dest == "fp8" and not s.fp8 else dest
    yield broken(s, f"{say(s, FORM)} cannot be combined with {say(s, dest)}: {why}.", FORM, dest)


def warmup_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.dsa_indexer_warmup:
        return
    if s.experimental_attention_variant != "dsa":
        yield broken(s, f"{s.flag(WARMUP)} needs --experimental-attention-variant dsa: it trains indexers.", WARMUP, VARIANT)
    if not s.dsa_indexer_loss_coeff:
        yield broken(s, f"{s.flag(WARMUP)} needs {s.flag(COEFF)} above 0: the indexers' loss is all that it trains by.", WARMUP, COEFF)
    yield from _not_beside(s, WARMUP, FROZEN)


RESOLVE = (warmup_chooses_nothing, indexers_without_a_loss)
CHECKS = (sparse_attention_fits, gathering_fits, warmup_fits)

"""Ours: DeepSeek sparse attention, what it needs and what it is not built for."""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes, as_list, positive
from arguments.settings import Settings, Violation
from arguments.sparse_attention import find_gather_conflict

VARIANT, WARMUP, COEFF = "experimental_attention_variant", "dsa_indexer_warmup", "dsa_indexer_loss_coeff"
FORM = "dsa_attention_form"
ALLGATHER = ("allgather", "all_gather")
NOT_BUILT = (
    ("qk_clip", "it reads the logits of all keys, not of the selected ones"),
    ("log_max_attention_logit", "it reads the logits of all keys, not of the selected ones"),
    ("softmax_type", "the loss of the indexers has no place for an attention sink"),
    ("window_size", "the indexers select the keys"),
    ("linear_attention_freq", "every layer has an indexer"),
    ("cuda_graph_impl", "the loss of the indexers is recorded outside of graphs"),
)
FROZEN = (
    ("use_torch_fsdp2", "it shards parameters that do not change"),
    ("use_megatron_fsdp", "it shards parameters that do not change"),
    ("fp8_param_gather", "fp8 weights have their values in the optimizer's state, and frozen ones have none"),
    ("fp4_param_gather", "fp4 weights have their values in the optimizer's state, and frozen ones have none"),
)


# Derived values.


def resolve_warmup(s: Settings, _f: DerivedSizes) -> None:
    """Turn the sparse loss off in warm-up, so that the flags of both stages differ in one."""
    if s.dsa_indexer_warmup and s.dsa_indexer_use_sparse_loss:
        s.note(
            f"{s.flag('dsa_indexer_use_sparse_loss')}: the loss is over all keys with {s.flag(WARMUP)}, which selects "
            "none."
        )
        s.set_derived("dsa_indexer_use_sparse_loss", False, "no keys are selected in the warm-up")


def note_indexers_without_loss(s: Settings, _f: DerivedSizes) -> None:
    if s.experimental_attention_variant == "dsa" and not s.dsa_indexer_loss_coeff and not s.dsa_indexer_warmup:
        s.note(f"{s.flag(COEFF)} is not given: the indexers of sparse attention get no gradient and do not learn.")


# Checks.


def _check_conflicts(s: Settings, dest: str, others: tuple[tuple[str, str], ...]) -> Iterator[Violation]:
    for other, why in others:
        if s.values[other] != s.default(other):
            yield s.violation("{} cannot be combined with {}: {why}.", dest, other, why=why)


def check_sparse_attention(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if s.experimental_attention_variant != "dsa":
        return
    if not s.multi_latent_attention:
        yield s.violation("{experimental_attention_variant} needs {multi_latent_attention:flag}.")
    for dest in ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"):
        if s.values[dest] is None:
            yield s.violation("{experimental_attention_variant} needs {:flag}.", dest)
    yield from _check_indexer_heads(s)
    yield from _check_conflicts(s, VARIANT, NOT_BUILT)
    kinds = as_list(s.cp_comm_type)
    if f.cp > 1 and any(kind not in ALLGATHER for kind in kinds):
        yield s.violation(
            "{experimental_attention_variant} with {context_parallel_size} needs {cp_comm_type:flag} allgather in "
            "every layer: a query selects among the keys of the full sequence, not {XX0}.",
            XX0=" ".join(kinds),
        )


def _check_indexer_heads(s: Settings) -> Iterator[Violation]:
    width = s.dsa_indexer_head_dim
    if not positive(width):
        return
    if s.dsa_indexer_rotate_activation and width & (width - 1):
        yield s.violation(
            "{dsa_indexer_head_dim} must be a power of two for the Hadamard rotation, or add "
            "{dsa_indexer_rotate_activation:flag}."
        )
    if positive(s.qk_pos_emb_head_dim) and width < s.qk_pos_emb_head_dim:
        yield s.violation(
            "{dsa_indexer_head_dim} must be at least {qk_pos_emb_head_dim}: that many channels of the indexer are "
            "rotated by position."
        )


def check_gathered_keys(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.dsa_attention_form != "gathered" or s.experimental_attention_variant != "dsa" or s.dsa_indexer_warmup:
        return
    problem = find_gather_conflict(s, bool(s.fp8 or s.fp4))
    if problem is None:
        return
    dest, why = problem
    if dest == "dsa_indexer_use_sparse_loss":
        yield s.violation("{dsa_attention_form} with {dsa_indexer_loss_coeff} needs {:flag}: {why}.", dest, why=why)
        return
    dest = "fp4" if dest == "fp8" and not s.fp8 else dest
    yield s.violation("{dsa_attention_form} cannot be combined with {}: {why}.", dest, why=why)


def check_warmup(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.dsa_indexer_warmup:
        return
    if s.experimental_attention_variant != "dsa":
        yield s.violation("{dsa_indexer_warmup} needs {experimental_attention_variant:flag} dsa: it trains indexers.")
    if not s.dsa_indexer_loss_coeff:
        yield s.violation(
            "{dsa_indexer_warmup} needs {dsa_indexer_loss_coeff:flag} above 0: it trains with the indexers' loss only."
        )
    yield from _check_conflicts(s, WARMUP, FROZEN)

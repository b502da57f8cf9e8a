"""Ours: DeepSeek sparse attention, what it needs and what it is not built for."""

from collections.abc import Iterator

from arguments.mechanisms.formats import FLAGS, quantized_format
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS
from arguments.mechanisms.sublayers import SPARSE_ATTENTION, VARIANT, variant_of
from arguments.mechanisms.support import rejected_flags
from arguments.rules.derived_sizes import DerivedSizes, as_list, positive
from arguments.settings import Limit, Settings, Violation
from arguments.sparse_attention import GATHER_CONFLICTS, find_gather_conflict

WARMUP, COEFF = "dsa_indexer_warmup", "dsa_indexer_loss_coeff"
FORM = "dsa_attention_form"
INDEXER_FLAGS = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
ALLGATHER = ("allgather", "all_gather")
FROZEN = (
    *rejected_flags(SHARDINGS, ShardingCapability.FROZEN),
    *tuple(
        (
            flags.param_gather,
            f"{flags.name} weights have their values in the optimizer's state, and frozen ones have none",
        )
        for flags in FLAGS
    ),
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
    if variant_of(s).selects_keys and not s.dsa_indexer_loss_coeff and not s.dsa_indexer_warmup:
        s.note(f"{s.flag(COEFF)} is not given: the indexers of sparse attention get no gradient and do not learn.")


# Checks.


def check_sparse_attention(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not variant_of(s).selects_keys:
        return
    if not s.multi_latent_attention:
        yield s.violation(f"{{{VARIANT}}} needs {{multi_latent_attention:flag}}.")
    for dest in INDEXER_FLAGS:
        if s.values[dest] is None:
            yield s.violation(f"{{{VARIANT}}} needs {{:flag}}.", dest)
    yield from find_indexer_violations(s)


def limit_sparse_attention(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        variant_of(s).selects_keys
        and f.largest_cp > 1
        and any(kind not in ALLGATHER for kind in as_list(s.cp_comm_type)),
        f"{SPARSE_ATTENTION.mention} with {{context_parallel_size}} needs {{cp_comm_type:flag}} allgather in every "
        "layer: a query selects among the keys of the full sequence.",
    )


def find_indexer_violations(s: Settings) -> Iterator[Violation]:
    """Yield what is wrong with the width of indexer heads, of any variant that has indexers."""
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


def limit_gathered_keys(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    is_gathered = s.dsa_attention_form == "gathered" and variant_of(s).selects_keys
    fmt = quantized_format(s)
    conflict = (
        find_gather_conflict(s, fmt.flags.name if fmt else None) if is_gathered and not s.dsa_indexer_warmup else None
    )
    form = "{dsa_attention_form:flag} gathered"
    for dest, why in GATHER_CONFLICTS.items():
        if dest == "dsa_indexer_use_sparse_loss":
            message = f"{form} with {{dsa_indexer_loss_coeff}} needs {{:flag}}: {why}."
        else:
            message = f"{form} cannot be combined with {{}}: {why}."
        yield Limit(conflict == dest, message, (dest,))


def check_warmup(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.dsa_indexer_warmup:
        return
    if not variant_of(s).selects_keys:
        yield s.violation(f"{{dsa_indexer_warmup}} needs {SPARSE_ATTENTION.mention}: it trains indexers.")
    if not s.dsa_indexer_loss_coeff:
        yield s.violation(
            "{dsa_indexer_warmup} needs {dsa_indexer_loss_coeff:flag} above 0: it trains with the indexers' loss only."
        )


def limit_warmup(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for other, why in FROZEN:
        applies = s.dsa_indexer_warmup and s.values[other] != s.default(other)
        yield Limit(applies, f"{{{WARMUP}}} cannot be combined with {{}}: {why}.", (other,))

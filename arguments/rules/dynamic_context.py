"""Dynamic context parallelism (--dynamic-context-parallel).

The rules follow Megatron-LM's dev branch (commit d48bd6be0a: validate_args, ModelParallelConfig, parallel_state), where
--hybrid-context-parallel is a deprecated spelling; its own rule about pipelines is that of the main branch (commit
d98e8a64, validate_args).
"""

from collections.abc import Iterator

from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS
from arguments.mechanisms.support import rejected_flags
from arguments.parallel import dynamic_cp_sizes
from arguments.rules.derived_sizes import DerivedSizes, as_list, positive
from arguments.settings import Limit, Settings, Violation

DYNAMIC, SCHEDULER = "dynamic_context_parallel", "default_dynamic_cp"


# Derived values.


def resolve_hybrid_spelling(s: Settings, _f: DerivedSizes) -> None:
    if s.hybrid_context_parallel and not s.dynamic_context_parallel:
        s.set_derived(DYNAMIC, True, f"with {s.flag('hybrid_context_parallel')}")
        s.note(f"{s.flag('hybrid_context_parallel')} is the deprecated spelling of {s.flag(DYNAMIC)}.")


def resolve_dynamic_scheduler(s: Settings, _f: DerivedSizes) -> None:
    if s.dynamic_context_parallel and s.sequence_packing_scheduler is None:
        s.set_derived("sequence_packing_scheduler", SCHEDULER, f"with {s.flag(DYNAMIC)}")


# Checks.


def check_one_spelling(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.hybrid_context_parallel and s.given(DYNAMIC):
        yield s.violation("{hybrid_context_parallel} and {dynamic_context_parallel}: give the second one only.")


def check_hybrid_pipeline(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if s.hybrid_context_parallel and f.pp > 1:
        yield s.violation(
            "{hybrid_context_parallel} does not support {pipeline_model_parallel_size}: use "
            "{dynamic_context_parallel:flag}."
        )


def check_dynamic_scheduler(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.dynamic_context_parallel and s.sequence_packing_scheduler != SCHEDULER:
        yield s.violation(
            f"{{dynamic_context_parallel:flag}} needs {{sequence_packing_scheduler:flag}} {SCHEDULER}, not "
            "{sequence_packing_scheduler:value}."
        )
    elif s.sequence_packing_scheduler == SCHEDULER and not s.dynamic_context_parallel:
        yield s.violation("{sequence_packing_scheduler} needs {dynamic_context_parallel:flag}.")


def check_dynamic_requirements(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.dynamic_context_parallel:
        return
    if not s.calculate_per_token_loss:
        yield s.violation(
            "{dynamic_context_parallel:flag} needs {calculate_per_token_loss:flag}: groups have different numbers of "
            "tokens."
        )
    not_supported = (dest for dest, _ in rejected_flags(SHARDINGS, ShardingCapability.DYNAMIC_CONTEXT))
    for dest in (*not_supported, "varlen_sbhd_validation"):
        if getattr(s, dest):
            yield s.violation("{dynamic_context_parallel:flag} does not support {}.", dest)
    if s.cuda_graph_impl != "none":
        yield s.violation("{dynamic_context_parallel:flag} does not support {cuda_graph_impl}: groups change.")
    if s.dataloader_type not in (None, "single"):
        yield s.violation("{dynamic_context_parallel:flag} needs {dataloader_type:flag} single.")


def check_dynamic_sizes(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not s.dynamic_context_parallel or f.dp is None:
        return
    ranks = f.dp * f.cp
    if ranks % 2:
        yield s.violation(
            "{dynamic_context_parallel:flag} needs an even number of data- and context-parallel ranks, not {ranks} "
            "({dp} data-parallel, {context_parallel_size}).",
            ranks=ranks,
            dp=f.dp,
        )
    smallest = s.min_dynamic_context_parallel_size
    if positive(smallest) and smallest > ranks:
        yield s.violation(
            "{min_dynamic_context_parallel_size} exceeds the {ranks} data- and context-parallel ranks ({dp} "
            "data-parallel, {context_parallel_size}).",
            ranks=ranks,
            dp=f.dp,
        )
    elif positive(smallest) and smallest not in (sizes := dynamic_cp_sizes(ranks, 1)):
        yield s.violation(
            "{min_dynamic_context_parallel_size} is no size of a group: {ranks} data- and context-parallel ranks have "
            "groups of {sizes}.",
            ranks=ranks,
            sizes=", ".join(map(str, sizes)),
        )


# Limits.


def limit_dynamic_groups(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.dynamic_context_parallel and "a2a+p2p" in as_list(s.cp_comm_type),
        "{cp_comm_type:flag} a2a+p2p is not implemented with {dynamic_context_parallel:flag}: its two levels have "
        "fixed sizes.",
        kind="later",
    )

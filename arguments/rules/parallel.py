"""How ranks are divided among tensor, sequence, context, expert and data parallelism."""

import math
from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes, as_list, divides, positive
from arguments.settings import Settings, Violation

CP_COMM_TYPES = ("p2p", "a2a", "allgather", "all_gather", "a2a+p2p")
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
)


# Derived values.


def resolve_expert_tensor_parallel_size(s: Settings, f: DerivedSizes) -> None:
    if s.expert_tensor_parallel_size is None:
        s.set_derived("expert_tensor_parallel_size", f.tp, "as --tensor-model-parallel-size")


def resolve_sequence_parallel(s: Settings, f: DerivedSizes) -> None:
    if s.sequence_parallel and f.tp == 1:
        s.note(f"{s.flag('sequence_parallel')} is off: it splits tokens over tensor ranks, and there is one.")
        s.set_derived("sequence_parallel", False, "no tensor parallelism")


def resolve_microbatch_group_size(s: Settings, f: DerivedSizes) -> None:
    if s.microbatch_group_size_per_vp_stage is None:
        s.set_derived("microbatch_group_size_per_vp_stage", f.pp, "as --pipeline-model-parallel-size")


def resolve_fake_process_group(s: Settings, _f: DerivedSizes) -> None:
    if s.fake_process_group:
        s.note(f"{s.flag('fake_process_group')}: the NaN check and the gloo groups are off.")
        s.set_derived("check_for_nan_in_loss_and_grad", False, "fake process group")
        s.set_derived("use_gloo_process_groups", False, "fake process group")


# Checks.


def check_positive_sizes(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in SIZES:
        value = getattr(s, dest)
        if value is not None and not positive(value):
            yield s.violation("{} must be at least 1.", dest)


def check_world_size(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    size = f.tp * f.pp * f.cp
    if f.world is not None and f.world % size:
        yield s.violation(
            "{world} ranks cannot be divided into model replicas of {size} ranks ({tensor_model_parallel_size} * "
            "{pipeline_model_parallel_size} * {context_parallel_size}); use a multiple of {size} ranks.",
            world=f.world,
            size=size,
        )


def check_expert_world_size(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    size, model_size = f.etp * f.ep * f.pp, f.tp * f.pp * f.cp
    if f.world is None or (f.world % model_size and model_size % size == 0):
        return  # unknown, or the same mismatch that the dense replicas report
    if f.world % size:
        yield s.violation(
            "{world} ranks must be a multiple of {size}, the ranks that hold all experts once "
            "({expert_tensor_parallel_size} * {expert_model_parallel_size} * {pipeline_model_parallel_size}).",
            kind="build",
            world=f.world,
            size=size,
        )


def check_ep_needs_experts(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.ep > 1 and f.experts is None:
        yield s.violation(
            "{expert_model_parallel_size} needs {num_experts:flag}: a dense model has no experts to shard."
        )


def check_experts_per_rank(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not divides(f.ep, f.experts):
        yield s.violation(
            "{num_experts} must be a multiple of {expert_model_parallel_size}: every expert rank holds the same number "
            "of experts."
        )


def check_tp_overlap(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if s.tp_comm_overlap and f.tp > 1 and not s.sequence_parallel:
        yield s.violation(
            "{tp_comm_overlap} needs {sequence_parallel:flag}: it overlaps the gathers and scatters that only sequence "
            "parallelism has."
        )


def check_heads_per_tp_rank(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not divides(f.tp, s.num_attention_heads):
        yield s.violation(
            "{num_attention_heads} must be a multiple of {tensor_model_parallel_size}: heads are sharded over tensor "
            "ranks."
        )


def check_query_groups_per_tp_rank(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    groups = s.num_query_groups
    if s.group_query_attention and positive(groups) and groups % f.tp and f.tp % groups:
        yield s.violation(
            "{num_query_groups} must be a multiple or a divisor of {tensor_model_parallel_size}: groups are sharded "
            "over tensor ranks, or several ranks share one."
        )


def check_sequence_per_cp_rank(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.cp > 1 and not divides(2 * f.cp, s.seq_length):
        yield s.violation(
            "{seq_length} must be a multiple of {num_chunks} (twice {context_parallel_size}): each context rank takes "
            "one chunk from the front and one from the back of a sequence.",
            num_chunks=2 * f.cp,
        )


def check_sequence_per_tp_rank(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    even_pieces = f.cp == 1 or divides(2 * f.cp, s.seq_length)
    if not (s.sequence_parallel or f.experts) or f.tp == 1 or not even_pieces or divides(f.tp * f.cp, s.seq_length):
        return
    cause = "sequence_parallel" if s.sequence_parallel else "num_experts"
    yield s.violation(
        "{seq_length} must be a multiple of {ranks} ({tensor_model_parallel_size} * {context_parallel_size}) with "
        "{:flag}: tokens are sharded evenly.",
        cause,
        ranks=f.tp * f.cp,
    )


def check_cp_comm_type(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    kinds = as_list(s.cp_comm_type)
    unknown = [kind for kind in kinds if kind not in CP_COMM_TYPES]
    if unknown:
        yield s.violation(
            "{cp_comm_type:flag} {unknown}: needs {known}.", unknown=" ".join(unknown), known=", ".join(CP_COMM_TYPES)
        )
    if f.cp > 1 and len(kinds) > 1 and f.layers is not None and len(kinds) != f.layers:
        yield s.violation(
            "{cp_comm_type:flag} has {count} values; give one for all layers or one for each of the {layers} layers.",
            "num_layers",
            count=len(kinds),
            layers=f.layers,
        )
    if "a2a+p2p" in kinds and not s.hierarchical_context_parallel_sizes:
        yield s.violation(
            "{cp_comm_type:flag} a2a+p2p needs {hierarchical_context_parallel_sizes:flag}: the sizes of its two "
            "levels, whose product is --context-parallel-size."
        )


def check_hierarchical_cp_product(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    sizes = as_list(s.hierarchical_context_parallel_sizes)
    if sizes and math.prod(sizes) != f.cp:
        yield s.violation(
            "{hierarchical_context_parallel_sizes} multiplies to {product}, which must be {context_parallel_size}.",
            product=math.prod(sizes),
        )


def check_hierarchical_cp_levels(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    sizes = as_list(s.hierarchical_context_parallel_sizes)
    if sizes and math.prod(sizes) == f.cp and len(sizes) != 2:
        yield s.violation(
            "{hierarchical_context_parallel_sizes} gives {count} sizes; a2a+p2p has two levels: ranks that exchange "
            "heads, and how many such groups form the ring.",
            count=len(sizes),
        )


def check_heads_per_cp_rank(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    """Check head counts for a2a, which shards the heads of a tensor rank over context ranks."""
    levels = as_list(s.hierarchical_context_parallel_sizes)
    kinds = as_list(s.cp_comm_type)
    ranks = f.largest_cp if "a2a" in kinds else levels[0] if "a2a+p2p" in kinds and levels else 1
    if f.largest_cp == 1 or ranks < 2 or not positive(s.num_attention_heads):
        return
    counts = {"num_attention_heads": s.num_attention_heads}
    if s.group_query_attention and positive(s.num_query_groups) and not s.multi_latent_attention:
        counts["num_query_groups"] = max(s.num_query_groups, f.tp)
        if positive(s.window_num_query_groups):
            counts["window_num_query_groups"] = max(s.window_num_query_groups, f.tp)
    for dest, count in counts.items():
        if count % f.tp == 0 and count // f.tp % ranks:
            yield s.violation(
                "{} must be a multiple of {size} ({tensor_model_parallel_size} * {ranks} context ranks) with "
                "{cp_comm_type}: these ranks exchange heads for positions; use p2p or allgather.",
                dest,
                size=f.tp * ranks,
                ranks=ranks,
            )


def check_dp_last_mapping(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if s.use_tp_pp_dp_mapping and f.pp > 1 and None not in (f.dp, f.edp) and f.dp != f.edp:
        yield s.violation(
            "{use_tp_pp_dp_mapping} with {pipeline_model_parallel_size} needs as many data ranks as expert-data ranks, "
            "but they are {dp} and {edp}: otherwise both grids disagree on the pipeline groups.",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            dp=f.dp,
            edp=f.edp,
        )


def check_optimizer_instances_conflict(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    shards = [d for d in ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")]
    sharded = [d for d in shards if positive(getattr(s, d)) and getattr(s, d) > 1]
    if sharded and positive(s.num_distributed_optimizer_instances) and s.num_distributed_optimizer_instances > 1:
        yield s.violation(
            "{num_distributed_optimizer_instances} cannot be combined with {}; use one of them.", sharded[0]
        )


def check_optimizer_instances(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    ranks = None if f.dp is None else f.dp * f.cp
    # an instance holds the state of all experts too, so it must not be cut apart by expert parallelism
    for kind, count in (("data-parallel", ranks), ("expert-data-parallel", None if f.experts is None else f.edp)):
        if not divides(s.num_distributed_optimizer_instances, count):
            yield s.violation(
                "{num_distributed_optimizer_instances} must divide the {count} {axis} ranks.", count=count, axis=kind
            )
            return

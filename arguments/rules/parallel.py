"""Rules 1-20: how ranks are divided among tensor, sequence, context, expert and data parallelism."""

import math
from collections.abc import Iterator

from arguments.rules.facts import Facts, as_list, broken, divides, positive, say
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


# Derived and normalised values.


def expert_tensor_size(s: Settings, f: Facts) -> None:
    if s.expert_tensor_parallel_size is None:
        s.set_derived("expert_tensor_parallel_size", f.tp, "as --tensor-model-parallel-size")


def sequence_parallel_needs_tensor_ranks(s: Settings, f: Facts) -> None:
    if s.sequence_parallel and f.tp == 1:
        s.note(f"{s.flag('sequence_parallel')} is off: it splits tokens over tensor ranks, and there is one.")
        s.set_derived("sequence_parallel", False, "no tensor parallelism")


def microbatch_group_size(s: Settings, f: Facts) -> None:
    if s.microbatch_group_size_per_vp_stage is None:
        s.set_derived("microbatch_group_size_per_vp_stage", f.pp, "as --pipeline-model-parallel-size")


def fake_process_group(s: Settings, _f: Facts) -> None:
    if s.fake_process_group:
        s.note(f"{s.flag('fake_process_group')}: the NaN check and the gloo groups are off.")
        s.set_derived("check_for_nan_in_loss_and_grad", False, "fake process group")
        s.set_derived("use_gloo_process_groups", False, "fake process group")


# Checks.


def sizes_are_positive(s: Settings, _f: Facts) -> Iterator[Violation]:
    for dest in SIZES:
        value = getattr(s, dest)
        if value is not None and not positive(value):
            yield broken(s, f"{say(s, dest)} must be at least 1.", dest)


def world_divides(s: Settings, f: Facts) -> Iterator[Violation]:
    size = f.tp * f.pp * f.cp
    if f.world is not None and f.world % size:
        yield broken(
            s,
            f"{f.world} ranks cannot be divided into model replicas of {size} ranks "
            f"({say(s, 'tensor_model_parallel_size')} * {say(s, 'pipeline_model_parallel_size')} * "
            f"{say(s, 'context_parallel_size')}); use a multiple of {size} ranks.",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )


def expert_world_divides(s: Settings, f: Facts) -> Iterator[Violation]:
    size, model_size = f.etp * f.ep * f.pp, f.tp * f.pp * f.cp
    if f.world is None or (f.world % model_size and model_size % size == 0):
        return  # unknown, or the same mismatch that the dense replicas report
    if f.world % size:
        yield broken(
            s,
            f"{f.world} ranks cannot be divided into expert replicas of {size} ranks "
            f"({say(s, 'expert_tensor_parallel_size')} * {say(s, 'expert_model_parallel_size')} * "
            f"{say(s, 'pipeline_model_parallel_size')}); use a multiple of {size} ranks.",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "pipeline_model_parallel_size",
            kind="build",
        )


def expert_ranks_need_experts(s: Settings, f: Facts) -> Iterator[Violation]:
    if f.ep > 1 and f.experts is None:
        yield broken(
            s,
            f"{say(s, 'expert_model_parallel_size')} needs --num-experts: a dense model has no experts to spread.",
            "expert_model_parallel_size",
            "num_experts",
        )


def experts_divide_over_ranks(s: Settings, f: Facts) -> Iterator[Violation]:
    if not divides(f.ep, f.experts):
        yield broken(
            s,
            f"{say(s, 'num_experts')} must be a multiple of {say(s, 'expert_model_parallel_size')}: every expert rank "
            "holds the same number of experts.",
            "num_experts",
            "expert_model_parallel_size",
        )


def tp_overlap_needs_sequence_parallel(s: Settings, f: Facts) -> Iterator[Violation]:
    if s.tp_comm_overlap and f.tp > 1 and not s.sequence_parallel:
        yield broken(
            s,
            f"{s.flag('tp_comm_overlap')} needs --sequence-parallel: it hides the gathers and scatters that only "
            "sequence parallelism has.",
            "tp_comm_overlap",
            "sequence_parallel",
        )


def heads_divide_over_tensor_ranks(s: Settings, f: Facts) -> Iterator[Violation]:
    if not divides(f.tp, s.num_attention_heads):
        yield broken(
            s,
            f"{say(s, 'num_attention_heads')} must be a multiple of {say(s, 'tensor_model_parallel_size')}: heads are "
            "dealt out to tensor ranks.",
            "num_attention_heads",
            "tensor_model_parallel_size",
        )


def query_groups_fit_tensor_ranks(s: Settings, f: Facts) -> Iterator[Violation]:
    groups = s.num_query_groups
    if s.group_query_attention and positive(groups) and groups % f.tp and f.tp % groups:
        yield broken(
            s,
            f"{say(s, 'num_query_groups')} must be a multiple or a divisor of {say(s, 'tensor_model_parallel_size')}: "
            "groups are dealt out to tensor ranks, or whole ranks share one.",
            "num_query_groups",
            "tensor_model_parallel_size",
        )


def sequence_divides_over_context_ranks(s: Settings, f: Facts) -> Iterator[Violation]:
    if f.cp > 1 and not divides(2 * f.cp, s.seq_length):
        yield broken(
            s,
            f"{say(s, 'seq_length')} must be a multiple of {2 * f.cp} (twice {say(s, 'context_parallel_size')}): each "
            "context rank takes one piece from the front and one from the back of a sequence.",
            "seq_length",
            "context_parallel_size",
        )


def sequence_divides_over_tensor_ranks(s: Settings, f: Facts) -> Iterator[Violation]:
    even_pieces = f.cp == 1 or divides(2 * f.cp, s.seq_length)
    if not (s.sequence_parallel or f.experts) or f.tp == 1 or not even_pieces or divides(f.tp * f.cp, s.seq_length):
        return
    cause = "sequence_parallel" if s.sequence_parallel else "num_experts"
    yield broken(
        s,
        f"{say(s, 'seq_length')} must be a multiple of {f.tp * f.cp} ({say(s, 'tensor_model_parallel_size')} * "
        f"{say(s, 'context_parallel_size')}) with {s.flag(cause)}: tokens are dealt out evenly.",
        "seq_length",
        "tensor_model_parallel_size",
        cause,
    )


def cp_comm_type_fits(s: Settings, f: Facts) -> Iterator[Violation]:
    kinds = as_list(s.cp_comm_type)
    unknown = [kind for kind in kinds if kind not in CP_COMM_TYPES]
    if unknown:
        yield broken(
            s, f"{s.flag('cp_comm_type')} {' '.join(unknown)}: needs {', '.join(CP_COMM_TYPES)}.", "cp_comm_type"
        )
    if f.cp > 1 and len(kinds) > 1 and f.layers is not None and len(kinds) != f.layers:
        yield broken(
            s,
            f"{s.flag('cp_comm_type')} has {len(kinds)} values; give one for all layers or one for each of the "
            f"{f.layers} layers.",
            "cp_comm_type",
            "num_layers",
        )
    if "a2a+p2p" in kinds and not s.hierarchical_context_parallel_sizes:
        yield broken(
            s,
            f"{s.flag('cp_comm_type')} a2a+p2p needs --hierarchical-context-parallel-sizes: the sizes of its two "
            "levels, whose product is --context-parallel-size.",
            "cp_comm_type",
            "hierarchical_context_parallel_sizes",
        )


def hierarchical_sizes_multiply_to_context(s: Settings, f: Facts) -> Iterator[Violation]:
    sizes = as_list(s.hierarchical_context_parallel_sizes)
    if sizes and math.prod(sizes) != f.cp:
        yield broken(
            s,
            f"{say(s, 'hierarchical_context_parallel_sizes')} multiplies to {math.prod(sizes)}, which must be "
            f"{say(s, 'context_parallel_size')}.",
            "hierarchical_context_parallel_sizes",
            "context_parallel_size",
        )


def hierarchical_sizes_are_two(s: Settings, f: Facts) -> Iterator[Violation]:
    sizes = as_list(s.hierarchical_context_parallel_sizes)
    if sizes and math.prod(sizes) == f.cp and len(sizes) != 2:
        yield broken(
            s,
            f"{say(s, 'hierarchical_context_parallel_sizes')} gives {len(sizes)} sizes; a2a+p2p has two levels: ranks that "
            "exchange heads, and how many such groups form the ring.",
            "hierarchical_context_parallel_sizes",
        )


def heads_divide_over_context_ranks(s: Settings, f: Facts) -> Iterator[Violation]:
    """Kinds with a2a deal the heads of a tensor rank out to context ranks."""
    levels = as_list(s.hierarchical_context_parallel_sizes)
    kinds = as_list(s.cp_comm_type)
    ranks = f.cp if "a2a" in kinds else levels[0] if "a2a+p2p" in kinds and levels else 1
    if f.cp == 1 or ranks < 2 or not positive(s.num_attention_heads):
        return
    counts = {"num_attention_heads": s.num_attention_heads}
    if s.group_query_attention and positive(s.num_query_groups) and not s.multi_latent_attention:
        counts["num_query_groups"] = max(s.num_query_groups, f.tp)
    for dest, count in counts.items():
        if count % f.tp == 0 and count // f.tp % ranks:
            yield broken(
                s,
                f"{say(s, dest)} must be a multiple of {f.tp * ranks} ({say(s, 'tensor_model_parallel_size')} * {ranks} context "
                f"ranks) with {say(s, 'cp_comm_type')}: these ranks exchange heads for positions; use p2p or allgather.",
                dest,
                "cp_comm_type",
            )


def dp_last_mapping_needs_equal_grids(s: Settings, f: Facts) -> Iterator[Violation]:
    if s.use_tp_pp_dp_mapping and f.pp > 1 and None not in (f.dp, f.edp) and f.dp != f.edp:
        yield broken(
            s,
            f"{s.flag('use_tp_pp_dp_mapping')} with {say(s, 'pipeline_model_parallel_size')} needs as many data ranks "
            f"as expert-data ranks, but they are {f.dp} and {f.edp}: otherwise both grids disagree on the pipeline "
            "groups.",
            "use_tp_pp_dp_mapping",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )


def optimizer_instances_exclude_weight_shards(s: Settings, _f: Facts) -> Iterator[Violation]:
    shards = [d for d in ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")]
    sharded = [d for d in shards if positive(getattr(s, d)) and getattr(s, d) > 1]
    if sharded and positive(s.num_distributed_optimizer_instances) and s.num_distributed_optimizer_instances > 1:
        yield broken(
            s,
            f"{say(s, 'num_distributed_optimizer_instances')} cannot be combined with {say(s, sharded[0])}; use one "
            "of them.",
            "num_distributed_optimizer_instances",
            sharded[0],
        )


def optimizer_instances_divide_data_ranks(s: Settings, f: Facts) -> Iterator[Violation]:
    ranks = None if f.dp is None else f.dp * f.cp
    # an instance holds the state of all experts too, so it must not be cut apart by expert parallelism
    for kind, count in (("data-parallel", ranks), ("expert-data-parallel", None if f.experts is None else f.edp)):
        if not divides(s.num_distributed_optimizer_instances, count):
            yield broken(
                s,
                f"{say(s, 'num_distributed_optimizer_instances')} must divide the {count} {kind} ranks.",
                "num_distributed_optimizer_instances",
            )
            return


RESOLVE = (
    expert_tensor_size,
    sequence_parallel_needs_tensor_ranks,
    microbatch_group_size,
    fake_process_group,
)
CHECKS = (
    sizes_are_positive,
    world_divides,
    expert_world_divides,
    expert_ranks_need_experts,
    experts_divide_over_ranks,
    tp_overlap_needs_sequence_parallel,
    heads_divide_over_tensor_ranks,
    query_groups_fit_tensor_ranks,
    sequence_divides_over_context_ranks,
    sequence_divides_over_tensor_ranks,
    cp_comm_type_fits,
    hierarchical_sizes_multiply_to_context,
    hierarchical_sizes_are_two,
    heads_divide_over_context_ranks,
    dp_last_mapping_needs_equal_grids,
    optimizer_instances_exclude_weight_shards,
    optimizer_instances_divide_data_ranks,
)

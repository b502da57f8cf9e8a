"""Samples of different lengths (--use-varlen-dataset), packed into microbatches (--sequence-packing-scheduler).

The rules follow Megatron-LM's dev branch (commit d48bd6be0a, validate_args, TransformerConfig and GPTDatasetConfig).
"""

import math
from collections.abc import Iterator
from types import MappingProxyType

from arguments.layer_pattern import mention_delta_rule
from arguments.mechanisms.formats import FLAGS, TOKEN_MULTIPLE, list_widths, quantized_format
from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selections import SELECTIONS
from arguments.mechanisms.support import rejecting
from arguments.mock_lengths import read_mock_lengths
from arguments.parallel import packed_alignment, sequence_padding_multiple
from arguments.rules.derived_sizes import DerivedSizes, divides, positive
from arguments.settings import Limit, Settings, Violation

SCHEDULER, CAPACITY, ALIGNMENT = "sequence_packing_scheduler", "max_seqlen_per_dp_cp_rank", "pad_packed_seq_alignment"
MOCK_LENGTHS = MappingProxyType(
    {"use_varlen_dataset": "varlen_mock_dataset_config_json", "sft": "sft_mock_dataset_config_json"}
)


def is_packed(s: Settings) -> bool:
    """Return whether microbatches are packed sequences."""
    return s.sequence_packing_scheduler is not None


def sequences_flag(s: Settings) -> str | None:
    """Return the destination of the flag that gives samples different lengths; None without one."""
    return "use_varlen_dataset" if s.use_varlen_dataset else "sft" if s.sft else None


def _rank_multiple(s: Settings, f: DerivedSizes) -> int:
    """Return the number of which a context-parallel rank's tokens must be a multiple."""
    return sequence_padding_multiple(f.largest_cp, f.tp, bool(s.sequence_parallel or s.num_experts)) // f.largest_cp


# Derived values.


def resolve_scheduler(s: Settings, _f: DerivedSizes) -> None:
    dest = sequences_flag(s)
    is_padded = s.use_varlen_dataset and s.varlen_sbhd_validation
    if dest and not is_padded and s.sequence_packing_scheduler is None:
        s.set_derived(SCHEDULER, "dp_balanced", f"with {s.flag(dest)}")


def resolve_capacity(s: Settings, f: DerivedSizes) -> None:
    if is_packed(s) and s.max_seqlen_per_dp_cp_rank is None and positive(s.seq_length):
        s.set_derived(CAPACITY, -(-s.seq_length // f.largest_cp), "one sequence of --seq-length")


def resolve_alignment(s: Settings, f: DerivedSizes) -> None:
    if is_packed(s) and s.pad_packed_seq_alignment is None and quantized_format(s):
        size = math.lcm(TOKEN_MULTIPLE, _rank_multiple(s, f))
        widths = list_widths("and")
        s.set_derived(ALIGNMENT, str(size), f"the numbers of tokens that {widths} GEMMs take")
        s.note(f"{s.flag(ALIGNMENT)}: {size}, since {widths} GEMMs take multiples of {TOKEN_MULTIPLE} tokens.")


def note_flags_without_use(s: Settings, _f: DerivedSizes) -> None:
    dest = sequences_flag(s)
    if dest is None:
        return
    if is_packed(s) and s.given("micro_batch_size") and positive(s.micro_batch_size) and s.micro_batch_size > 1:
        s.note(
            f"{s.shown('micro_batch_size')} with {s.flag(dest)}: the lengths of samples determine the microbatches; "
            "only the order in which packs are filled depends on it."
        )


# Checks.


def check_scheduler_has_sequences(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.sequence_packing_scheduler is None:
        return
    if s.varlen_sbhd_validation:
        yield s.violation(
            "{varlen_sbhd_validation} pads samples instead of packing them: leave {sequence_packing_scheduler} out."
        )
    elif sequences_flag(s) is None:
        yield s.violation(
            "{sequence_packing_scheduler} needs {use_varlen_dataset:flag}: other samples are all of --seq-length."
        )


def check_validation_data(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.varlen_sbhd_validation and s.mock_data:
        yield s.violation("{varlen_sbhd_validation} needs data: it is not supported with {mock_data:flag}.")


def check_mock_lengths(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    dest = sequences_flag(s)
    if dest is None or not s.mock_data or not positive(s.seq_length):
        return
    try:
        lengths = read_mock_lengths(getattr(s, MOCK_LENGTHS[dest]), s.seq_length)
    except ValueError as error:
        yield s.violation("{:flag}: {error}.", MOCK_LENGTHS[dest], error=error)
        return
    if lengths.min_seq_len < 2:
        yield s.violation("{seq_length} is too short for samples of different lengths: at least 4.")


def check_capacity(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not is_packed(s) or not positive(s.max_seqlen_per_dp_cp_rank) or not positive(s.seq_length):
        return
    size = s.max_seqlen_per_dp_cp_rank * f.largest_cp
    if size < s.seq_length:
        yield s.violation(
            "{max_seqlen_per_dp_cp_rank} on {cp} holds {size} tokens; the longest sample has {seq_length}.",
            cp="1 rank" if f.largest_cp == 1 else f"{f.largest_cp} context-parallel ranks",
            size=size,
        )


def check_alignment(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    text, capacity = s.pad_packed_seq_alignment, s.max_seqlen_per_dp_cp_rank
    size = packed_alignment(text, capacity)
    if text is None:
        return
    if text != "max" and not size:
        yield s.violation("{pad_packed_seq_alignment} must be max or a positive number of tokens.")
        return
    if capacity is None or size is None:
        yield s.violation("{pad_packed_seq_alignment} needs {max_seqlen_per_dp_cp_rank:flag}.")
        return
    if size > capacity:
        yield s.violation("{pad_packed_seq_alignment} must not exceed {max_seqlen_per_dp_cp_rank}.")
    elif is_packed(s) and not divides(_rank_multiple(s, f), size):
        yield s.violation(
            "{pad_packed_seq_alignment}: {size} tokens of a context-parallel rank cannot be sharded over tensor- and "
            "context-parallel ranks; it must be a multiple of {needed}.",
            CAPACITY,
            size=size,
            needed=_rank_multiple(s, f),
        )


def check_max_sequences(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    appends = s.pad_packed_seq_alignment is not None and s.thd_tail_padding_policy != "extend_last"
    if is_packed(s) and appends and s.thd_max_packed_sequences == 1:
        yield s.violation(
            "{thd_max_packed_sequences} must be at least 2: the padding of {pad_packed_seq_alignment:flag} is a "
            "sequence too."
        )


def check_linear_attention_padding(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if (
        (mention := mention_delta_rule(s))
        and s.pad_packed_seq_alignment is not None
        and s.thd_tail_padding_policy == "extend_last"
    ):
        yield s.violation(
            f"{mention} with {{pad_packed_seq_alignment:flag}} needs {{thd_tail_padding_policy:flag}} append_dummy_seq."
        )


def check_documents(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check the flags of other samples, which are cut from documents one after another."""
    for dest in ("reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking", "fim_data"):
        kind = sequences_flag(s)
        if kind and getattr(s, dest):
            yield s.violation("{} does not apply to {:flag}: every sample is one separate sequence.", dest, kind)


# Limits.


def rejected_selections(s: Settings, is_on: object, samples: str) -> Iterator[Limit]:
    """List selections that are not defined with padding; `samples` has it."""
    for each, rejected in rejecting(SELECTIONS, SelectionCapability.PADDING):
        message = f"{each.mention} is not implemented with {samples}: {rejected.reason}."
        yield Limit(is_on and each.is_named(s), message, kind=rejected.kind)


def limit_packing(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for dest, what, is_on, reason in (
        (
            "dataloader_type",
            "{:flag} cyclic",
            s.dataloader_type == "cyclic",
            "plans follow the order of the data",
        ),
        (
            "mlp_chunks_for_training",
            "{}",
            (s.mlp_chunks_for_training or 1) > 1,
            "ranks would run different numbers of chunks",
        ),
        ("record_step", "{}", s.record_step is not None, "a record has samples of equal length"),
    ):
        message = f"{what} is not implemented with packed sequences ({{use_varlen_dataset:flag}}): {reason}."
        yield Limit(is_packed(s) and is_on, message, (dest,), kind="later")
    yield from rejected_selections(s, is_packed(s), "packed sequences ({use_varlen_dataset:flag})")


def limit_graphs(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    is_on = is_packed(s) and s.cuda_graph_impl != "none"
    yield Limit(
        is_on and (s.pad_packed_seq_alignment != "max" or s.thd_max_packed_sequences is None),
        "{cuda_graph_impl} with packed sequences ({use_varlen_dataset:flag}) needs {pad_packed_seq_alignment:flag} max "
        "and {thd_max_packed_sequences:flag}: a CUDA graph repeats the shapes of its capture.",
        ("cuda_graph_impl",),
    )
    yield Limit(
        is_on and f.cp > 1,
        "{cuda_graph_impl} is not implemented with packed sequences ({use_varlen_dataset:flag}) over the ranks of "
        "{context_parallel_size}: the host shards and exchanges every sequence by its length.",
        ("cuda_graph_impl",),
        kind="later",
    )


def limit_overlap_buffers(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        is_packed(s) and s.tp_comm_overlap and s.pad_packed_seq_alignment != "max",
        "{tp_comm_overlap} with packed sequences ({use_varlen_dataset:flag}) needs {pad_packed_seq_alignment:flag} "
        "max: TransformerEngine's buffers have the size of one microbatch.",
        ("tp_comm_overlap",),
    )


def limit_padded_experts(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        is_packed(s)
        and s.moe_pad_expert_input_to_capacity
        and f.ep * f.etp > 1
        and s.pad_packed_seq_alignment != "max",
        "{moe_pad_expert_input_to_capacity:flag} with packed sequences ({use_varlen_dataset:flag}) needs "
        "{pad_packed_seq_alignment:flag} max: all ranks send equally many tokens to an expert.",
        ("moe_pad_expert_input_to_capacity",),
    )


def limit_quantized_tokens(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    size = packed_alignment(s.pad_packed_seq_alignment, s.max_seqlen_per_dp_cp_rank)
    for flags in FLAGS:
        yield Limit(
            is_packed(s) and getattr(s, flags.name) and positive(size) and size % TOKEN_MULTIPLE,
            "{} with packed sequences ({use_varlen_dataset:flag}) needs {pad_packed_seq_alignment:flag} with a "
            f"multiple of {TOKEN_MULTIPLE} tokens: the GEMMs take no other numbers of tokens.",
            (flags.name,),
        )

"""Flags of dynamic context parallelism: derived values, rejected combinations."""

import pytest

from tests.arguments.test_packing import VARLEN, messages, parse

DYNAMIC = ("--dynamic-context-parallel", "--calculate-per-token-loss")


def test_scheduler_groups_and_capacity_are_derived():
    args = parse(*DYNAMIC, world_size=4)
    assert args.parallel.sequence_packing_scheduler == "default_dynamic_cp" and args.dynamic_cp_sizes == (1, 2, 4)
    assert args.parallel.max_seqlen_per_dp_cp_rank == args.packed_capacity == args.data.seq_length // 4
    assert args.sequence_padding_multiple == 1, "of a rank alone"
    args = parse(*DYNAMIC, "--context-parallel-size", "2", "--min-dynamic-context-parallel-size", "2", world_size=4)
    assert args.dynamic_cp_sizes == (2, 4) and args.max_packed_tokens == 2 * args.packed_capacity
    args = parse(*DYNAMIC, "--tensor-model-parallel-size", "2", world_size=8)
    assert args.dynamic_cp_sizes == (1, 2, 4), "tensor ranks have the same tokens"
    assert parse(world_size=4).dynamic_cp_sizes == ()


def test_capacity_is_a_multiple_of_what_a_rank_has_of_a_sequence():
    more = "--tensor-model-parallel-size 2 --sequence-parallel --pad-packed-seq-alignment 4".split()
    args = parse(*DYNAMIC, *more, "--max-seqlen-per-dp-cp-rank", "23", world_size=8)
    assert args.packed_capacity == 20 and args.sequence_padding_multiple == 2 and args.packed_tail_multiple == 4


def test_hybrid_is_the_deprecated_spelling():
    args = parse("--hybrid-context-parallel", "--calculate-per-token-loss", world_size=4)
    assert args.parallel.dynamic_context_parallel and args.dynamic_cp_sizes == (1, 2, 4)
    assert any("--hybrid-context-parallel is the deprecated spelling of" in note for note in args.notes), args.notes


@pytest.mark.parametrize(
    "more, problem",
    [
        ("", "needs --calculate-per-token-loss: groups have different numbers of tokens"),
        ("--use-megatron-fsdp", "--dynamic-context-parallel does not support --use-megatron-fsdp"),
        ("--cuda-graph-impl local --cuda-graph-modules attn", "does not support --cuda-graph-impl local"),
        ("--dataloader-type cyclic", "--dynamic-context-parallel needs --dataloader-type single"),
        ("--sequence-packing-scheduler dp_balanced", "needs --sequence-packing-scheduler default_dynamic_cp, not dp_b"),
        ("--varlen-sbhd-validation", "--dynamic-context-parallel does not support --varlen-sbhd-validation"),
        ("--min-dynamic-context-parallel-size 8", "--min-dynamic-context-parallel-size 8 exceeds the 4 data- and"),
        (
            "--min-dynamic-context-parallel-size 3",
            "--min-dynamic-context-parallel-size 3 is no size of a group: 4 data- and context-parallel ranks have "
            "groups of 1, 2, 4",
        ),
        ("--min-dynamic-context-parallel-size 0", "--min-dynamic-context-parallel-size 0 must be above 0"),
        ("--pipeline-model-parallel-size 4", "needs an even number of data- and context-parallel ranks, not 1"),
        ("--hybrid-context-parallel", "--hybrid-context-parallel and --dynamic-context-parallel: give the second one"),
        ("--max-seqlen-per-dp-cp-rank 7", "7 on 4 context-parallel ranks holds 28 tokens; the longest sample has"),
        (
            "--context-parallel-size 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 2",
            "a2a+p2p is not implemented with --dynamic-context-parallel: its two levels have fixed sizes",
        ),
        (
            "--cp-comm-type a2a --group-query-attention --num-query-groups 2",
            "--num-query-groups 2 must be a multiple of 4",
        ),
    ],
)
def test_rejected(more, problem):
    found = messages("--dynamic-context-parallel", *more.split(), world_size=4)
    assert any(problem in message for message in found), found


def test_hybrid_has_no_pipeline():
    found = messages("--hybrid-context-parallel", "--pipeline-model-parallel-size", "2", world_size=4)
    assert any("does not support --pipeline-model-parallel-size 2: use --dynamic-context-parallel" in m for m in found)


def test_scheduler_needs_the_flag():
    found = messages("--sequence-packing-scheduler", "default_dynamic_cp", world_size=4)
    assert found == ["--sequence-packing-scheduler default_dynamic_cp needs --dynamic-context-parallel."]


def test_samples_of_equal_length_are_rejected():
    found = messages(*DYNAMIC, world_size=4, argv=[word for word in VARLEN if word != "--use-varlen-dataset"])
    assert found == [
        "--sequence-packing-scheduler default_dynamic_cp (derived) needs --use-varlen-dataset: other samples are all of "
        "--seq-length."
    ]


def test_exchange_of_keys_acts_without_a_context_parallel_size():
    notes = parse(*DYNAMIC, "--cp-comm-type", "allgather", world_size=4).notes
    assert not any("--cp-comm-type" in note for note in notes), notes


@pytest.mark.parametrize("world_size", [4, 64, 1024])
def test_alignment_of_fp8_does_not_grow_with_the_ranks(world_size):
    size = ("--max-seqlen-per-dp-cp-rank", "1024")
    args = parse(*DYNAMIC, *size, "--bf16", "--fp8-format", "e4m3", world_size=world_size)
    assert args.parallel.pad_packed_seq_alignment == "32"

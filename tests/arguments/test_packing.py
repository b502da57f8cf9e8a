"""Flags of samples of different lengths and of packing: derived values, rejected combinations."""

import json

import pytest

from arguments import ArgumentError, parse_args
from arguments.mock_lengths import MockLengths, read_mock_lengths
from tests.arguments.rule_lines import without
from tests.arguments.test_tokens import TOY

VARLEN = (*TOY, "--use-varlen-dataset", "--mock-data")
SIZES = {"mode": "distribution", "type": "lognormal", "min_seq_len": 2, "max_seq_len": 8, "mean_seq_len": 4}


def parse(*more, world_size=1, argv=VARLEN):
    return parse_args([*argv, *more], world_size)


def messages(*more, **options):
    with pytest.raises(ArgumentError) as caught:
        parse(*more, **options)
    return [violation.message for violation in caught.value.violations]


def test_scheduler_and_capacity_are_derived():
    args = parse()
    assert args.parallel.sequence_packing_scheduler == "dp_balanced"
    assert args.packed_capacity == args.parallel.max_seqlen_per_dp_cp_rank == args.data.seq_length
    args = parse("--context-parallel-size", "2", world_size=2)
    assert args.parallel.max_seqlen_per_dp_cp_rank == args.data.seq_length // 2
    assert args.sequence_padding_multiple == 4 and args.packed_capacity == args.data.seq_length
    assert parse(argv=TOY).packed_capacity is None and parse(argv=TOY).max_packed_tokens is None


def test_conversations_are_packed_too():
    args = parse(
        "--sft", "--mock-data", "--sft-mock-dataset-config-json", json.dumps({**SIZES, "lognormal_sigma": 1}), argv=TOY
    )
    assert args.parallel.sequence_packing_scheduler == "dp_balanced"
    assert args.packed_capacity == args.data.seq_length and args.data.has_sequences
    chats = ["--sft", "--data-path", "chats.jsonl", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "x"]
    assert parse(*chats, argv=without(TOY, ["--mock-data"])).data.sft_tokenizer_prompt_format == "nemotron-h-aligned"


def test_padded_rows_are_not_packed():
    args = parse(
        "--use-varlen-dataset", "--varlen-sbhd-validation", "--data-path", "a.jsonl", argv=without(TOY, ["--mock-data"])
    )
    assert args.parallel.sequence_packing_scheduler is None and args.packed_capacity is None


def test_padding_of_packs():
    size = str(parse().data.seq_length)
    args = parse("--max-seqlen-per-dp-cp-rank", size, "--pad-packed-seq-alignment", "max")
    assert args.packed_tail_multiple == args.max_packed_tokens == int(size)
    args = parse("--max-seqlen-per-dp-cp-rank", str(int(size) + 1), "--pad-packed-seq-alignment", "8")
    assert args.packed_tail_multiple == 8 and args.max_packed_tokens % 8 == 0 and args.max_packed_tokens > int(size)
    for alignment in ("8", "max"):  # of a context-parallel rank
        args = parse(
            *("--max-seqlen-per-dp-cp-rank", size, "--pad-packed-seq-alignment", alignment),
            *("--context-parallel-size", "2"),
            world_size=2,
        )
        assert args.packed_tail_multiple == 2 * int(size if alignment == "max" else alignment)


def test_capacity_holds_the_longest_sample_with_its_padding():
    more = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 12".split()
    args = parse(*more, world_size=4)
    assert args.parallel.max_seqlen_per_dp_cp_rank == 6 and args.sequence_padding_multiple == 8
    assert args.packed_capacity == 16


@pytest.mark.parametrize(
    "more, problem",
    [
        ("--max-seqlen-per-dp-cp-rank 3", "--max-seqlen-per-dp-cp-rank 3 on 1 rank holds 3 tokens"),
        ("--pad-packed-seq-alignment many", "must be max or a positive number"),
        (
            "--max-seqlen-per-dp-cp-rank 64 --pad-packed-seq-alignment 65",
            "must not exceed --max-seqlen-per-dp-cp-rank 64",
        ),
        (
            "--max-seqlen-per-dp-cp-rank 64 --pad-packed-seq-alignment max --thd-max-packed-sequences 1",
            "--thd-max-packed-sequences 1 must be at least 2",
        ),
        ("--dataloader-type cyclic", "--dataloader-type cyclic is not implemented with packed sequences"),
        ("--reset-position-ids", "--reset-position-ids does not apply to --use-varlen-dataset"),
        ("--reset-attention-mask", "--reset-attention-mask does not apply to --use-varlen-dataset"),
        ("--dataloader-inter-document-masking", "does not apply to --use-varlen-dataset"),
        ("--cuda-graph-impl local --cuda-graph-modules attn", "a CUDA graph repeats the shapes of its capture"),
        (
            "--cuda-graph-impl local --cuda-graph-modules attn --thd-max-packed-sequences 4",
            "needs --pad-packed-seq-alignment max and --thd-max-packed-sequences",
        ),
        ("--record-step 1 --save x --save-interval 1", "a record has samples of equal length"),
        (
            "--num-experts 4 --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1 "
            "--expert-model-parallel-size 2",
            "needs --pad-packed-seq-alignment max: all ranks send equally many tokens",
        ),
        (
            "--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel",
            "needs --pad-packed-seq-alignment max",
        ),
        (
            "--bf16 --fp8-format e4m3 --max-seqlen-per-dp-cp-rank 64 --pad-packed-seq-alignment 8",
            "--pad-packed-seq-alignment with a multiple of 32 tokens",
        ),
        ("--varlen-sbhd-validation", "--varlen-sbhd-validation needs data"),
        ("--varlen-sbhd-validation --sequence-packing-scheduler dp_balanced", "leave --sequence-packing-scheduler"),
        (
            "--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0",
            "quantile_balancing is not implemented with packed sequences",
        ),
        ("--sft", "--use-varlen-dataset and --sft both select the samples"),
        (
            "--dataloader-type external --varlen-sbhd-validation",
            "--dataloader-type external cannot be combined with --varlen-sbhd-validation: streamed samples are packed",
        ),
        (
            "--dataloader-type external --dynamic-context-parallel --calculate-per-token-loss",
            "--dynamic-context-parallel needs --dataloader-type single",
        ),
        ("--tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format x", "must be one of nemotron-h-aligned, "),
        (
            "--tokenizer-type SFTTokenizer --chat-template x",
            "--chat-template needs --sft-tokenizer-prompt-format default or",
        ),
        ("--varlen-mock-dataset-config-json {}", '"mode": "distribution", "file" or "verification"'),
    ],
)
def test_rejected(more, problem):
    found = messages(*more.split(), world_size=1 + ("model-parallel" in more))
    assert any(problem in message for message in found), found


@pytest.mark.parametrize(
    "more, problem",
    [
        (
            "--sft --mock-data --sft-mock-dataset-config-json {}",
            '--sft-mock-dataset-config-json: needs a JSON object with "mode"',
        ),
        ("--sft --data-path a.jsonl", "--sft reads conversations, which need --tokenizer-type SFTTokenizer"),
        ("--sft --data-path s3://a/b.jsonl --tokenizer-type SFTTokenizer", "--sft reads local files"),
        (
            "--sft --train-data-path a.jsonl --dataloader-type external --tokenizer-type SFTTokenizer --split 1,0,0",
            "--dataloader-type external cannot be combined with --sft: streamed rows are text, not conversations",
        ),
        ("--sft --mock-data --reset-position-ids", "--reset-position-ids does not apply to --sft"),
        (
            "--use-varlen-dataset --varlen-sbhd-validation --data-path a --cuda-graph-impl local --cuda-graph-modules attn",
            "is not implemented with --varlen-sbhd-validation",
        ),
    ],
)
def test_rejected_with_text(more, problem):
    found = messages(*more.split(), argv=without(TOY, ["--mock-data"]))
    assert any(problem in message for message in found), found


def test_alignment_must_divide_over_ranks():
    more = "--context-parallel-size 2 --max-seqlen-per-dp-cp-rank 63 --pad-packed-seq-alignment 3".split()
    assert any("must be a multiple of 2" in message for message in messages(*more, world_size=2))


def test_scheduler_needs_samples_of_different_lengths():
    found = messages("--sequence-packing-scheduler", "dp_balanced", argv=TOY)
    assert found == [
        "--sequence-packing-scheduler dp_balanced needs --use-varlen-dataset: other samples are all of --seq-length."
    ]


def test_flags_without_use_are_noted():
    notes = parse("--max-seqlen-per-dp-cp-rank", "64", argv=TOY).notes
    assert any("--max-seqlen-per-dp-cp-rank 64 has no effect without --use-varlen-dataset" in note for note in notes)
    assert any(
        "--eod-mask-loss has no effect with --use-varlen-dataset" in note for note in parse("--eod-mask-loss").notes
    )
    text = "--micro-batch-size 2 with --use-varlen-dataset: the lengths of samples determine the microbatches"
    assert any(text in note for note in parse("--micro-batch-size", "2").notes)
    assert not any(text in note for note in parse("--micro-batch-size", "1").notes)


def test_mock_lengths(tmp_path):
    assert read_mock_lengths(None, 32) == MockLengths(min_seq_len=16, max_seq_len=32, mean_seq_len=24)
    text = json.dumps({**SIZES, "lognormal_sigma": 0.5, "format": "thd"})
    expected = MockLengths(min_seq_len=2, max_seq_len=8, mean_seq_len=4, lognormal_sigma=0.5)
    (tmp_path / "config.json").write_text(text)
    assert read_mock_lengths(text, 32) == read_mock_lengths(str(tmp_path / "config.json"), 32) == expected


@pytest.mark.parametrize(
    "config, problem",
    [
        (SIZES, 'has no "lognormal_sigma"'),
        ({"mode": "file"}, 'has no "path"'),
        ({**SIZES, "lognormal_sigma": 0}, "lognormal_sigma must be a positive number"),
        ({**SIZES, "lognormal_sigma": 1e300}, "lognormal_sigma must be a positive number up to 10"),
        ({**SIZES, "lognormal_sigma": 1, "max_seq_len": 2**63}, "max_seq_len < 2.31"),
        ({**SIZES, "lognormal_sigma": 1, "min_seq_len": 1}, "2 <= min_seq_len <= max_seq_len"),
        ({**SIZES, "lognormal_sigma": 1, "min_seq_len": 9}, "2 <= min_seq_len <= max_seq_len"),
        ({**SIZES, "lognormal_sigma": 1, "max_seq_len": 8.5}, "must be integers"),
        ({**SIZES, "lognormal_sigma": 1, "type": "normal"}, 'needs "lognormal"'),
    ],
)
def test_bad_mock_lengths(config, problem):
    with pytest.raises(ValueError, match=problem):
        read_mock_lengths(json.dumps(config), 32)


@pytest.mark.parametrize("text, problem", [("no_such_file", "no readable file"), ("{", "not readable as JSON")])
def test_unreadable_mock_lengths(text, problem):
    with pytest.raises(ValueError, match=problem):
        read_mock_lengths(text, 32)


GRAPHS = (
    "--cuda-graph-impl local --cuda-graph-modules attn --max-seqlen-per-dp-cp-rank 64 --pad-packed-seq-alignment max "
    "--thd-max-packed-sequences 4"
).split()


def test_graphs_need_one_shape_and_one_context_rank():
    assert parse(*GRAPHS).training.cuda_graph_impl == "local"
    found = messages(*GRAPHS, "--context-parallel-size", "2", world_size=2)
    assert any("the host shards and exchanges every sequence by its length" in message for message in found)


def test_quantized_packs_are_aligned():
    size = "--bf16 --max-seqlen-per-dp-cp-rank 192".split()
    assert parse(*size).parallel.pad_packed_seq_alignment is None
    args = parse(*size, "--fp8-format", "e4m3")
    assert args.parallel.pad_packed_seq_alignment == "32"
    assert any("fp4 GEMMs take multiples of 32 tokens" in note for note in args.notes), args.notes

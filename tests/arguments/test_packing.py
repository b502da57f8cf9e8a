"""Flags of samples of different lengths, of packing and of dynamic context parallelism: derived values, mock lengths."""

import json

import pytest

from arguments import parse_args
from arguments.mock_lengths import MockLengths, read_mock_lengths
from tests.arguments.rule_lines import without
from tests.arguments.test_tokens import TOY

VARLEN = (*TOY, "--use-varlen-dataset", "--mock-data")
SIZES = {"mode": "distribution", "type": "lognormal", "min_seq_len": 2, "max_seq_len": 8, "mean_seq_len": 4}
DYNAMIC = "--dynamic-context-parallel --calculate-per-token-loss"


def parse(flags="", world_size=1, argv=VARLEN):
    return parse_args([*argv, *flags.split()], world_size)


def test_scheduler_and_capacity_are_derived():
    args = parse()
    assert args.parallel.sequence_packing_scheduler == "dp_balanced"
    assert args.packed_capacity == args.parallel.max_seqlen_per_dp_cp_rank == args.data.seq_length
    args = parse("--context-parallel-size 2", world_size=2)
    assert args.parallel.max_seqlen_per_dp_cp_rank == args.data.seq_length // 2
    assert args.sequence_padding_multiple == 4 and args.packed_capacity == args.data.seq_length
    assert parse(argv=TOY).packed_capacity is None and parse(argv=TOY).max_packed_tokens is None


def test_conversations_are_packed_too():
    config = json.dumps({**SIZES, "lognormal_sigma": 1})
    args = parse_args([*TOY, "--sft", "--mock-data", "--sft-mock-dataset-config-json", config], 1)
    assert args.parallel.sequence_packing_scheduler == "dp_balanced"
    assert args.packed_capacity == args.data.seq_length and args.data.has_sequences
    chats = "--sft --data-path chats.jsonl --tokenizer-type SFTTokenizer --tokenizer-model x"
    assert parse(chats, argv=without(TOY, ["--mock-data"])).data.sft_tokenizer_prompt_format == "nemotron-h-aligned"


def test_padded_rows_are_not_packed():
    more = "--use-varlen-dataset --varlen-sbhd-validation --data-path a.jsonl"
    args = parse(more, argv=without(TOY, ["--mock-data"]))
    assert args.parallel.sequence_packing_scheduler is None and args.packed_capacity is None


def test_padding_of_packs():
    size = parse().data.seq_length
    args = parse(f"--max-seqlen-per-dp-cp-rank {size} --pad-packed-seq-alignment max")
    assert args.packed_tail_multiple == args.max_packed_tokens == size
    args = parse(f"--max-seqlen-per-dp-cp-rank {size + 1} --pad-packed-seq-alignment 8")
    assert args.packed_tail_multiple == 8 and args.max_packed_tokens % 8 == 0 and args.max_packed_tokens > size
    for alignment, tokens in (("8", 8), ("max", size)):  # of a context-parallel rank
        more = f"--max-seqlen-per-dp-cp-rank {size} --pad-packed-seq-alignment {alignment} --context-parallel-size 2"
        assert parse(more, world_size=2).packed_tail_multiple == 2 * tokens


def test_capacity_holds_the_longest_sample_with_its_padding():
    more = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 12"
    args = parse(more, world_size=4)
    assert args.parallel.max_seqlen_per_dp_cp_rank == 6 and args.sequence_padding_multiple == 8
    assert args.packed_capacity == 16


def test_quantized_packs_are_aligned_whatever_the_number_of_ranks():
    assert parse("--bf16 --max-seqlen-per-dp-cp-rank 192").parallel.pad_packed_seq_alignment is None
    quantized = "--bf16 --max-seqlen-per-dp-cp-rank 192 --fp8-format e4m3"
    assert parse(quantized).parallel.pad_packed_seq_alignment == "32"
    for world_size in (4, 64, 1024):
        args = parse(f"{quantized} --max-seqlen-per-dp-cp-rank 1024 {DYNAMIC}", world_size)
        assert args.parallel.pad_packed_seq_alignment == "32"


def test_mock_lengths(tmp_path):
    assert read_mock_lengths(None, 32) == MockLengths(min_seq_len=16, max_seq_len=32, mean_seq_len=24)
    text = json.dumps({**SIZES, "lognormal_sigma": 0.5, "format": "thd"})
    expected = MockLengths(min_seq_len=2, max_seq_len=8, mean_seq_len=4, lognormal_sigma=0.5)
    (tmp_path / "config.json").write_text(text)
    assert read_mock_lengths(text, 32) == read_mock_lengths(str(tmp_path / "config.json"), 32) == expected


def test_bad_mock_lengths_are_explained():
    for config, problem in (
        (SIZES, 'has no "lognormal_sigma"'),
        ({"mode": "file"}, 'has no "path"'),
        ({"mode": "file", "path": None}, "path must be the path of a file"),
        ({**SIZES, "mode": "verification", "data_path": 3}, "data_path must be the path of a file"),
        ({**SIZES, "lognormal_sigma": 0}, "lognormal_sigma must be a positive number"),
        ({**SIZES, "lognormal_sigma": 1e300}, "lognormal_sigma must be a positive number up to 10"),
        ({**SIZES, "lognormal_sigma": 1, "max_seq_len": 2**63}, "max_seq_len < 2.31"),
        ({**SIZES, "lognormal_sigma": 1, "min_seq_len": 1}, "2 <= min_seq_len <= max_seq_len"),
        ({**SIZES, "lognormal_sigma": 1, "min_seq_len": 9}, "2 <= min_seq_len <= max_seq_len"),
        ({**SIZES, "lognormal_sigma": 1, "max_seq_len": 8.5}, "must be integers"),
        ({**SIZES, "lognormal_sigma": 1, "type": "normal"}, 'needs "lognormal"'),
        ("no_such_file", "no readable file"),
        ("{", "not readable as JSON"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_mock_lengths(config if isinstance(config, str) else json.dumps(config), 32)


def test_groups_of_dynamic_context_parallelism_are_derived():
    args = parse(DYNAMIC, world_size=4)
    assert args.parallel.sequence_packing_scheduler == "default_dynamic_cp" and args.dynamic_cp_sizes == (1, 2, 4)
    assert args.parallel.max_seqlen_per_dp_cp_rank == args.packed_capacity == args.data.seq_length // 4
    assert args.sequence_padding_multiple == 1, "of a rank alone"
    args = parse(f"{DYNAMIC} --context-parallel-size 2 --min-dynamic-context-parallel-size 2", world_size=4)
    assert args.dynamic_cp_sizes == (2, 4) and args.max_packed_tokens == 2 * args.packed_capacity
    args = parse(f"{DYNAMIC} --tensor-model-parallel-size 2", world_size=8)
    assert args.dynamic_cp_sizes == (1, 2, 4), "tensor ranks have the same tokens"
    assert parse(world_size=4).dynamic_cp_sizes == ()
    args = parse(DYNAMIC.replace("dynamic", "hybrid"), world_size=4)  # the deprecated spelling
    assert args.parallel.dynamic_context_parallel and args.dynamic_cp_sizes == (1, 2, 4)


def test_capacity_is_a_multiple_of_what_a_rank_has_of_a_sequence():
    more = "--tensor-model-parallel-size 2 --sequence-parallel --pad-packed-seq-alignment 4"
    args = parse(f"{DYNAMIC} {more} --max-seqlen-per-dp-cp-rank 23", world_size=8)
    assert args.packed_capacity == 20 and args.sequence_padding_multiple == 2 and args.packed_tail_multiple == 4

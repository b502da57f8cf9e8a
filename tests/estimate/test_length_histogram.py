"""--length-histogram: reading lengths, and what packing saves."""

import functools
import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from arguments import parse_args
from arguments.blend import Blend
from moe_trainer.commands import plan as plan_script
from moe_trainer.data.dataset import DatasetConfig
from moe_trainer.data.indexed import open_token_file, write_indexed_dataset
from moe_trainer.data.packing import PackFormat, PackingPlanner
from moe_trainer.data.varlen import FileSequences, VarlenDataset
from moe_trainer.estimate.dry_run import plan_of_flags, run_dry_run
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.length_histogram import LengthHistogram, PackedLengths, read_histogram
from moe_trainer.estimate.plan import packed_microbatches
from moe_trainer.estimate.plan_text import plan_json, plan_lines
from moe_trainer.estimate.suggestions import changes

COUNTS = {4: 10, 16: 5, 64: 1}
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --bf16 --disable-bias-linear --moe-grouped-gemm --lr 1e-3 --train-iters 2 --eval-iters 0"
)


def write_prefix(path, lengths):
    with write_indexed_dataset(str(path), np.int32) as builder:
        for length in lengths:
            builder.add_document(np.arange(length), [length])
    return str(path)


def expected(counts):
    return tuple(sorted(counts.items()))


def test_every_source_gives_the_same_histogram(tmp_path):
    lengths = [length for length, count in COUNTS.items() for _ in range(count)]
    table, pairs, mapping = tmp_path / "a.csv", tmp_path / "a.json", tmp_path / "b.json"
    table.write_text("length,count\n" + "\n".join(f"{length},{count}" for length, count in COUNTS.items()) + "\n")
    pairs.write_text(json.dumps(list(COUNTS.items())))
    mapping.write_text(json.dumps(COUNTS))
    prefix = write_prefix(tmp_path / "data", lengths)
    for source in (str(table), str(pairs), str(mapping), prefix):
        assert read_histogram(source).counts == expected(COUNTS), source
    assert read_histogram("corpus", Blend((prefix,), None)).counts == expected(COUNTS)
    twice = read_histogram("corpus", Blend((prefix, prefix), None))
    assert twice.counts == expected({key: 2 * n for key, n in COUNTS.items()})


def test_shares_and_files_of_excel(tmp_path):
    shares, table = tmp_path / "a.json", tmp_path / "a.csv"
    shares.write_text('{"128": 0.6, "4000": 35.7}')
    assert read_histogram(str(shares)).counts == ((128, 0.6), (4000, 35.7))
    table.write_text("\ufeff100,5\n200,6\n", encoding="utf-8")
    assert read_histogram(str(table)).counts == ((100, 5), (200, 6))


def test_weights_of_a_blend_are_shares_of_its_tokens(tmp_path):
    short, long = write_prefix(tmp_path / "short", [4] * 100), write_prefix(tmp_path / "long", [64] * 3)
    empty = write_prefix(tmp_path / "empty", [0, 0])
    found = read_histogram("corpus", Blend((short, long, empty), (3.0, 1.0, 0.0)))
    tokens = {length: length * count for length, count in found.counts}
    assert tokens[4] == pytest.approx(3 * tokens[64]) and sum(tokens.values()) == pytest.approx(400 + 192)
    assert [length for length, count in read_histogram("corpus", Blend((short, long), (0.0, 1.0))).counts if count] == [
        64
    ]
    with pytest.raises(ValueError, match=f"{empty} has a weight and holds no tokens"):
        read_histogram("corpus", Blend((short, empty), (3.0, 1.0)))


def test_weights_of_packed_samples_are_shares_of_them(tmp_path):
    short, long = write_prefix(tmp_path / "short", [10] * 100), write_prefix(tmp_path / "long", [1000] * 3)
    found = read_histogram("corpus", Blend((short, long), (0.5, 0.5)), by_samples=True)
    assert found.mean == pytest.approx(505) and found.num_sequences == pytest.approx(103)


def test_the_corpus_is_that_of_the_run(tmp_path):
    """Every way to name the data gives the blend that training reads."""
    short, long = write_prefix(tmp_path / "short", [10] * 100), write_prefix(tmp_path / "long", [1000] * 3)
    words, splits = tmp_path / "blend.txt", tmp_path / "splits.json"
    words.write_text(f"0.5 {short}\n0.5 {long}\n")
    splits.write_text(json.dumps({"train": ["0.5", short, "0.5", long], "valid": [short], "test": None}))
    flags = [flag for flag in FLAGS.split() if flag != "--mock-data"]
    for data in (
        ["--data-path", "0.5", short, "0.5", long],
        ["--data-path", f"0.5 {short} 0.5 {long}"],
        ["--train-data-path", "1", short, "1", long],
        ["--data-args-path", str(words)],
        ["--per-split-data-args-path", str(splits)],
    ):
        argv = [*flags, *data, *SIZES, "--length-histogram", "corpus"]
        assert plan_of_flags(argv).histogram.mean == pytest.approx(4000 / (200 + 2)), data
        packed = plan_of_flags([*argv, *PACKED])
        assert packed.histogram.mean == pytest.approx(505), data
    with pytest.raises(ValueError, match="s3://bucket/a is in object storage: copy its .idx file"):
        read_histogram("corpus", Blend(("s3://bucket/a",), None))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "4,1\n5,x\n", "line 2: needs a length and a count, not '5,x'"),
        ("a.csv", "length,count\n", "it holds no sequences"),
        ("a.csv", "100;5\n200,6\n", "line 1: needs a length and a count, not '100;5'"),
        ("a.csv", f"4,{'9' * 400}\n", "line 1: needs a length and a count"),
        ("a.json", '{"100": 1e400}', "lengths are integers, counts numbers"),
        ("a.json", "[[100.7, 2]]", "lengths are integers, counts numbers"),
        ("a.json", '{"100": true}', "lengths are integers, counts numbers"),
        ("a.json", "[" * 100000, "not readable as JSON"),
        ("a.csv", "0,3\n", "lengths must be at least 1"),
        ("a.csv", "3,-1\n", "counts at least 0"),
        ("a.json", "{", "not readable as JSON"),
        ("a.json", "[4, 5]", "needs an object {length: count}, or a list of [length, count]"),
        ("a.idx", "nothing", "is no index of token files"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    source = str(path).removesuffix(".idx")
    with pytest.raises(ValueError, match="--length-histogram") as error:
        read_histogram(source)
    assert message in str(error.value) and source in str(error.value)


def test_missing_sources_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none\.idx \(No such file"):
        read_histogram(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="corpus needs token files: --data-path"):
        read_histogram("corpus")
    prefix = write_prefix(tmp_path / "data", [5, 6])
    index = tmp_path / "data.idx"
    index.write_bytes(index.read_bytes()[:36])
    with pytest.raises(ValueError, match="truncated: it holds fewer than its 2 sequences"):
        read_histogram(prefix)


def test_quantities_of_a_histogram():
    found = LengthHistogram.of(COUNTS)
    assert (found.num_sequences, found.num_tokens, found.mean) == (16, 184, 11.5)
    assert found.attention_length == pytest.approx((10 * 16 + 5 * 256 + 4096) / 184)
    assert [found.quantile(q) for q in (0.5, 0.7, 1.0)] == [4, 16, 64]
    assert found.cut(10).counts == ((4, 10), (10, 6))


def test_flops_of_a_pack_are_those_of_its_sequences():
    args = parse_args(FLAGS.split(), 1)
    packed = PackedLengths.of(LengthHistogram.of({**COUNTS, 100: 2}), args, 128)
    each = {4: 10, 16: 5, 64: 3}  # two of them cut
    tokens = sum(length * count for length, count in each.items())
    alone = sum(count * training_flops(args, 1, length, 128) for length, count in each.items())
    assert packed.num_cut == 2 and packed.flops_per_token == pytest.approx(alone / tokens)
    assert packed.padded_flops_per_token == pytest.approx(18 * training_flops(args, 1, 64, 128) / tokens)


def test_packs_filled_in_order():
    assert LengthHistogram.of({16: 5}).sequences_per_pack(64) == 4
    assert LengthHistogram.of({33: 5}).sequences_per_pack(64) == 1
    by_multiple = [LengthHistogram.of({5: 1}).sequences_per_pack(40, multiple) for multiple in (1, 2, 4)]
    assert by_multiple == pytest.approx([8, 6, 5], rel=1e-3)
    args = parse_args(FLAGS.split(), 1)
    full = PackedLengths.of(LengthHistogram.of({64: 7}), args, 128)
    assert (full.fill, full.padded_fill, full.per_pack) == (1, 1, 1)


SIZES = "--seq-length 32768 --max-position-embeddings 32768 --hidden-size 1024 --world-size 8 --hardware h100".split()
PACKED = (
    "--use-varlen-dataset --sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank 32768 "
    "--calculate-per-token-loss".split()
)


def plan(*more):
    return plan_of_flags([*FLAGS.split(), *SIZES, *more])


def test_an_iteration_of_packed_samples_has_as_many_sequences_as_its_batch(tmp_path):
    """--global-batch-size counts sequences, of which a pack holds many."""
    table = tmp_path / "lengths.csv"
    table.write_text("4097,9\n")
    argv = [*PACKED, "--length-histogram", str(table), "--global-batch-size", "512"]
    full, wide = plan(*argv), plan(*argv, "--max-seqlen-per-dp-cp-rank", "65536")
    assert (full.lengths.per_pack, full.num_microbatches) == (8, 512 / 8 / 8)
    assert (wide.lengths.per_pack, wide.num_microbatches) == (16, 512 / 16 / 8)
    for each in (full, wide):
        assert each.num_tokens == 512 * 4096 and each.lengths.fill == 1
        assert each.flops == pytest.approx(each.num_tokens * each.lengths.flops_per_token)
        assert each.tokens_per_second == pytest.approx(512 * 4096 / each.time.step / 8)
        assert "an iteration: 512 sequences in" in "\n".join(plan_lines(each))
    assert "packed in order into 65,536 tokens: 0.0 % padding" in "\n".join(plan_lines(wide))
    table.write_text("4098,9\n")
    odd = plan(*argv)
    assert odd.lengths.per_pack == pytest.approx(7, rel=1e-3)
    assert (odd.num_tokens, odd.num_microbatches) == (512 * 4097, 10)


DYNAMIC = "--use-varlen-dataset --calculate-per-token-loss --dynamic-context-parallel --max-seqlen-per-dp-cp-rank"
FIXED = "--sequence-packing-scheduler cost_balanced --context-parallel-size 8 --max-seqlen-per-dp-cp-rank 4096"


def test_dynamic_groups_need_the_memory_of_a_ranks_tokens():
    """--seq-length 32768 on groups of 8 ranks is 4096 tokens per rank, whatever --context-parallel-size is."""
    dynamic = plan(*DYNAMIC.split(), "4096")
    fixed = plan("--use-varlen-dataset", "--calculate-per-token-loss", *FIXED.split())
    assert dynamic.memory == fixed.memory and dynamic.time == fixed.time and dynamic.num_tokens == fixed.num_tokens
    assert "4,096 tokens per rank, in groups of 8" in dynamic.note
    twice = plan(*DYNAMIC.split(), "4096", "--context-parallel-size", "2", "--global-batch-size", "8")
    assert twice.memory == dynamic.memory
    odd = plan(*DYNAMIC.split(), "12288")
    assert odd.args.data.seq_length == 4 * 12288 and odd.args.parallel.context_parallel_size == 4
    assert odd.peak.kept == pytest.approx(3 * dynamic.peak.kept, rel=0.2)
    kinds = {change.kind for change in changes(dynamic.args, dynamic.hardware, 8)}
    assert "recompute" in kinds and "CP" not in kinds, "the size of groups is not a flag"


def test_short_sequences_take_the_time_of_ranks_alone(tmp_path):
    """Although --seq-length needs groups of 8 ranks."""
    table = tmp_path / "lengths.csv"
    table.write_text("4097,1\n")
    dynamic = plan(*DYNAMIC.split(), "4096", "--length-histogram", str(table), "--cp-comm-type", "all_gather")
    alone = plan(
        *PACKED, "--max-seqlen-per-dp-cp-rank", "4096", "--seq-length", "4096", "--length-histogram", str(table)
    )
    assert dynamic.lengths.groups.token_shares == {1: 1} and dynamic.num_microbatches == alone.num_microbatches == 1
    assert dynamic.time == alone.time and dynamic.tokens_per_second == alone.tokens_per_second
    assert dynamic.padded_step > dynamic.time.step, "a padded sequence is on 8 ranks"


def test_packs_that_are_no_multiple_of_seq_length_are_planned_as_they_are():
    odd, whole = (plan(*PACKED, "--max-seqlen-per-dp-cp-rank", size) for size in ("49152", "65536"))
    assert (odd.args.training.micro_batch_size, odd.args.data.seq_length) == (1, 49152)
    assert odd.peak.kept < 0.8 * whole.peak.kept and "full microbatches of 49,152 tokens" in odd.note
    assert odd.flops / odd.num_tokens == pytest.approx(whole.flops / whole.num_tokens)


def test_samples_are_cut_as_in_the_run(tmp_path):
    """A sample has a label more than tokens: --seq-length + 1 ids are not cut."""
    lengths, prefix = [1, 2, 63, 64, 65, 66, 200], str(tmp_path / "data")
    with write_indexed_dataset(prefix, np.int32) as builder:
        for length in lengths:
            builder.add_document([5] * (length - 1) + [0], [length])
    histogram = read_histogram(prefix)
    assert PackedLengths.of(histogram, parse_args(FLAGS.split(), 1), 128).num_cut == 3, "joined in --seq-length tokens"
    made = PackedLengths.of(histogram, parse_args([*FLAGS.split(), *PACKED], 1), 128)
    config = DatasetConfig(64, 0, SimpleNamespace(eod=0))
    sequences = FileSequences(open_token_file(prefix), prefix, 0, config.sequence_length + 1)
    run = VarlenDataset(sequences, prefix, 0, 7, 7, "train", config)
    assert made.histogram.counts == expected(Counter(run.length(index) for index in range(7)))
    assert (
        made.num_cut == sum(length - 1 > run.length(index) for index, length in enumerate(lengths) if length > 1) == 2
    )


@pytest.mark.parametrize("lengths", [{500: 1}, {100: 1}, {20: 40, 60: 8, 200: 3, 500: 1}])
def test_microbatches_of_dynamic_groups_are_those_of_the_run(lengths, tmp_path):
    table = tmp_path / "lengths.json"
    table.write_text(json.dumps(lengths))
    size = "--seq-length 512 --max-position-embeddings 512 --world-size 4 --hardware cpu --global-batch-size 64".split()
    made = plan_of_flags([*FLAGS.split(), *size, *DYNAMIC.split(), "128", "--length-histogram", str(table)])
    drawn = random.Random(7).choices([ids - 1 for ids in lengths], list(lengths.values()), k=64 * 32)
    args = parse_args([*FLAGS.split(), *size, *DYNAMIC.split(), "128"], 4)
    flops = functools.partial(training_flops, args, 1, padded_vocab_size=made.vocab_rows)
    planner = PackingPlanner(drawn.__getitem__, flops, PackFormat.from_args(args), 1, 4)
    plans = [planner.plan(first, 64) for first in range(0, len(drawn), 64)]
    run = [planner.summarize(each) for each in plans]
    microbatches = sum(each.num_microbatches for each in run) / len(run)
    fill = sum(each.fill * each.num_microbatches for each in run) / microbatches / len(run)
    assert made.lengths.groups.num_microbatches == pytest.approx(microbatches, rel=0.1)
    assert made.num_microbatches == pytest.approx(made.lengths.groups.num_microbatches, abs=1)
    assert made.lengths.fill == pytest.approx(fill, rel=0.1)
    assert set(made.lengths.groups.token_shares) >= {size for each in run for size in each.cp_sizes}
    text = "\n".join(plan_lines(made))
    assert "packed into groups of ranks with 128 tokens each" in text and "in order" not in text
    assert f"{100 * (1 - made.lengths.fill):.1f} % padding" in text


def test_dynamic_groups_that_lack_sequences_have_no_plan():
    args = parse_args([*FLAGS.split(), *SIZES[:6], *DYNAMIC.split(), "4096"], 8)
    with pytest.raises(ValueError, match="8 sequences do not fill 9 microbatches; raise --global-batch-size"):
        PackedLengths.of(LengthHistogram.of({64: 1}), args, 128, 9)


def test_microbatches_of_packs_fill_the_groups_of_virtual_stages():
    stages = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4".split()
    args = plan(*PACKED, *stages, "--global-batch-size", "512").args
    lengths = PackedLengths.of(LengthHistogram.of({4: 1}), args, 128)
    packs = [replace(lengths, per_pack=per_pack) for per_pack in (1, 100, 32, 128)]
    assert [packed_microbatches(args, 4, 64, each) for each in packs] == [128, 2, 4, 2]


def test_plan_of_packed_lengths(tmp_path):
    table = tmp_path / "lengths.csv"
    table.write_text("400,100\n1600,20\n6400,2\n")
    plain, packed = plan(), plan("--length-histogram", str(table))
    assert plain.lengths is None and packed.lengths.fill < 1
    assert packed.padded_step == plain.time.step and packed.time.step < plain.time.step
    assert packed.memory == plain.memory
    tokens = packed.lengths.fill * 8 * 32768
    assert packed.flops == pytest.approx(tokens * packed.lengths.flops_per_token)
    assert packed.tokens_per_second == pytest.approx(tokens / packed.time.step / 8)
    text = "\n".join(plan_lines(packed))
    assert "lengths: 122 sequences" in text and "lengths:" not in "\n".join(plan_lines(plain))
    assert plan_json(packed)["lengths"]["fill"] == packed.lengths.fill and plan_json(plain)["lengths"] is None


def test_lengths_of_full_sequences_change_nothing(tmp_path):
    table = tmp_path / "lengths.csv"
    table.write_text("32768,9\n")
    plain, packed = plan(), plan("--length-histogram", str(table))
    assert packed.time == plain.time and packed.flops == pytest.approx(plain.flops)
    assert packed.tokens_per_second == pytest.approx(plain.tokens_per_second)


def test_unreadable_lengths_end_without_a_plan(tmp_path, capsys):
    words = [*FLAGS.split(), "--dry-run", "--world-size", "8", "--length-histogram", str(tmp_path / "none.csv")]
    assert run_dry_run(words) == 2
    assert "--length-histogram" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--length-histogram", "--report"])
def test_search_does_not_take_flags_of_a_plan(flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan_script.main(["search", *FLAGS.split(), "--gpus", "8", flag, "file"])
    assert stopped.value.code == 2 and f"{flag}: only with the plan of one command line" in capsys.readouterr().err

"""Which packs of an iteration a roofline executes, and for how many microbatches each of them counts."""

import pytest

from arguments import parse_args
from moe_trainer.data.packing import PackFormat
from moe_trainer.estimate.length_histogram import LengthHistogram
from moe_trainer.estimate.parameters import planned_vocab_size
from moe_trainer.verification.executed_packs import ExecutedPacks

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 96 --train-iters 1 --lr 1e-3 --eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 95 --attention-dropout 0 --hidden-dropout 0 "
    "--transformer-impl local --calculate-per-token-loss --use-varlen-dataset --max-seqlen-per-dp-cp-rank 16"
).split()
FIXED = "--context-parallel-size 4 --sequence-packing-scheduler cost_balanced".split()
DYNAMIC = ["--dynamic-context-parallel"]
LONG_TAIL = LengthHistogram.of({9: 44, 13: 36, 33: 10, 65: 6})  # ids: one more than the model reads


def executed(flags, histogram=LONG_TAIL, size=8):
    args = parse_args([*FLAGS, *flags], size)
    return args, ExecutedPacks.of(args, PackFormat.from_args(args), planned_vocab_size(args)[0], size, histogram)


@pytest.mark.parametrize("flags", [FIXED, DYNAMIC])
def test_some_packs_represent_all_microbatches(flags):
    args, chosen = executed(flags)
    weights = [pack.weight for pack in chosen.packs]
    assert chosen.num_microbatches > len(weights) > 2 and weights[0] == weights[-1] == 1.0
    assert sum(weights) == pytest.approx(chosen.num_microbatches, rel=0.2)
    for pack, batch in zip(chosen.packs, chosen.batches(args), strict=True):
        assert batch.packed == pack.packed and batch.tokens_BS.shape[1] == pack.packed.num_tokens
        assert pack.packed.num_tokens <= 16 * pack.num_ranks
    assert {pack.num_ranks for pack in chosen.packs} == (
        {4} if flags is FIXED else {1, 2, 4, 8} & {pack.packed.cp_size for pack in chosen.packs}
    )


def test_equal_lengths_count_for_all_microbatches():
    _, chosen = executed(FIXED, LengthHistogram.of({17: 96}))
    assert {pack.packed.lengths for pack in chosen.packs} == {(16,) * 4}
    assert sum(pack.weight for pack in chosen.packs) == pytest.approx(chosen.num_microbatches)


def test_few_microbatches_are_all_executed():
    _, chosen = executed([*FIXED, "--global-batch-size", "8"], LengthHistogram.of({17: 8}), size=8)
    assert [pack.weight for pack in chosen.packs] == [1.0] * chosen.num_microbatches

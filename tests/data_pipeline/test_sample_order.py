"""The order of samples in a resumed run: kept when the run is longer or has other ranks, otherwise named."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from commands import run
from data_pipeline.corpora import FixedTokenizer, data_args, losses, training_args, write_corpus
from training.forked import pretrain
from training.tiny import TINY

from moe_trainer.data.build import build_datasets
from moe_trainer.data.combined import ContinuedDataset
from moe_trainer.data.loader import Cycle, cyclic_order
from moe_trainer.data.sample_order import compare_flags, compare_orders, describe_order, keep_cycle
from moe_trainer.training import data_setup

DOCUMENTS, LENGTH = 40, 33


@pytest.fixture
def prefixes(tmp_path):
    lengths = np.full(DOCUMENTS, LENGTH)
    return [write_corpus(tmp_path / name, lengths, vocab_size=120, seed=seed) for seed, name in enumerate("ab")]


def build(size, order=None, seed=1234, **data):
    training = training_args(seed=seed)
    return build_datasets(data_args(**data), training, FixedTokenizer(), (size, 0, 0), kept_order=order or {}).train


def read(dataset, count):
    return [dataset.tokens(index).tolist() for index in range(count)]


def test_a_longer_run_reads_the_planned_epochs_to_their_end(prefixes):
    """One epoch has 82 samples of 16 tokens; 60 are planned, then 100, then 240. The start of the next one depends on nothing else."""
    data = {"train_data_path": prefixes[:1]}
    first = build(60, **data)
    assert len(first) == 82 and read(build(100, **data), 60) != read(first, 60), "Megatron-LM's order of a longer run"
    longer = build(100, describe_order(first, None), **data)
    assert len(longer) >= 100 and read(longer, 82) == read(first, 82)
    longest = build(240, describe_order(longer, None), **data)
    assert len(longest) >= 240 and read(longest, len(longer)) == read(longer, len(longer))
    assert [len(part) for part in longest.datasets] == [82, 82, 82]
    for start in (0, 82, 164):  # every epoch has every token once: samples share one with the next
        epoch = [longest.tokens(index)[:-1] for index in range(start, start + 82)]
        counts = Counter(np.concatenate(epoch).tolist())
        whole = Counter(np.concatenate([longest.datasets[0]._source.get(n) for n in range(DOCUMENTS)]).tolist())
        assert sum((whole - counts).values()) < 16, "the last tokens of an epoch do not fill a sample"
    assert longest.shuffled_with(100) == (82, 164)


def test_a_shorter_run_and_one_of_as_many_epochs_keep_the_order(prefixes):
    data = {"train_data_path": prefixes[:1]}
    long = build(150, **data)
    order = describe_order(long, None)
    assert read(build(60, **data), 60) != read(long, 60)
    assert read(build(60, order, **data), 60) == read(long, 60)
    same = build(155, order, **data)
    assert not isinstance(same, ContinuedDataset) and describe_order(same, None) == {
        "0": order["0"].replace(": 150", ": 155")
    }


def test_a_longer_blend_keeps_the_order(prefixes):
    data = {"train_data_path": ["0.7", prefixes[0], "0.3", prefixes[1]]}
    first = build(100, **data)
    longer = build(300, describe_order(first, None), **data)
    assert len(longer) == 300 and read(longer, 100) == read(first, 100) != read(build(300, **data), 100)


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 2), (4, 1), (1, 4), (2, 3)])
def test_cyclic_order_is_kept_on_other_ranks(micro, ranks):
    """Global batches of 12, over two epochs."""

    def batches(of_rank, micro, ranks):
        each = [list(islice(of_rank(rank), 12 // (micro * ranks) * 6)) for rank in range(ranks)]
        flat = [sample for microbatch in zip(*each) for part in microbatch for sample in part]
        return [flat[start : start + 12] for start in range(0, len(flat), 12)]

    total, began = 41, Cycle(41, 2, 2)
    whole = batches(lambda rank: cyclic_order(total, 0, 2, rank, 2), 2, 2)
    resumed = batches(lambda rank: began.order(24, micro, rank, ranks), micro, ranks)
    assert resumed[:4] == whole[2:], "the same samples in the same microbatches"
    saved = describe_order(build(10, mock_data=True), began)
    assert keep_cycle(saved, Cycle(total, micro, ranks)) == began
    assert keep_cycle(saved, Cycle(50, micro, ranks)) == Cycle(50, micro, ranks), "other epochs"


def test_what_is_read_twice_is_counted_where_the_order_changes(prefixes):
    """The expected number, against the two orders."""
    data = {"train_data_path": prefixes[:1]}
    first = build(60, **data)
    order, consumed = describe_order(first, None), 50
    assert compare_orders(order, build(100, order, **data), consumed, None) is None
    assert compare_orders({}, build(60, seed=5, **data), consumed, None) is None, "an order that is not known"
    other = build(60, order, seed=5, **data)
    warning = compare_orders(order, other, consumed, None)
    assert "--seed 1234; now sequences 0 to 40, --seq-length 16, --seed 5): about 20 samples" in warning
    before, left = set(first.index[2][:consumed].tolist()), set(other.index[2][consumed:].tolist())
    assert abs(len(before & left) - 20) < 8
    warning = compare_orders({**order, "cycle": "82 2 2"}, first, consumed, Cycle(164, 2, 2))
    assert "--dataloader-type cyclic over 82 samples; now --dataloader-type cyclic over 164 samples" in warning


@pytest.mark.parametrize(
    ("changes", "size", "difference"),
    [
        ({}, 60, None),
        ({"train_iters": 20}, 80, None),  # within the first epoch
        ({"train_iters": None, "train_samples": 200}, 200, ("--train-samples) 60", "--train-samples) 200")),
        ({"train_iters": 5, "train_samples": None}, 20, None),
        ({"seed": 5}, 60, ("--seed 1234", "--seed 5")),
        ({"data_parallel_size": 2, "micro_batch_size": 1}, 60, None),
        ({"dataloader_type": "cyclic"}, 60, ("--dataloader-type single;", "--dataloader-type cyclic, ")),
    ],
)
def test_an_order_that_is_not_recorded_is_named_where_it_may_differ(prefixes, changes, size, difference):
    saved = {"seed": 1234, "seq_length": 16, "dataloader_type": None, "micro_batch_size": 2, "data_parallel_size": 1}
    saved |= {"train_iters": 15, "global_batch_size": 4, "train_samples": None}
    dataset = build(size, train_data_path=prefixes[:1])
    warning = compare_flags(saved, saved | changes, dataset, 40)
    if difference is None:
        assert warning is None
    else:
        was, _, is_now = warning.partition("; now ")
        assert difference[0] in was + ";" and difference[1] in is_now
    assert compare_flags(saved, saved | changes, dataset, 0) is None, "nothing was read"


def test_shuffle_of_other_ranks_that_is_not_recorded_is_named(prefixes):
    dataset, saved = build(60, train_data_path=prefixes[:1]), {"dataloader_type": "cyclic", "micro_batch_size": 2}
    assert compare_flags(saved, saved, dataset, 8) is None
    warning = compare_flags({**saved, "data_parallel_size": 4}, {**saved, "data_parallel_size": 2}, dataset, 8)
    assert "data-parallel ranks 4; now data-parallel ranks 2" in warning
    warning = compare_flags(saved, {**saved, "micro_batch_size": 1}, dataset, 8)
    assert "--micro-batch-size 2; now --micro-batch-size 1" in warning


def test_resumed_run_says_once_that_no_order_is_recorded(prefixes, tmp_path, monkeypatch):
    argv = [*RUN, "--train-data-path", prefixes[0], *"--save ckpt --load ckpt --save-interval 100".split()]
    argv.append("--override-opt_param-scheduler")
    with monkeypatch.context() as patch:
        patch.setattr(data_setup, "describe_order", lambda *given: {})
        assert run([*argv, "--train-iters", "2"], tmp_path).returncode == 0
    for iters, times in ("30", 1), ("30", 0):
        done = run([*argv, "--train-iters", iters, "--exit-interval", "3"], tmp_path)
        assert done.returncode == 0 and done.stderr.count("does not record the order") == times, done.stderr


RUN = [*TINY, *"--tokenizer-type NullTokenizer --vocab-size 500 --lr-decay-style constant --micro-batch-size 1".split()]


@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_a_resumed_run_that_is_longer_or_has_other_ranks_trains_on_the_same_samples(prefixes, tmp_path, loader):
    """41 samples are an epoch; 10 iterations of 4 are planned, and then 20, or two data ranks in place of one."""
    argv = [*RUN, "--train-data-path", prefixes[0], "--dataloader-type", loader, "--override-opt_param-scheduler"]
    keep = "--save ckpt --load ckpt --save-interval 100".split()
    whole = losses(pretrain([*argv, "--train-iters", "10"], tmp_path / "whole")[0])
    pretrain([*argv, *keep, "--train-iters", "10", "--exit-interval", "6"], tmp_path / "parts")
    more = ["--train-iters", "20", "--exit-interval", "10"] if loader == "single" else ["--train-iters", "10"]
    resumed, _ = pretrain([*argv, *keep, *more], tmp_path / "parts", world_size=1 if loader == "single" else 2)
    assert losses(resumed)[-4:] == pytest.approx(whole[-4:], rel=1e-5)

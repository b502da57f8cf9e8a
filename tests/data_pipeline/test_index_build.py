"""The vectorised indices against a slow, literal walk over documents."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trainer.data import index_build
from moe_trainer.data.index_build import build_indices, build_sample_index, parse_split, plan_epochs, split_range


def slow_plan(tokens, length, samples):
    """Count epochs one by one; apply the rule of the separate last epoch literally."""
    epochs, total = 1, tokens
    while samples is not None and total < samples * length + 1:
        epochs, total = epochs + 1, total + tokens
    separate = False
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // length
        separate = samples - before < int(0.80 * ((tokens - 1) // length))
    return epochs, separate


def slow_sample_index(lengths, documents, length, samples):
    """Walk the documents one by one, taking length + 1 tokens a sample."""
    rows, position, offset = [(0, 0)], 0, 0
    for _ in range(samples):
        wanted = length + 1
        while True:
            available = lengths[documents[position]] - offset
            if available >= wanted:
                offset += wanted - 1  # the next sample begins with this one's last token
                break
            wanted -= available
            position, offset = position + 1, 0
        rows.append((position, offset))
    return np.array(rows)


def slow_indices(lengths, begin, end, length, samples, seed):
    tokens = int(sum(lengths[begin:end]))
    epochs, separate = slow_plan(tokens, length, samples)
    random = np.random.RandomState(seed)
    documents = np.array(list(range(begin, end)) * (epochs - separate), dtype=np.int32)
    random.shuffle(documents)
    if separate:
        last = np.arange(begin, end, dtype=np.int32)
        random.shuffle(last)
        documents = np.concatenate([documents, last])
    total = (epochs * tokens - 1) // length
    rows = slow_sample_index(lengths, documents, length, total)
    first = ((epochs - 1) * tokens - 1) // length if separate else total
    order, tail = np.arange(first), np.arange(first, total)
    random.shuffle(order)
    random.shuffle(tail)
    return documents, rows, np.concatenate([order, tail])


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    length=st.integers(1, 50),
    samples=st.one_of(st.none(), st.integers(0, 60)),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_indices_and_epoch_plans_equal_the_plain_loop(lengths, length, samples, seed, data):
    begin = data.draw(st.integers(0, len(lengths) - 1))
    end = data.draw(st.integers(begin + 1, len(lengths)))
    tokens = sum(lengths[begin:end])
    if tokens == 0:
        return
    plan = plan_epochs(tokens, length, samples)
    assert (plan.epochs, plan.separate_last_epoch) == slow_plan(tokens, length, samples)
    assert samples is None or plan.samples >= samples
    array = np.array(lengths, dtype=np.int32)
    got = build_indices(array, begin, end, length, plan, seed)
    for found, expected in zip(got, slow_indices(array, begin, end, length, samples, seed), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert [array.dtype for array in got] == [np.int32, np.int32, np.uint32]


def test_the_last_label_of_samples_that_use_all_tokens_is_of_another_epoch():
    assert plan_epochs(8, 4, 2).epochs == slow_plan(8, 4, 2)[0] == 2


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunked_sample_index_equals_unchunked(monkeypatch, chunk):
    lengths = np.random.default_rng(0).integers(0, 30, 100).astype(np.int32)
    documents = np.random.default_rng(1).permutation(100).astype(np.int32)
    samples = (int(lengths.sum()) - 1) // 13
    full = build_sample_index(lengths, documents, 13, samples)
    monkeypatch.setattr(index_build, "_CHUNK", chunk)
    np.testing.assert_array_equal(build_sample_index(lengths, documents, 13, samples), full)
    np.testing.assert_array_equal(full, slow_sample_index(lengths, documents, 13, samples))


def test_short_sequences_need_little_more_memory_than_their_index(monkeypatch):
    monkeypatch.setattr(index_build, "_CHUNK", 1 << 15)
    lengths = np.full(1000, 1000, dtype=np.int32)
    tracemalloc.start()
    try:
        index = build_sample_index(lengths, np.arange(1000, dtype=np.int32), 1, 999_999)
        assert tracemalloc.get_traced_memory()[1] < 1.3 * index.nbytes
    finally:
        tracemalloc.stop()


def test_split_is_parsed():
    assert parse_split("900,50,50") == ((0, 0.9), (0.9, 0.9500000000000001), (0.9500000000000001, 1.0))
    assert parse_split("969, 30, 1")[0] == (0, 0.969)
    assert parse_split("1") == ((0, 1.0), None, None)
    assert parse_split("99,0,1")[1] is None
    assert split_range((0.25, 0.75), 10) == (2, 8)  # ties to even
    for bad in ("", "a,b", "0,0,0", "1,2,3,4", "1..2"):
        with pytest.raises(ValueError, match="--split"):
            parse_split(bad)

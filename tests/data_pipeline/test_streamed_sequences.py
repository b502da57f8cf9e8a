"""Packs of streamed documents: those of the same file read by its index, the same after interruptions and on all ranks."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread
from time import sleep

import numpy as np
import pytest
from data_pipeline.corpora import FixedTokenizer, assert_equal_runs, data_args, losses, training_args, write_ids
from data_pipeline.test_stream import KEEP, LENGTH, ListSource, make_parts
from data_pipeline.test_stream import stream as make_stream
from training.forked import pretrain
from training.tiny import TINY

from moe_trainer.data import blend as blend_order
from moe_trainer.data import document_sources
from moe_trainer.data.build import batch_format, build_datasets, build_streams
from moe_trainer.data.loader import Reading, build_packed_loader
from moe_trainer.data.packing import PackFormat, PackingPlanner
from moe_trainer.data.stream import StreamBlend, StreamLoader, merge_states
from moe_trainer.data.streamed_sequences import StreamedSequences
from moe_trainer.errors import UserError

BATCH = 12


def stream(parts, seed=1, by_document=True):
    return make_stream(ListSource(parts), seed=seed, by_document=by_document)


def sequences():
    return StreamedSequences(stream(make_parts(9)))


def blend():
    datasets = [stream(make_parts(9, seed=seed), seed) for seed in (1, 2)]
    return StreamedSequences(StreamBlend(datasets, [0.3, 0.7], 1000))


def packs(dataset, rank, size, consumed, num_batches, workers=2):
    """Token ids of a rank's packs of some global batches, by global batch, and the state after them."""
    planner = PackingPlanner(dataset.length, float, PackFormat(2 * LENGTH), 1, size, read_ahead=workers)
    fmt = batch_format(data_args(), FixedTokenizer())
    reading = Reading(read_ahead=workers)
    loader = build_packed_loader(
        dataset, planner, lambda _: BATCH, rank, consumed, fmt=fmt, forget=dataset.forget, reading=reading
    )
    batches, found = StreamLoader(dataset, loader, workers), []
    iterator = iter(batches)
    for first in range(consumed, consumed + num_batches * BATCH, BATCH):
        plan = planner.plan(first, BATCH)
        found.append([next(iterator).tokens_BS[0].tolist() for _ in range(plan.num_microbatches)])
    state = batches.state
    iterator.close()
    return found, state


def test_samples_are_documents_with_one_end():
    parts = [[[5, 6], [], [7, 0], [0], list(range(2, 2 + LENGTH)), list(range(2, 60))]]
    dataset = StreamedSequences(stream(parts))
    expected = [[5, 6, 0], [7, 0], [0, 0], [*range(2, 2 + LENGTH), 0], [*range(2, 2 + LENGTH), 0]]
    for index in range(12):
        assert dataset.tokens(index).tolist() == expected[index % 5] and dataset.sample(index).loss_mask is None
        assert dataset.length(index) == len(expected[index % 5]) - 1 == dataset.part_lengths(index)[0] - 1
    assert dataset.locate(2, 1) == "text, part 0, document 3, token 1"


@pytest.mark.parametrize("make", [sequences, blend])
@pytest.mark.parametrize("workers", [0, 3])
def test_another_number_of_ranks_continues_with_the_next_document(make, workers, monkeypatch):
    monkeypatch.setattr(blend_order, "_ORDER_BLOCK", 20)
    whole, state, consumed = make(), None, 0
    expected = [whole.tokens(index).tolist()[:-1] for index in range(8 * BATCH)]
    for size, num_batches in ((2, 3), (3, 1), (1, 4)):
        ranks = []
        for rank in range(size):
            dataset = make()
            if state is not None:
                dataset.load_state(json.loads(json.dumps(state)))
            ranks.append(packs(dataset, rank, size, consumed, num_batches, workers))
            assert dataset.state() == ranks[-1][1], "what was read ahead is read again"
        for batch in range(num_batches):
            first = consumed + batch * BATCH
            own = sorted(token for found, _ in ranks for pack in found[batch] for token in pack)
            assert own == sorted(token for ids in expected[first : first + BATCH] for token in ids)
        state, consumed = merge_states([state for _, state in ranks]), consumed + num_batches * BATCH
        assert all(other == state for _, other in ranks), "all ranks read the same samples"
    assert consumed == len(expected)


def test_a_dataset_continues_after_a_loader_that_read_ahead():
    """As validation does."""
    used, fresh = sequences(), sequences()
    _, state = packs(used, 0, 1, 0, 2)
    used.length(6 * BATCH)
    for dataset in (used, fresh):
        dataset.load_state(state)
    assert packs(used, 0, 1, 2 * BATCH, 2) == packs(fresh, 0, 1, 2 * BATCH, 2)


def test_samples_that_were_used_are_dropped():
    dataset, most = sequences(), 0
    forget = dataset.forget

    def watch(first):
        nonlocal most
        most = max(most, len(dataset._kept))
        forget(first)
        assert min(dataset._kept) == first

    dataset.forget = watch
    packs(dataset, 0, 1, 0, 20, workers=0)
    assert most == 2 * BATCH


def test_threads_that_ask_at_once_get_the_same_lengths():
    dataset, whole = sequences(), sequences()
    planner = PackingPlanner(dataset.length, float, PackFormat(2 * LENGTH), 1, 2)
    plans = []
    planner._plan = lambda first, size, plan=planner._plan: plans.append(first) or sleep(0.01) or plan(first, size)
    with ThreadPoolExecutor(4) as executor:
        for first in range(0, 20 * BATCH, BATCH):
            found = list(executor.map(lambda _, first=first: planner.plan(first, BATCH), range(4)))
            assert all(plan is found[0] for plan in found)
            assert dict(found[0].lengths) == {index: whole.length(index) for index in range(first, first + BATCH)}
    assert plans == list(range(0, 20 * BATCH, BATCH)) and len(planner._plans) < len(plans)


def test_a_state_of_other_samples_is_an_error():
    windows = stream(make_parts(3), by_document=False)
    with pytest.raises(UserError, match="text: the checkpoint was saved with --use-varlen-dataset"):
        windows.load_state(merge_states([sequences().state()] * 2))
    with pytest.raises(UserError, match="text: the checkpoint was saved without --use-varlen-dataset"):
        sequences().load_state(windows.state())


def test_an_unreadable_document_is_named_in_every_thread():
    """Training asks for lengths that the thread which reads ahead has failed to read."""
    parts = [[[5, 6]] * 3, [[5], 7]]
    dataset = StreamedSequences(stream(parts))

    def encode(document, name):
        if document == 7:
            raise UserError(f"{name}: cannot be read")
        return np.array([5, 0])

    dataset._source._encode = encode
    for _ in range(3):
        with pytest.raises(UserError, match="text, part 1, document 1: cannot be read"):
            for index in range(8):
                dataset.length(index)
    assert dataset.length(0) == 1, "what was read before is kept"
    dataset.load_state(stream(parts).state())
    assert dataset.length(0) == 1


# ---- runs

RUN = [*TINY, *"--tokenizer-type NullTokenizer --vocab-size 120 --train-iters 8 --use-varlen-dataset".split()]
RUN += "--moe-token-dispatcher-type alltoall --max-seqlen-per-dp-cp-rank 64 --global-batch-size 16".split()
STREAMED = "--dataloader-type external --train-data-path".split()


def test_a_run_equals_that_of_the_index(tmp_path, monkeypatch):
    """One part in one stream has the order of the file."""
    forget = StreamedSequences.forget

    def note(dataset, first):
        with open("dropped", "a", encoding="utf-8") as file:
            file.write(f"{first}\n")
        forget(dataset, first)

    monkeypatch.setattr(StreamedSequences, "forget", note)
    path = write_ids(tmp_path / "a.jsonl", 1)
    expected = pretrain([*RUN, "--data-path", path, "--split", "1,0,0"], tmp_path / "index")
    found = pretrain([*RUN, *STREAMED, path, "--document-streams", "1"], tmp_path / "stream")
    assert_equal_runs(found, expected, 8)
    for record, other in zip(found[0], expected[0], strict=True):
        assert record.get("packing") == other.get("packing")
    assert (tmp_path / "stream/dropped").read_text().split() == [str(16 * number) for number in range(8)]


def test_runs_are_equal_after_a_stop_and_on_more_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(document_sources, "PART_BYTES", 2000)
    a, b, valid = (write_ids(tmp_path / f"{name}.jsonl", seed) for seed, name in enumerate(("a", "b", "valid")))
    argv = [*RUN, *STREAMED, "0.4", a, "0.6", b, "--valid-data-path", valid, "--document-streams", "4"]
    argv += "--eval-interval 3 --eval-iters 2 --num-workers 1 --calculate-per-token-loss --moe-aux-loss-coeff 0".split()
    expected = pretrain(argv, tmp_path / "whole")
    pretrain([*argv, *KEEP, "--exit-interval", "4"], tmp_path / "same")
    assert_equal_runs(pretrain([*argv, *KEEP], tmp_path / "same"), expected, 8)
    pretrain([*argv, *KEEP, "--exit-interval", "5"], tmp_path / "more", world_size=2)
    found, _ = pretrain([*argv, *KEEP], tmp_path / "more")
    assert losses(found) == pytest.approx(losses(expected[0]), rel=1e-5) and len(losses(found)) == 8


def test_datasets_of_an_index_and_a_stream_have_equal_samples(tmp_path):
    path = write_ids(tmp_path / "a.jsonl", 3, count=50)
    tokenizer, threads = FixedTokenizer(), set()

    def tokenize(text):
        threads.add(current_thread().name.split("_")[0])
        return [int(word) for word in text.split()]

    tokenizer.tokenize = tokenize
    by_index, streamed = (
        make(data_args(use_varlen_dataset=True, seq_length=32, **data), training_args(), tokenizer, (50, 0, 0)).train
        for make, data in (
            (build_datasets, {"data_path": [path], "split": "1,0,0"}),
            (build_streams, {"train_data_path": [path], "document_streams": 1}),
        )
    )
    threads.clear()
    for index in range(50):
        np.testing.assert_array_equal(streamed.tokens(index), by_index.tokens(index))
    assert threads == {"tokenize", "MainThread"}, "--num-workers 2 of the stream; the index reads in this thread"

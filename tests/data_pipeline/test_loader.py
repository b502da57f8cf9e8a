"""Which samples a rank reads, resuming in the middle, and the tensors of a batch."""

import json
from itertools import islice

import numpy as np
import pytest
import torch
from data_pipeline.corpora import FixedTokenizer, attention_mask, data_args, training_args, write_corpus

from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.loader import BatchFormat, Reading, build_loader, cyclic_order, make_batch, single_order


class Rows:
    """A dataset whose sample i is given."""

    def __init__(self, rows, parts=None):
        self.rows, self.parts = [np.array(row, dtype=np.int64) for row in rows], parts

    def __len__(self):
        return len(self.rows)

    def tokens(self, index):
        return self.rows[index]

    def part_lengths(self, index):
        return self.parts[index]

    def locate(self, index, position):
        return f"row {index}, token {position}"

    def prefetch(self, index):
        pass


def counting_dataset(total):
    return Rows([[i, i] for i in range(total)])


FORMAT = BatchFormat(eod=None)


def test_sample_orders_equal_recorded(shared):
    samplers = json.loads((shared / "golden" / "dataset" / "summary.json").read_text())["samplers"]
    for key, expected in samplers.items():
        kind, total, consumed, mbs, *rest = key.split("_")
        assert (total, consumed, mbs) == ("total103", "consumed16", "mbs2")
        dp, rank = int(rest[-2][2:]), int(rest[-1][4:])
        if kind == "single":
            order = single_order(103, 16, 2, rank, dp)
        elif rest[0] == "sharding1":
            order = cyclic_order(103, 16, 2, rank, dp)
        else:  # --no-data-sharding, a flag of vision models
            continue
        assert list(islice(order, len(expected))) == expected, key


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("mbs", "dp"), [(1, 1), (2, 3), (3, 2)])
def test_resuming_continues_the_order(kind, mbs, dp):
    """Stopping after any batch and starting with the consumed samples gives the uninterrupted order, across epochs."""
    data, step = counting_dataset(40), mbs * dp

    def order(rank, consumed, count):
        loader = build_loader(data, mbs, rank, dp, consumed, kind, fmt=FORMAT)
        return list(islice(loader.indices(), count))

    for rank in range(dp):
        full = order(rank, 0, 20)
        for done in range(len(full)):
            assert order(rank, done * step, len(full) - done) == full[done:], (rank, done)


@pytest.mark.parametrize("consumed", [10, 11, 7])
def test_cyclic_order_continues_within_a_step_of_these_ranks(monkeypatch, consumed):
    """Other ranks, or another micro batch size, may have stopped there."""
    shuffle, count = torch.randperm, iter(range(20))
    monkeypatch.setattr(torch, "randperm", lambda *given, **options: (next(count), shuffle(*given, **options))[1])

    def samples(consumed):
        loaders = [build_loader(counting_dataset(13), 2, rank, 2, consumed, "cyclic", fmt=FORMAT) for rank in range(2)]
        return [i for step in zip(*(islice(each.indices(), 6) for each in loaders)) for batch in step for i in batch]

    assert samples(consumed)[: 24 - consumed] == samples(0)[consumed:], "12 samples are an epoch"
    assert [len(batch) for batch in islice(cyclic_order(13, consumed, 2, 0, 2), 2)] == [2, 2]


def test_cyclic_epoch_reads_every_sample_once():
    ranks = [list(islice(cyclic_order(40, 0, 2, rank, 4), 10)) for rank in range(4)]
    for epoch in range(2):
        seen = sorted(i for rank in ranks for batch in rank[epoch * 5 : epoch * 5 + 5] for i in batch)
        assert seen == list(range(40))
    assert ranks[0][:5] != ranks[0][5:]


def test_single_order_splits_global_batches_over_ranks():
    ranks = [list(single_order(25, 4, 2, rank, 2)) for rank in range(2)]
    assert ranks[0] == [[4, 5], [8, 9], [12, 13], [16, 17], [20, 21]]
    assert ranks[1] == [[6, 7], [10, 11], [14, 15], [18, 19], [22, 23]]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_worker_count_does_not_change_batches(workers):
    loader = build_loader(counting_dataset(50), 3, 1, 2, 6, fmt=FORMAT, reading=Reading(workers))
    batches = list(loader)
    assert [batch.tokens_BS[:, 0].tolist() for batch in batches] == list(loader.indices())
    assert len(list(loader)) == 7  # a loader can be walked again


@pytest.mark.parametrize(("workers", "outside"), [(0, 700), (2, 700), (0, -2)])
def test_worker_errors_are_raised_unchanged(workers, outside):
    data = Rows([[1, 2], [3, outside]])
    loader = build_loader(data, 1, 0, 1, fmt=BatchFormat(eod=None, vocab_size=500), reading=Reading(workers))
    batches = iter(loader)
    assert next(batches).labels_BS.tolist() == [[2]]
    with pytest.raises(ValueError, match=f"token id {outside} in row 1, token 1 lies outside the vocabulary of 500"):
        next(batches)


def test_closed_iterator_is_exhausted(recwarn):
    batches = iter(build_loader(counting_dataset(1000), 1, 0, 1, fmt=FORMAT, reading=Reading(2)))
    next(batches)
    batches.close()
    assert next(batches, None) is None


def test_invalid_loader_settings_are_rejected():
    with pytest.raises(ValueError, match="holds 5 samples.*needs 6"):
        build_loader(counting_dataset(5), 2, 0, 3, fmt=FORMAT)
    with pytest.raises(ValueError, match="11 samples are consumed already, the dataset holds 10"):
        build_loader(counting_dataset(10), 1, 0, 1, 11, fmt=FORMAT)
    with pytest.raises(ValueError, match="--dataloader-type other"):
        build_loader(counting_dataset(10), 1, 0, 1, 0, "other", fmt=FORMAT)
    assert list(build_loader(counting_dataset(10), 1, 0, 1, 10, fmt=FORMAT)) == []


def reference_sample(ids, eod, pad, reset_positions, reset_attention, mask_eod):
    """Masks and positions of one sample, token by token."""
    tokens, labels = ids[:-1], ids[1:]
    size = len(tokens)
    loss = [0.0 if (mask_eod and tokens[i] == eod) or labels[i] == pad else 1.0 for i in range(size)]
    start = document = 0
    positions, documents = [], []
    for i in range(size):
        positions.append(i - start)
        documents.append(document)
        if tokens[i] == eod:
            document += 1
            if reset_positions:
                start = i + 1
    attention_mask = [
        [c > r or (reset_attention and documents[c] != documents[r]) for c in range(size)] for r in range(size)
    ]

    def clean(row):
        return [0 if token == pad else token for token in row]

    return clean(tokens), clean(labels), loss, positions, attention_mask


@pytest.mark.parametrize(
    "flags", [(False, False, False), (True, False, True), (False, True, False), (True, True, True)]
)
@pytest.mark.parametrize("pad", [-1, 1])
def test_batches_equal_the_token_by_token_definition(flags, pad):
    random = np.random.default_rng(0)
    rows = random.choice([0, 0, 1, 7, 8, 9], size=(6, 24)).tolist()
    fmt = BatchFormat(0, pad, 10, reset_position_ids=flags[0], reset_attention_mask=flags[1], eod_mask_loss=flags[2])
    batch = make_batch(Rows(rows), range(6), fmt)
    for i, row in enumerate(rows):
        tokens, labels, loss, positions, expected = reference_sample(row, 0, pad, *flags)
        assert batch.tokens_BS[i].tolist() == tokens
        assert batch.labels_BS[i].tolist() == labels
        assert batch.loss_mask_BS[i].tolist() == loss
        assert batch.position_ids_BS[i].tolist() == positions
        if flags[1]:
            assert attention_mask(batch.document_ids_BS[i : i + 1])[0, 0].tolist() == expected
    assert (batch.document_ids_BS is None) == (not flags[1])
    assert [t.dtype for t in (batch.tokens_BS, batch.labels_BS, batch.position_ids_BS)] == [torch.int64] * 3
    assert batch.loss_mask_BS.dtype == torch.float32


def test_inter_document_masking_follows_file_documents():
    """--dataloader-inter-document-masking follows the file's documents, whatever their last token is."""
    batch = make_batch(Rows([[5, 6, 7, 8, 9]], parts=[[2, 3]]), [0], BatchFormat(eod=5, separate_documents=True))
    assert batch.position_ids_BS.tolist() == [[0, 1, 0, 1]]
    T, F = True, False
    assert attention_mask(batch.document_ids_BS)[0, 0].tolist() == [
        [F, T, T, T],
        [F, F, T, T],
        [T, T, F, T],
        [T, T, F, F],
    ]


def test_token_beyond_the_vocabulary_is_located(tmp_path):
    prefix = write_corpus(tmp_path / "x", [9, 30, 12, 40], vocab_size=400)
    raw = np.fromfile(tmp_path / "x.bin", dtype=np.uint16)
    raw[9 + 17] = 499
    raw.tofile(tmp_path / "x.bin")
    data, tokenizer = data_args(data_path=[prefix], split="1,0,0"), FixedTokenizer(vocab_size=450)
    dataset = build_datasets(data, training_args(), tokenizer, (None, 0, 0)).train
    loader = build_loader(dataset, 1, 0, 1, fmt=batch_format(data, tokenizer))
    with pytest.raises(
        ValueError, match=r"token id 499 in .*x\.bin, sequence 1, token 17 lies outside the vocabulary of 450"
    ):
        list(loader)
    list(build_loader(dataset, 1, 0, 1, fmt=batch_format(data, tokenizer, vocab_size=512)))


def test_batch_moves_to_another_device():
    batch = make_batch(counting_dataset(2), [0, 1], FORMAT).to("meta")
    assert batch.tokens_BS.is_meta and batch.document_ids_BS is None

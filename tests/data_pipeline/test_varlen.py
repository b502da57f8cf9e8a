"""Samples of different lengths: ids of samples, lengths without reading them, mock data, packed batches."""

import json

import numpy as np
import pytest
from data_pipeline.corpora import FixedTokenizer, data_args, training_args, write_corpus

from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.indexed import IndexedDataset, write_indexed_dataset
from moe_trainer.data.loader import Reading, build_packed_loader, make_packed_batch
from moe_trainer.data.packing import PackFormat, PackingPlanner
from moe_trainer.data.text_sequences import TextSequences
from moe_trainer.errors import UserError

EOD = 0


def build(sizes=(10, 0, 0), **flags):
    return build_datasets(data_args(use_varlen_dataset=True, **flags), training_args(), FixedTokenizer(), sizes)


def write_sequences(prefix, sequences) -> str:
    with write_indexed_dataset(str(prefix), np.uint16) as builder:
        for ids in sequences:
            builder.add_document(np.array(ids, dtype=np.uint16), [len(ids)])
    return str(prefix)


def test_sample_is_a_sequence_with_an_end(tmp_path):
    """--seq-length 16: at most 17 ids."""
    sequences = [
        [5, 6, 7],
        [5, 6, EOD],
        [],
        [EOD],
        [*range(2, 18)],
        [*range(2, 19)],
        [*range(2, 18), EOD],
        [*range(2, 40)],
    ]
    expected = [[5, 6, 7, EOD], [5, 6, EOD], [EOD, EOD], [EOD, EOD], *[[*range(2, 18), EOD]] * 4]
    prefix = write_sequences(tmp_path / "a", sequences)
    train = build((20, 0, 0), data_path=[prefix], split="1,0,0").train
    assert len(train) == 20
    for index in range(20):
        ids = train.tokens(index)
        assert ids.tolist() == expected[index % 8] and train.length(index) == len(ids) - 1 and ids.dtype == np.int64


def test_no_more_is_read_than_samples_hold(tmp_path, monkeypatch):
    """--seq-length 16; of a sequence that is cut nothing is read for its length."""
    prefix = write_sequences(tmp_path / "a", [[*range(2, 400)], [*range(2, 19)], [5, 6, 7]])
    train = build((3, 0, 0), data_path=[prefix], split="1,0,0").train
    reads, get = [], IndexedDataset.get

    def record(source, index, offset=0, length=None):
        ids = get(source, index, offset, length)
        reads.append((index, len(ids)))
        return ids

    monkeypatch.setattr(IndexedDataset, "get", record)
    assert [train.length(index) for index in range(3)] == [16, 16, 3] and reads == [(2, 1)]
    for index in range(3):
        train.tokens(index)
    assert {index: max(size for number, size in reads if number == index) for index in range(3)} == {0: 17, 1: 17, 2: 3}


def test_cut_sequences_are_counted_once(tmp_path, caplog):
    prefix = write_sequences(tmp_path / "a", [[*range(2, 2 + size)] for size in (3, 16, 17, 18, 40)])
    build((2, 2, 2), data_path=[prefix], split="40,40,20")
    assert [record.getMessage() for record in caplog.records if "are cut" in record.getMessage()] == [
        f"{prefix}: 2 of 5 samples are cut to --seq-length 16"
    ]


def test_text_in_place_of_a_prefix_is_explained(tmp_path):
    (tmp_path / "a.txt").write_text("the fox\n")
    with pytest.raises(ValueError, match=r"a.txt is no prefix of token files: .*preprocess_data.py .*\.jsonl"):
        build(data_path=[str(tmp_path / "a.txt")], split="1,0,0")


def test_splits_and_blends(tmp_path):
    prefixes = [write_corpus(tmp_path / name, [4 + size] * size, seed=size) for name, size in (("a", 4), ("b", 6))]
    data = build((6, 2, 0), data_path=prefixes[:1], split="50,50,0")
    assert [data.train.locate(index, 1).split(", ", 1)[1] for index in range(3)] == [
        f"sequence {number}, token 1" for number in (0, 1, 0)
    ]
    assert data.valid[0].locate(0, 0).endswith("a.bin, sequence 2, token 0")
    blend = build((10, 0, 0), data_path=["1", prefixes[0], "1", prefixes[1]], split="1,0,0").train
    assert sorted(blend.length(index) for index in range(10)) == [8] * 5 + [10] * 5
    assert all(len(blend.tokens(index)) == blend.length(index) + 1 for index in range(10))


def test_tokenizer_without_end_is_rejected(tmp_path):
    data = data_args(use_varlen_dataset=True, data_path=[write_corpus(tmp_path / "a", [5])], split="1,0,0")
    with pytest.raises(UserError, match="--use-varlen-dataset: .* the tokenizer has none"):
        build_datasets(data, training_args(), FixedTokenizer(eod=None), (1, 0, 0))
    (tmp_path / "a.jsonl").write_text('{"text": "1 2"}\n')
    with pytest.raises(UserError, match="a.jsonl: samples end .* the tokenizer has none"):
        TextSequences(str(tmp_path / "a.jsonl"), FixedTokenizer(eod=None), only_conversations=False)


def test_mock_lengths_are_lognormal_and_clipped():
    """The formula of Megatron-LM with numpy's global generator of seed 0, in splits of a third."""
    train = build((10, 0, 0), seq_length=32).train
    np.random.seed(0)
    drawn = np.random.lognormal(np.log(24) - 1.1**2 / 2, 1.1, 1_000_000)
    lengths = np.clip(drawn, 16, 32).astype(int)
    assert [train.length(index) + 1 for index in range(10)] == lengths[:10].tolist()
    assert train.tokens(0).tolist() == [*range(1, lengths[0]), EOD]


@pytest.mark.parametrize("length, kept", [(32, 32), (33, 33), (34, 32), (40, 32)])
def test_long_mock_samples_are_cut_as_in_megatron(length, kept):
    """--seq-length 32: a sample of 33 ids is whole, longer ones are cut to 32."""
    config = {
        "mode": "distribution", "type": "lognormal", "min_seq_len": length, "max_seq_len": length,
        "mean_seq_len": length, "lognormal_sigma": 1.0,
    }  # fmt: skip
    train = build((1, 0, 0), seq_length=32, varlen_mock_dataset_config_json=json.dumps(config)).train
    assert train.tokens(0).tolist() == [*range(1, kept), EOD]


def test_mock_lengths_of_a_file_and_tokens_of_a_file(tmp_path):
    (tmp_path / "lengths.csv").write_text("length\n5\n9,4\n\n7\n8\n6\n")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"mode": "file", "path": str(tmp_path / "lengths.csv")}))
    train = build((4, 0, 0), varlen_mock_dataset_config_json=str(config)).train
    assert [train.length(index) for index in range(4)] == [4, 8, 4, 8], "a third of six sequences"
    prefix = write_sequences(tmp_path / "a", [[11, 12, 13], [14, 15], [16]])
    tokens = {"mode": "verification", "data_path": prefix, "min_seq_len": 8, "max_seq_len": 8}
    train = build((2, 0, 0), varlen_mock_dataset_config_json=json.dumps(tokens)).train
    assert train.tokens(0).tolist() == [11, 12, 13, 14, 15, 16, 11, EOD]
    assert train.tokens(1).tolist() == [14, 15, 16, 11, 12, 13, 14, EOD]


@pytest.mark.parametrize(
    "text, problem", [("length\n", "at least 2"), ("length\n1\n", "at least 2"), ("a\nb\n", "integers")]
)
def test_bad_length_file_is_rejected(tmp_path, text, problem):
    (tmp_path / "lengths.csv").write_text(text)
    config = json.dumps({"mode": "file", "path": str(tmp_path / "lengths.csv")})
    with pytest.raises(UserError, match=f"lengths.csv: .*{problem}"):
        build((1, 0, 0), varlen_mock_dataset_config_json=config)


def test_packed_batch(tmp_path):
    prefix = write_sequences(tmp_path / "a", [[5, 6, 7], [8], [9, 10]])
    data = data_args(use_varlen_dataset=True, data_path=[prefix], split="1,0,0")
    train = build_datasets(data, training_args(), FixedTokenizer(), (3, 0, 0)).train
    fmt = batch_format(data, FixedTokenizer())
    batch = make_packed_batch(train, [0, 2], fmt, PackFormat(16, False, 4, 16).pack)
    assert batch.packed.lengths == (3, 2, 0) and batch.packed.padded_lengths == (4, 4, 8)
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 0, 9, 10, 0, 0, *[0] * 8]]
    assert batch.labels_BS.tolist() == [[6, 7, EOD, 0, 10, EOD, 0, 0, *[0] * 8]]
    assert batch.loss_mask_BS.tolist() == [[1, 1, 1, 0, 1, 1, 0, 0, *[0] * 8]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0, *[0] * 8]]
    with pytest.raises(
        UserError, match="token id 10 in .*a.bin, sequence 2, token 1 lies outside the vocabulary of 10"
    ):
        make_packed_batch(train, [0, 2], batch_format(data, FixedTokenizer(), 10), PackFormat(16).pack)
    planner = PackingPlanner(train.length, float, PackFormat(6), 1, 1)
    for workers in (0, 2):
        loader = build_packed_loader(train, planner, lambda consumed: 3, 0, 0, fmt=fmt, reading=Reading(workers))
        assert [batch.packed.lengths for batch in loader] == [(3, 1, 2)]

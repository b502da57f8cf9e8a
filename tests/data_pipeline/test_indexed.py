"""Token files: byte-equal to the recorded ones, every dtype, both readers, and errors for damaged files."""

import itertools
import json
import os
import struct

import numpy as np
import pytest
from data_pipeline.corpora import write_corpus

from moe_trainer.data.indexed import DataFileError, IndexedDataset, token_dtype, write_indexed_dataset

DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16]


@pytest.fixture
def documents():
    return [[[1, 2, 3], [4]], [], [[5, 6]], [[7] * 9, [8, 9], [10]]]


def write(prefix, documents, dtype):
    with write_indexed_dataset(str(prefix), dtype) as builder:
        for sequences in documents:
            builder.add_document(list(itertools.chain(*sequences)), [len(sequence) for sequence in sequences])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path, documents, dtype, mmap):
    write(tmp_path / "x", documents, dtype)
    data = IndexedDataset(str(tmp_path / "x"), memory_map=mmap)
    sequences = [sequence for document in documents for sequence in document]
    assert data.dtype == dtype and len(data) == len(sequences)
    assert [data[i].tolist() for i in range(len(data))] == sequences
    assert data.get(3, 2, 4).tolist() == [7, 7, 7, 7]
    assert data.get(3, 5).tolist() == [7, 7, 7, 7]
    assert data.document_indices.tolist() == [0, 2, 2, 3, 6]


def test_layout_of_the_index(tmp_path):
    write(tmp_path / "x", [[[1, 2]], [[3]]], np.uint16)
    raw = (tmp_path / "x.idx").read_bytes()
    assert raw == b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 2, 1, 0, 4, 0, 1, 2)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


@pytest.mark.parametrize("name", ["A", "B", "M", "N", "N32"])
def test_recorded_token_files_are_read(shared, tmp_path, name):
    folder = shared / "golden" / "dataset"
    facts = json.loads((folder / "indexed.json").read_text())[name]
    for mmap in (True, False):
        data = IndexedDataset(str(folder / f"{name}_text_document"), memory_map=mmap)
        assert data.dtype.name == facts["dtype"]
        assert data.sequence_lengths.tolist() == facts["lengths"]
        assert data.sequence_pointers.tolist() == facts["pointers"]
        assert data.document_indices.tolist() == facts["document_indices"]
        assert data[0].tolist() == facts["first"] and data[len(data) - 1].tolist() == facts["last"]
    write(tmp_path / "again", read_documents(data), data.dtype)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"again{ending}").read_bytes() == (folder / f"{name}_text_document{ending}").read_bytes()


def read_documents(data):
    ends = data.document_indices.tolist()
    return [[data[i] for i in range(begin, end)] for begin, end in itertools.pairwise(ends)]


def test_interrupted_writer_keeps_the_existing_files(tmp_path, documents):
    write(tmp_path / "x", documents, np.int32)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), write_indexed_dataset(str(tmp_path / "x"), np.int32) as builder:
        builder.add_document([1, 2, 3], [3])
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("call", [0, 1])
def test_both_files_are_on_disk_before_either_is_replaced(tmp_path, documents, monkeypatch, call):
    """An error or Ctrl-C while a file is flushed leaves the existing pair."""
    write(tmp_path / "x", documents, np.int32)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def fail(descriptor):
        calls.append(descriptor)
        if len(calls) > call:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "x", documents[:1], np.int32)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_lengths_that_do_not_add_up_are_rejected(tmp_path):
    with (
        pytest.raises(ValueError, match="add up to 2, but there are 3 tokens"),
        write_indexed_dataset(str(tmp_path / "x"), np.int32) as builder,
    ):
        builder.add_document([1, 2, 3], [2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dtype", "token"), [(np.uint16, 65536), (np.uint8, -1), (np.int32, 1 << 31)])
def test_token_ids_beyond_the_dtype_are_rejected(tmp_path, dtype, token):
    writer = write_indexed_dataset(str(tmp_path / "x"), dtype)
    with pytest.raises(ValueError, match=f"{token} does not fit.*{np.dtype(dtype).name}"), writer as builder:
        builder.add_document([1, token], [2])
    assert not list(tmp_path.iterdir())


def test_token_dtype():
    assert [token_dtype(n).name for n in (1, 65499, 65500, None)] == ["uint16", "uint16", "int32", "int32"]


def test_missing_files_are_named(tmp_path):
    prefix = write_corpus(tmp_path / "my_text_document", [3])
    with pytest.raises(DataFileError, match=r"my\.idx: no such file; in that folder there is .*my_text_document"):
        IndexedDataset(str(tmp_path / "my"))
    with pytest.raises(DataFileError, match="without .bin"):
        IndexedDataset(prefix + ".bin")
    with pytest.raises(DataFileError, match="no folder"):
        IndexedDataset(str(tmp_path / "absent" / "x"))
    (tmp_path / "my_text_document.bin").unlink()
    with pytest.raises(DataFileError, match=r"my_text_document\.bin: no such file"):
        IndexedDataset(prefix)


def write_damaged(tmp_path, change, ending=".idx"):
    prefix = write_corpus(tmp_path / "x", [5, 7])
    path = tmp_path / f"x{ending}"
    path.write_bytes(change(path.read_bytes()))
    return prefix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:20], "found 20 bytes, the header alone needs 34"),
        (lambda raw: raw[:-1], "found 81 bytes, 2 sequences and 2 documents need 82"),
        (lambda raw: raw + b"\0\0", "a multimodal index"),
        (lambda raw: raw + b"\0\0\0", "found 85 bytes, its header describes 82"),
        (lambda raw: b"X" + raw[1:], "not a Megatron index"),
        (lambda raw: raw[:9] + b"\2" + raw[10:], "index version 2"),
        (lambda raw: raw[:17] + b"\x63" + raw[18:], "unknown dtype code 99"),
        (lambda raw: raw[:-8] + struct.pack("<q", 1), "document array ends at sequence 1"),
    ],
)
def test_damaged_index_is_reported(tmp_path, change, message):
    prefix = write_damaged(tmp_path, change)
    with pytest.raises(DataFileError, match=message) as error:
        IndexedDataset(prefix)
    assert "x.idx" in str(error.value)


@pytest.mark.parametrize("mmap", [True, False])
def test_truncated_bin_file_is_reported(tmp_path, mmap):
    prefix = write_damaged(tmp_path, lambda raw: raw[:-1], ".bin")
    with pytest.raises(DataFileError, match=r"x\.bin: found 23 bytes, its index needs 24"):
        IndexedDataset(prefix, memory_map=mmap)


def test_an_empty_dataset_can_be_read(tmp_path):
    write(tmp_path / "x", [], np.int32)
    assert len(IndexedDataset(str(tmp_path / "x"))) == 0

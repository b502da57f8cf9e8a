"""Data flags to datasets: sources, sizes, splits, validation sets, mock data, shared caches."""

import json
import logging
import os

import numpy as np
import pytest
import torch.distributed as dist
from data_pipeline.corpora import FixedTokenizer, data_args, training_args, write_corpus
from harness import run_ranks

from moe_trainer.data import dataset as dataset_module
from moe_trainer.data.build import batch_format, build_datasets, requested_sizes
from moe_trainer.data.combined import BlendedDataset
from moe_trainer.data.dataset import NO_PAD, MockTokens


@pytest.fixture
def prefixes(tmp_path):
    return [write_corpus(tmp_path / name, [20] * size, seed=size) for name, size in (("a", 40), ("b", 60))]


def build(sizes=(10, 0, 0), training=None, **flags):
    return build_datasets(data_args(**flags), training_args(**training or {}), FixedTokenizer(), sizes)


def test_requested_dataset_sizes():
    base = {"global_batch_size": 8, "train_iters": 100, "eval_iters": 5, "eval_interval": 30}
    assert requested_sizes(training_args(**base)) == (800, 160, 40)
    assert requested_sizes(training_args(**base, eval_global_batch_size=2)) == (800, 40, 10)
    assert requested_sizes(training_args(**base, full_validation=True)) == (800, None, 40)
    samples = {"global_batch_size": 8, "train_samples": 1000, "eval_iters": 5, "eval_interval": 30}
    assert requested_sizes(training_args(**samples)) == (1000, 200, 40)


def test_datasets_of_one_prefix(prefixes):
    datasets = build((10, 3, 0), data_path=prefixes[:1], split="90,10,0")
    assert len(datasets.train) == (36 * 20 - 1) // 16 and len(datasets.valid[0]) == (4 * 20 - 1) // 16
    assert datasets.test is None and datasets.valid_names == ("",)
    assert build((10, 1, 0), data_path=prefixes[:1]).train._config.split == "969, 30, 1"


@pytest.mark.parametrize("split", ["100,0,0", "1"])
def test_split_with_zero_weight_gives_no_dataset(prefixes, split, caplog):
    with caplog.at_level("INFO"):
        datasets = build((10, 3, 3), data_path=prefixes[:1], split=split)
    assert datasets.valid == () and datasets.test is None
    assert f'there is no data for the valid split (--split "{split}")' in caplog.text


def test_blends_from_flags_and_files_are_equal(prefixes, tmp_path):
    a, b = prefixes
    words = tmp_path / "words"
    words.write_text(f"0.25 {a} 0.75 {b}")
    first = build(data_path=["0.25", a, "0.75", b], split="1")
    second = build(data_args_path=str(words), split="1")
    for i in range(len(first.train)):
        np.testing.assert_array_equal(first.train.tokens(i), second.train.tokens(i))
    assert np.bincount(first.train.index[0]).tolist() == [3, 8]  # 11: every share rounded up


def test_separate_data_paths_per_split(prefixes, tmp_path):
    a, b = prefixes
    paths = tmp_path / "splits.json"
    paths.write_text(json.dumps({"train": [a], "valid": f"0.5 {a} 0.5 {b}", "test": None}))
    from_file = build((10, 4, 0), per_split_data_args_path=str(paths))
    from_flags = build((10, 4, 0), train_data_path=[a], valid_data_path=["0.5", a, "0.5", b])
    for datasets in (from_file, from_flags):
        assert len(datasets.train) == (40 * 20 - 1) // 16
        assert isinstance(datasets.valid[0], BlendedDataset) and len(datasets.valid[0]) == 4
        assert '"split": null' in json.dumps(datasets.train.identifiers)
    assert build((10, 4, 2), train_data_path=[a], valid_data_path=[b]).test is None


def test_a_repeated_prefix_is_used_twice_and_noted(prefixes, tmp_path, caplog):
    a, b = prefixes[:2]
    build(data_path=["2", a, "1", b], split="1")
    assert caplog.text == ""
    twice = build(data_path=["1", a, "1", b, "1", a], split="1").train
    assert f"--data-path names {a} 2 times: each of them gives the same samples" in caplog.text
    first, again = (twice.index[0].tolist().index(number) for number in (0, 2))
    np.testing.assert_array_equal(twice.tokens(first), twice.tokens(again))
    caplog.clear()
    (tmp_path / "blend").write_text(f"{b} {b}")
    build(data_args_path=str(tmp_path / "blend"), split="1")
    assert f"--data-args-path {tmp_path / 'blend'} names {b} 2 times" in caplog.text
    caplog.clear()
    build(train_data_path=[a], valid_data_path=[b, b])
    assert f"--valid-data-path names {b} 2 times" in caplog.text


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"mock_data": True, "data_path": ["a"]}, "one data source is needed, given were --mock-data and --data-path"),
        ({"data_path": ["a"], "data_args_path": "x"}, "--data-path and --data-args-path"),
        ({"data_path": ["a"], "train_data_path": ["b"]}, "one data source"),
        ({"train_data_path": ["a"], "split": "1"}, "--split .* cannot be combined"),
        ({"data_path": ["a"], "split": "0,50,50"}, '10 samples are asked of the train split.*--split "0,50,50"'),
        (
            {"data_path": ["a"], "split": "969,30,1"},
            r"a: the test split \(sequences 40 to 40 of 40\) holds no tokens",
        ),
        ({"data_path": ["nothing"]}, r"nothing\.idx: no such file"),
        ({"data_path": ["floats"]}, "holds float32 values, token ids are integers"),
    ],
)
def test_unusable_data_is_rejected(prefixes, tmp_path, monkeypatch, flags, problem):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "floats", [20], np.float32)
    with pytest.raises(ValueError, match=problem):
        build((10, 1, 1), **flags)


def test_validation_sets(prefixes):
    a, b = prefixes
    flags = {"train_data_path": [a], "valid_data_path": [a, b]}
    several = build((10, None, 0), {"multiple_validation_sets": True, "full_validation": True}, **flags)
    assert [len(dataset) for dataset in several.valid] == [(40 * 20 - 1) // 16, (60 * 20 - 1) // 16]
    assert several.valid_names == ("0", "1")
    named = build((10, 4, 0), {"multiple_validation_sets": True, "validation_set_names": ["x", "y"]}, **flags)
    assert named.valid_names == ("x", "y")
    with pytest.raises(ValueError, match="1 names for 2 validation sets"):
        build((10, 4, 0), {"multiple_validation_sets": True, "validation_set_names": ["x"]}, **flags)
    one = build((10, None, 0), {"full_validation": True}, **flags)
    assert len(one.valid) == 1 and len(one.valid[0]) == 49 + 74


def test_full_validation_of_a_blend_reads_every_sample_once(prefixes):
    a, b = prefixes
    valid = build((10, None, 0), train_data_path=[a], valid_data_path=["0.9", a, "0.1", b]).valid[0]
    assert np.bincount(valid.index[0]).tolist() == [len(dataset) for dataset in valid.datasets]


def test_mock_data(caplog):
    datasets = build((30, 10, 10), mock_data=True, seq_length=64)
    low = MockTokens(500, 0)
    document = low.get(5)
    assert len(low) == 100_000 and len(document) == low.sequence_lengths[5]
    expected = [i % 500 for i in range(1, len(document))] + [0]
    assert document.tolist() == expected
    assert MockTokens(500, None).get(5).tolist() == [*expected[:-1], len(document) % 500]
    assert low.get(5, 3, 4).tolist() == expected[3:7] and low.get(5, 3).tolist() == expected[3:]
    assert datasets.train.class_name == "MockGPTDataset" and datasets.train.tokens(0).max() < 500
    with caplog.at_level(logging.WARNING):
        build((3, 0, 0))
    assert "training on mock data" in caplog.text


def test_padding_token_equal_to_eod_is_not_masked():
    same = FixedTokenizer(eod=3, pad=3)
    assert batch_format(data_args(), same).pad == NO_PAD
    assert batch_format(data_args(allow_ambiguous_pad_tokens=True), same).pad == 3
    assert batch_format(data_args(), FixedTokenizer(pad=None)).pad == NO_PAD


def test_the_default_cache_lies_under_the_prefix(prefixes):
    build(data_path=prefixes[:1], split="1")
    names = os.listdir(os.path.join(prefixes[0], "cache", "GPTDataset_indices"))
    assert len(names) == 4 and all("-GPTDataset-train-" in name for name in names)
    assert not [name for name in names if name.startswith(".")]


def test_unwritable_cache_falls_back_to_memory(prefixes, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        datasets = build(data_path=prefixes[:1], split="1", data_cache_path=str(tmp_path / "file" / "cache"))
    assert "--data-cache-path" in caplog.text and len(datasets.train.tokens(0)) == 17


def test_damaged_cache_is_named(prefixes, tmp_path):
    flags = {"data_path": prefixes[:1], "split": "1", "data_cache_path": str(tmp_path / "cache")}
    build(**flags)
    sample = next((tmp_path / "cache").glob("*sample_index.npy"))
    sample.write_bytes(sample.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"index cache .*{sample.name}: cannot be read"):
        build(**flags)
    np.save(sample, np.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match="found 3 rows, needed 50"):
        build(**flags)


@pytest.mark.parametrize("blend", [False, True])
def test_damaged_entries_of_a_cache_are_named_or_harmless(prefixes, tmp_path, blend):
    """Whatever a flipped bit makes of an entry, a sample has its length, or the error names the cache."""
    flags = {"data_path": prefixes if blend else prefixes[:1], "split": "1", "data_cache_path": str(tmp_path / "cache")}
    good = build(**flags).train
    count, refused = len(good), set()
    for path in sorted((tmp_path / "cache").glob("*train-*_index.npy")):
        content = np.load(path)
        for bit in range(0, 8 * content.itemsize, 3):
            damaged = content.copy()
            damaged.reshape(-1)[len(content) // 2] ^= content.dtype.type(1) << content.dtype.type(bit)
            np.save(path, damaged)
            train = build(**flags).train
            for number in range(count):
                try:
                    assert train.tokens(number).shape == (17,)
                except ValueError as error:
                    kind = path.name.rpartition("-")[0]
                    assert f"{kind}-*_index.npy: damaged (sample" in str(error) and "delete" in str(error)
                    refused.add(path.name.rpartition("-")[2])
        np.save(path, content)
    assert refused >= ({"dataset_index.npy", "dataset_sample_index.npy"} if blend else {"document_index.npy", "sample_index.npy", "shuffle_index.npy"})  # fmt: skip


@pytest.mark.parametrize("blend", [False, True])
def test_a_cache_older_than_the_data_is_built_again(prefixes, tmp_path, blend):
    """The cache name depends only on the data path, so replaced data must not be read with the old index."""
    paths = prefixes if blend else prefixes[:1]
    flags = {"data_path": paths, "split": "1", "data_cache_path": str(tmp_path / "cache")}
    build(**flags)
    files = sorted((tmp_path / "cache").iterdir())
    before = {path: path.read_bytes() for path in files if "document_index" in path.name or "sample_index" in path.name}
    build(**flags)
    assert all(path.read_bytes() == content for path, content in before.items())
    write_corpus(tmp_path / "a", [20] * 7, seed=9)
    later = max(path.stat().st_mtime for path in files) + 10
    os.utime(paths[0] + ".idx", (later, later))
    fresh = build(data_path=paths, split="1", data_cache_path=str(tmp_path / "other")).train
    again = build(**flags).train
    for number in range(len(fresh)):
        np.testing.assert_array_equal(again.tokens(number), fresh.tokens(number))
    assert any(path.read_bytes() != content for path, content in before.items())


def _rank_builds(rank, world_size, prefixes, cache):
    built = []
    original = dataset_module.build_indices
    dataset_module.build_indices = lambda *args: built.append(1) or original(*args)
    data = data_args(data_path=["0.5", prefixes[0], "0.5", prefixes[1]], split="1", data_cache_path=cache)

    def run_once(write):
        if rank == 0:
            write()
        dist.barrier()

    datasets = build_datasets(data, training_args(), FixedTokenizer(), (30, 0, 0), run_once=run_once)
    return len(built), [datasets.train.tokens(i).tolist() for i in range(30)]


def test_one_rank_builds_and_all_read(prefixes, tmp_path):
    first, second = run_ranks(_rank_builds, 2, prefixes, str(tmp_path / "cache"))
    assert (first[0], second[0]) == (2, 0)
    assert first[1] == second[1]
    alone = build((30, 0, 0), data_path=["0.5", prefixes[0], "0.5", prefixes[1]], split="1")
    assert [alone.train.tokens(i).tolist() for i in range(30)] == first[1]

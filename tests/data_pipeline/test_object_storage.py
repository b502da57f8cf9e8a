"""Token files in a real S3 server: the same samples as from local files, whatever happens to the connection."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from time import sleep

import numpy as np
import pytest
from data_pipeline.corpora import FixedTokenizer, assert_equal_runs, data_args, training_args, write_corpus
from data_pipeline.s3_server import Bucket, s3_server
from training.forked import pretrain
from training.tiny import TINY

from moe_trainer.data import object_storage
from moe_trainer.data.build import build_datasets
from moe_trainer.data.fingerprint import make_fingerprint
from moe_trainer.data.indexed import DataFileError, open_token_file
from moe_trainer.data.loader import BatchFormat, Reading, build_loader
from moe_trainer.data.object_storage import ObjectStore
from moe_trainer.errors import UserError

LENGTHS = np.random.default_rng(5).integers(1, 3000, size=400)
BLOCK = 1 << 14


@pytest.fixture(scope="module")
def server():
    with s3_server() as started:
        yield started


@pytest.fixture
def bucket(server, request, monkeypatch):
    client, proxy = server
    proxy.cuts = proxy.delay_s = proxy.cut_after = 0
    proxy.chunk = 1 << 14
    monkeypatch.setattr(object_storage, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(object_storage, "_FIRST_PAUSE_S", 0.01)
    return Bucket(client, f"bucket{abs(hash(request.node.name)) % 10**9}", proxy)


@pytest.fixture
def local(tmp_path):
    return write_corpus(tmp_path / "a", LENGTHS)


def open_remote(prefix, folder, max_bytes=1 << 30):
    return open_token_file(prefix, store=ObjectStore(str(folder), max_bytes))


def assert_equal(remote, local, every=1):
    expected = open_token_file(local)
    for index in range(0, len(expected), every):
        np.testing.assert_array_equal(remote[index], expected[index])


def cached_bytes(folder):
    return sum(path.stat().st_size for path in (folder / "blocks").rglob("*") if path.is_file())


def test_documents_equal_those_of_local_files(bucket, local, tmp_path):
    prefix = bucket.upload(local, "corpora/a")
    remote = open_remote(prefix, tmp_path / "cache")
    assert_equal(remote, local)
    remote.check_sequences()
    assert remote.idx_path == str(tmp_path / "cache/s3" / bucket.name / "corpora/a.idx")
    assert cached_bytes(tmp_path / "cache") == os.path.getsize(f"{local}.bin")
    long = int(np.argmax(LENGTHS))
    np.testing.assert_array_equal(remote.get(long, 7, 20), open_token_file(local).get(long, 7, 20))


def test_the_second_run_reads_from_the_cache_alone(bucket, local, tmp_path, monkeypatch):
    prefix = bucket.upload(local, "a")
    assert_equal(open_remote(prefix, tmp_path / "cache"), local)
    monkeypatch.setattr(object_storage._Object, "read", lambda *_: pytest.fail("the object was read"))
    assert_equal(open_remote(prefix, tmp_path / "cache"), local)


def test_the_cache_respects_its_bound(bucket, local, tmp_path):
    prefix, bound = bucket.upload(local, "a"), 10 * BLOCK
    assert os.path.getsize(f"{local}.bin") > 4 * bound
    remote = open_remote(prefix, tmp_path / "cache", bound)
    for index in np.random.default_rng(0).permutation(len(LENGTHS)).tolist():
        np.testing.assert_array_equal(remote[index], open_token_file(local)[index])
        assert cached_bytes(tmp_path / "cache") <= bound
    assert cached_bytes(tmp_path / "cache") > bound / 2


def test_blocks_in_use_outlive_others(bucket, local, tmp_path):
    remote = open_remote(bucket.upload(local, "a"), tmp_path / "cache", 10 * BLOCK)
    blocks = tmp_path / "cache" / "blocks"
    for index in range(len(LENGTHS)):
        first = remote[0]
        remote[index]
        assert any(path.name == "0" for path in blocks.rglob("0"))
    np.testing.assert_array_equal(first, open_token_file(local)[0])


def test_damaged_and_missing_blocks_are_read_again(bucket, local, tmp_path):
    remote = open_remote(bucket.upload(local, "a"), tmp_path / "cache")
    assert_equal(remote, local)
    blocks = sorted(path for path in (tmp_path / "cache/blocks").rglob("*") if path.is_file())
    blocks[0].write_bytes(b"")
    blocks[1].unlink()
    assert_equal(remote, local)


def test_a_cache_that_cannot_be_written_only_costs_speed(bucket, local, tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/blocks").write_text("")
    assert_equal(open_remote(bucket.upload(local, "a"), tmp_path / "cache"), local, every=20)
    assert caplog.text.count("blocks are read again every time") == 1


def test_a_cache_is_written_again_some_time_after_an_error(bucket, local, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(object_storage, "_UNWRITABLE_S", 0.5)
    remote = open_remote(bucket.upload(local, "a"), tmp_path / "cache")
    (tmp_path / "cache/blocks").write_text("")
    reads, read = [], object_storage._Object.read
    monkeypatch.setattr(object_storage._Object, "read", lambda *args: reads.append(args) or read(*args))
    remote[0]
    number = len(reads)
    assert number and not remote._bin._stored._store.is_writable
    remote.prefetch(0, 0, 10)
    sleep(0.1)
    assert len(reads) == number, "what cannot be stored is not read ahead"
    (tmp_path / "cache/blocks").unlink()
    sleep(0.5)
    remote[0]
    assert cached_bytes(tmp_path / "cache") > 0
    assert caplog.text.count("writing is tried again in 0.5 s") == 1


def test_old_blocks_are_removed_while_others_are_read(bucket, local, tmp_path, monkeypatch):
    remote = open_remote(bucket.upload(local, "a"), tmp_path / "cache", 10 * BLOCK)
    is_removing, may_end = Event(), Event()

    def remove(*_args):
        is_removing.set()
        assert may_end.wait(60)

    monkeypatch.setattr(ObjectStore, "_remove_oldest", remove)
    future = remote._bin._stored._request(0)
    assert is_removing.wait(60)
    assert remote._bin._stored._store.submit(lambda: 7).result(timeout=60) == 7
    may_end.set()
    future.result()


def test_objects_of_two_stores_have_two_places(bucket, local, tmp_path):
    prefix, store = bucket.upload(local, "a"), ObjectStore(str(tmp_path / "cache"), 1 << 20)
    paths = [store.copy_index(f"{url}.idx") for url in (prefix, prefix.replace("s3://", "s3a://"))]
    assert len(set(paths)) == 2
    folders = [store.open(f"{url}.bin")._folder for url in (prefix, prefix.replace("s3://", "s3a://"))]
    assert len(set(folders)) == 2


def test_lists_are_repeated(bucket, local, monkeypatch, caplog):
    bucket.upload(local, "list/a")
    files = object_storage._open_file_system(f"s3://{bucket.name}/list/*")[0]
    outcomes, glob = [OSError("reset")], files._glob

    async def fail_once(path):
        if outcomes:
            raise outcomes.pop()
        return await glob(path)

    monkeypatch.setattr(files, "_glob", fail_once)
    names = object_storage.list_objects(f"s3://{bucket.name}/list/*")
    assert names == [f"s3://{bucket.name}/list/a.{ending}" for ending in ("bin", "idx")]
    assert "cannot be listed (OSError: reset); attempt 2 follows" in caplog.text


def test_cut_connections_are_repeated(bucket, local, tmp_path):
    prefix = bucket.upload(local, "a")
    remote = open_remote(prefix, tmp_path / "cache")
    bucket.proxy.cut_after, bucket.proxy.cuts = 5000, 4
    assert_equal(remote, local)
    assert bucket.proxy.cuts == 0


def test_an_index_arrives_whole_over_cut_connections(bucket, local, tmp_path, monkeypatch):
    monkeypatch.setattr(object_storage, "_COPY_BYTES", 1000)
    prefix = bucket.upload(local, "a")
    bucket.proxy.cut_after, bucket.proxy.cuts = 600, 3
    remote = open_remote(prefix, tmp_path / "cache")
    assert bucket.proxy.cuts == 0
    assert_equal(remote, local, every=50)


def test_two_processes_copy_an_index_once(bucket, local, tmp_path, monkeypatch):
    """A lock belongs to an open file, so two stores of one process exclude each other as those of two processes do."""
    prefix, copy, copies = bucket.upload(local, "a"), ObjectStore._copy, SimpleQueue()

    def slow_copy(*args):
        copies.put(None)
        sleep(0.5)  # another copy would begin meanwhile
        copy(*args)

    monkeypatch.setattr(ObjectStore, "_copy", slow_copy)
    with ThreadPoolExecutor(2) as executor:
        found = list(executor.map(lambda _: open_remote(prefix, tmp_path / "cache"), range(2)))
    assert copies.qsize() == 1
    for remote in found:
        assert len(remote) == len(LENGTHS)


def test_a_copy_that_fails_writes_nothing_later(bucket, tmp_path, monkeypatch):
    bucket.put("a.idx", b"#" * 32)
    monkeypatch.setattr(object_storage, "_COPY_BYTES", 1)
    is_failed, started = Event(), []

    def read(source, begin, end):
        started.append(begin)
        if begin == 0:
            is_failed.set()
            raise UserError("the first chunk fails")
        is_failed.wait()
        sleep(0.3)
        return b"#"

    monkeypatch.setattr(object_storage._Object, "read", read)
    with pytest.raises(UserError, match="the first chunk fails"):
        ObjectStore(str(tmp_path / "cache"), 1 << 20).copy_index(f"s3://{bucket.name}/a.idx")
    with ExitStack() as stack:  # one of these files has the descriptor that the copy had
        others = [stack.enter_context(open(tmp_path / str(number), "w+b")) for number in range(4)]
        sleep(0.5)
        assert [os.fstat(file.fileno()).st_size for file in others] == [0] * 4
    assert len(started) < 32, "chunks without a reader are not fetched"


def test_a_connection_that_stalls_is_given_up(bucket, local, tmp_path, monkeypatch, caplog):
    remote = open_remote(bucket.upload(local, "a"), tmp_path / "cache")
    monkeypatch.setattr(object_storage, "TIMEOUT_S", 0.3)
    bucket.proxy.delay_s = 0.6
    with pytest.raises(UserError, match=r"a\.bin: bytes 0 to \d+ cannot be read .*Timeout.*; 8 attempts were made"):
        remote[0]
    bucket.proxy.delay_s = 0.01
    monkeypatch.setattr(object_storage, "TIMEOUT_S", 30.0)
    assert_equal(remote, local, every=40)


def test_a_slow_connection_has_time_while_bytes_arrive(bucket, local, tmp_path, monkeypatch, caplog):
    remote = open_remote(bucket.upload(local, "a"), tmp_path / "cache")
    monkeypatch.setattr(object_storage, "TIMEOUT_S", 0.5)
    bucket.proxy.delay_s, bucket.proxy.chunk = 0.1, 1 << 10  # a block takes more than 16 x 0.1 s
    np.testing.assert_array_equal(remote[0], open_token_file(local)[0])
    assert "attempt" not in caplog.text


@pytest.mark.parametrize(
    "url, message",
    [
        ("s3:///bucket/a", "needed s3://BUCKET/KEY"),
        ("s3://bucket/../../a", "needed s3://BUCKET/KEY"),
        ("file:///tmp/a", "name local files by their path alone, /tmp/a"),
    ],
)
def test_names_that_would_leave_the_cache_are_errors(tmp_path, url, message):
    with pytest.raises(UserError, match=message):
        open_remote(url, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_object_that_was_replaced_is_an_error(bucket, local, tmp_path):
    prefix = bucket.upload(local, "a")
    remote = open_remote(prefix, tmp_path / "cache")
    remote[0]
    bucket.put("a.bin", Path(f"{local}.bin").read_bytes()[:BLOCK])
    with pytest.raises(UserError, match=rf"a\.bin: the object was replaced .* now they are {BLOCK} "):
        remote[len(LENGTHS) - 1]
    with pytest.raises(DataFileError, match="the file is truncated or belongs to another index"):
        open_remote(prefix, tmp_path / "cache")


@pytest.mark.parametrize("is_conditional", [True, False])
def test_an_object_of_the_same_size_is_noticed_too(bucket, local, tmp_path, monkeypatch, caplog, is_conditional):
    prefix = bucket.upload(local, "a")
    remote = open_remote(prefix, tmp_path / "cache")
    if not is_conditional:  # as through a file system whose reads know no condition
        monkeypatch.setattr(type(remote._bin._stored._source._files), "protocol", "other")
    first = remote[0]
    content = Path(f"{local}.bin").read_bytes()
    bucket.put("a.bin", content[::-1])
    np.testing.assert_array_equal(remote[0], first)
    before = cached_bytes(tmp_path / "cache")
    problem = r"a\.bin: the object was replaced while it is in use .* resume with the new one"
    with pytest.raises(UserError, match=problem):
        remote[len(LENGTHS) - 1]
    assert cached_bytes(tmp_path / "cache") == before
    assert "follows in" not in caplog.text
    bucket.put("a.bin", content)
    assert_equal(remote, local, every=10)


def test_another_version_replaces_index_and_blocks(bucket, local, tmp_path):
    prefix = bucket.upload(local, "a")
    assert_equal(open_remote(prefix, tmp_path / "cache"), local, every=10)
    data = data_args(data_path=[prefix], object_storage_cache_path=str(tmp_path / "cache"))
    before = make_fingerprint(data, ())
    assert list(before["data"]) == [prefix] and make_fingerprint(data, ()) == before
    other = write_corpus(tmp_path / "b", LENGTHS[::-1], seed=9)  # of the same size
    bucket.upload(other, "a")
    assert_equal(open_remote(prefix, tmp_path / "cache"), other, every=10)
    assert make_fingerprint(data, ()) != before


def test_missing_objects_and_libraries_are_named(bucket, local, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="needs --object-storage-cache-path"):
        open_token_file(bucket.upload(local, "a"))
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, folder, problem in (
        (f"s3://{bucket.name}/none", "cache", rf"s3://{bucket.name}/none\.idx: no such object"),
        ("s3://absent/none", "cache", r"s3://absent/none\.idx: no such object"),
        (f"s3://{bucket.name}/a", "file", r"--object-storage-cache-path: .* cannot be written"),
        ("nothing://bucket/a", "cache", "known are s3, gs, msc"),
        ("gs://bucket/a", "cache", "pip install gcsfs"),
    ):
        with pytest.raises(UserError, match=problem):
            open_remote(url, tmp_path / folder)


def test_datasets_and_their_indices_are_equal(bucket, local, tmp_path):
    cache = tmp_path / "cache"
    prefix = bucket.upload(local, "a")
    path = {"object_storage_cache_path": str(cache)}
    remote, expected = (
        build_datasets(
            data_args(data_path=[name], split="1", **more), training_args(), FixedTokenizer(), (500, 0, 0)
        ).train
        for name, more in ((prefix, path), (local, {}))
    )
    for index in range(0, 500, 7):
        remote.prefetch(index)
        np.testing.assert_array_equal(remote.tokens(index), expected.tokens(index))
    assert len(list((cache / "s3" / bucket.name / "a/cache/GPTDataset_indices").iterdir())) == 4


@pytest.mark.parametrize("ahead", [0, 2, 100])
def test_samples_are_prefetched_some_batches_ahead(ahead):
    calls = []

    class RecordedReads(list):
        """A dataset that records what happens to its samples, in order."""

        def tokens(self, index):
            calls.append(("read", index))
            return np.zeros(5, dtype=np.int64)

        def prefetch(self, index):
            calls.append(("prefetch", index))

    loader = build_loader(
        RecordedReads(range(12)), 2, 0, 2, fmt=BatchFormat(eod=None), reading=Reading(read_ahead=ahead)
    )
    assert len(list(loader)) == 3
    samples = [0, 1, 4, 5, 8, 9]
    assert [index for what, index in calls if what == "read"] == samples
    prefetched = [index for what, index in calls[: calls.index(("read", 0))] if what == "prefetch"]
    assert prefetched == ([] if ahead == 0 else samples)


RUN = [*TINY, *"--tokenizer-type NullTokenizer --vocab-size 120".split()]
CACHED = "--object-storage-cache-path cache --object-storage-cache-gb 0.0001 --save ckpt --load ckpt".split()


def test_a_run_over_a_bad_connection_equals_a_local_one(bucket, tmp_path):
    corpora = [write_corpus(tmp_path / name, LENGTHS, vocab_size=120, seed=seed) for seed, name in enumerate("ab")]
    prefixes = [bucket.upload(path, f"corpora/{name}") for path, name in zip(corpora, "ab")]
    argv = [*RUN, *"--train-iters 8 --eval-iters 1 --split 9,1,0 --data-path".split()]
    expected = pretrain([*argv, "0.3", corpora[0], "0.7", corpora[1]], tmp_path / "local")
    argv += ["0.3", prefixes[0], "0.7", prefixes[1], *CACHED, "--save-interval", "100"]
    bucket.proxy.cut_after, bucket.proxy.cuts, bucket.proxy.delay_s = 3000, 5, 0.002
    pretrain([*argv, "--exit-interval", "3"], tmp_path / "remote")
    assert bucket.proxy.cuts == 0
    assert_equal_runs(pretrain(argv, tmp_path / "remote"), expected, 8)
    assert cached_bytes(tmp_path / "remote/cache") <= 0.0001 * 2**30


def test_a_run_whose_object_is_truncated_continues_from_its_checkpoint(bucket, tmp_path):
    corpus = write_corpus(tmp_path / "a", LENGTHS, vocab_size=120)
    prefix = bucket.upload(corpus, "a")
    argv = [*RUN, *"--train-iters 12 --split 1 --data-path".split()]
    expected = pretrain([*argv, corpus], tmp_path / "local", world_size=2)
    argv += [prefix, *CACHED, *"--object-storage-read-ahead 0 --save-interval 1".split()]
    content = Path(f"{corpus}.bin").read_bytes()
    bucket.proxy.calls = {bucket.proxy.num_chunks + 40: lambda: bucket.put("a.bin", content[: len(content) // 3])}
    with pytest.raises(Exception, match=r"a\.bin: the object was replaced while it is in use"):
        pretrain(argv, tmp_path / "remote", world_size=2)
    assert not bucket.proxy.calls
    last = int((tmp_path / "remote/ckpt/latest_checkpointed_iteration.txt").read_text())
    assert 1 <= last < 12
    bucket.put("a.bin", content)
    assert_equal_runs(pretrain(argv, tmp_path / "remote", world_size=2), expected, 12)


def test_attempts_end_with_success_or_a_hopeless_error(bucket, local, tmp_path, caplog):
    source = ObjectStore(str(tmp_path / "cache"), 1 << 20).open(bucket.upload(local, "a") + ".bin")._source
    outcomes = [b"", OSError("reset"), b"x" * 100]

    def call(*_args, **_kwargs):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    source._read_version = call
    assert source.read(0, 100) == b"x" * 100
    assert "EOFError: 0 of 100 bytes arrived); attempt 2 follows in 0.01 s" in caplog.text
    assert "OSError: reset); attempt 3 follows in 0.02 s" in caplog.text
    outcomes[:] = [PermissionError("no")]
    with pytest.raises(UserError, match="bytes 0 to 9 cannot be read .PermissionError: no.$"):
        source.read(0, 9)

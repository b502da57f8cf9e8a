"""Streamed text: every token once, in an order that depends on neither the layout nor interruptions."""

import gzip
import json
import shutil
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from data_pipeline.corpora import FixedTokenizer, assert_equal_runs, data_args, training_args, write_ids
from data_pipeline.s3_server import Bucket, s3_server
from training.forked import pretrain
from training.tiny import TINY

from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.index import read_index
from moe_trainer.data import blend as blend_order
from moe_trainer.data import document_sources, object_storage
from moe_trainer.data.build import batch_format, build_streams
from moe_trainer.data.dataset import DatasetConfig
from moe_trainer.data.document_sources import FileSource, open_source, parse_json_object
from moe_trainer.data.loader import build_loader
from moe_trainer.data.stream import StreamBlend, StreamedDataset, StreamLoader, merge_states
from moe_trainer.errors import UserError

LENGTH = 16


class ListSource:
    """Documents of token ids in memory."""

    def __init__(self, parts):
        self._parts = parts

    def parts(self):
        return range(len(self._parts))

    def read(self, part, first):
        yield from self._parts[part][first:]


def make_parts(count, documents=7, seed=0):
    random = np.random.default_rng(seed)
    return [[random.integers(2, 500, random.integers(0, 40)).tolist() for _ in range(documents)] for _ in range(count)]


def stream(source, size=1000, **changes):
    config = DatasetConfig(LENGTH, 1, FixedTokenizer())
    of_config = {name: changes.pop(name) for name in vars(config).keys() & changes.keys()}
    return StreamedDataset(source, "text", size, replace(config, **of_config), **{"num_streams": 4, **changes})


def test_samples_are_consecutive_windows_of_all_documents():
    parts = make_parts(1)
    ids = [token for document in parts[0] if document for token in (*document, 0)]
    dataset = stream(ListSource(parts))
    endless = np.array(ids * 20)
    for index in range(5 * len(ids) // LENGTH):
        np.testing.assert_array_equal(dataset.tokens(index), endless[index * LENGTH : (index + 1) * LENGTH + 1])
        assert sum(dataset.part_lengths(index)) == LENGTH + 1


def test_threads_tokenize_ahead_in_the_same_order():
    """An id that cannot be read is an error in its turn."""
    alone, ahead = stream(ListSource(make_parts(9))), stream(ListSource(make_parts(9)), num_threads=3)
    encode, threads = ahead._encode, set()

    def slow(document, name):
        threads.add(threading.current_thread().name)
        time.sleep(0.001 * (len(document) % 3))
        return encode(document, name)

    ahead._encode = slow
    for index in range(60):
        np.testing.assert_array_equal(ahead.tokens(index), alone.tokens(index))
        assert ahead.state() == alone.state() and ahead.locate(index, 3) == alone.locate(index, 3)
    assert len(threads) == 3 and all(name.startswith("tokenize") for name in threads)
    broken = stream(ListSource([[[5] * 40, [6] * 40, "a"]]), num_threads=2)
    broken._tokenizer.tokenize = lambda text: int(text)
    assert [broken.tokens(index)[0] for index in (0, 1, 3)] == [5, 5, 6]
    with pytest.raises(UserError, match="text, part 0, document 2: "):
        broken.tokens(6)


def test_streams_share_all_parts_in_another_order_every_epoch():
    parts = [[[10 * number + 2] * (LENGTH - 1)] for number in range(12)]  # one sample of one value each, with its end
    dataset = stream(ListSource(parts))
    first, second = ([dataset.tokens(index)[0] for index in range(epoch * 12, epoch * 12 + 12)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == [10 * number + 2 for number in range(12)]
    assert first != second and first != sorted(first)
    other = stream(ListSource(parts), seed=2)
    assert [other.tokens(index)[0] for index in range(12)] != first


@pytest.mark.parametrize("num_empty", [1, 3])
def test_a_stream_continues_past_epochs_without_text(num_empty):
    parts = [[list(range(2, 2 + LENGTH - 1))] * 3, *([[]] if number % 2 else [] for number in range(num_empty))]
    for seed in range(10):
        dataset = stream(ListSource(parts), num_streams=16, seed=seed)
        for index in range(200):
            assert dataset.tokens(index)[: LENGTH - 1].tolist() == parts[0][0]


@pytest.mark.parametrize("consumed", [0, 1, 5, 16, 63, 200])
def test_a_state_continues_with_the_next_token(consumed):
    whole, begun, resumed = (stream(ListSource(make_parts(9))) for _ in range(3))
    for index in range(consumed):
        begun.tokens(index)
    state = json.loads(json.dumps(begun.state()))
    resumed.load_state(state)
    expected = [whole.tokens(index) for index in range(consumed + 100)]
    for index in range(consumed, consumed + 100):
        np.testing.assert_array_equal(resumed.tokens(index), expected[index])
    np.testing.assert_array_equal(resumed.tokens(3), expected[3])  # backwards, by reading again


def batches(dataset, rank, size, consumed, count, workers=2):
    fmt = batch_format(data_args(), FixedTokenizer())
    loader = StreamLoader(dataset, build_loader(dataset, 2, rank, size, consumed, "external", fmt=fmt), workers)
    taken = [batch for _, batch in zip(range(count), iter(loader))]
    return taken, loader.state


def blend():
    return StreamBlend([stream(ListSource(make_parts(9, seed=seed)), seed=seed) for seed in (1, 2)], [0.3, 0.7], 1000)


@pytest.mark.parametrize("make", [lambda: stream(ListSource(make_parts(9))), blend])
@pytest.mark.parametrize("workers", [0, 2])
def test_another_number_of_ranks_continues_with_the_next_sample(make, workers, monkeypatch):
    monkeypatch.setattr(blend_order, "_ORDER_BLOCK", 20)
    expected = np.concatenate([batch.tokens_BS.numpy() for batch in batches(make(), 0, 1, 0, 36)[0]])
    found, states, consumed = [], None, 0
    for size, count in ((2, 3), (3, 4), (1, 2), (4, 4)):
        datasets = [make() for _ in range(size)]
        for dataset in datasets:
            if states:
                dataset.load_state(merge_states(states))
                assert dataset.state() == merge_states(states)
        ranks = [batches(dataset, rank, size, consumed, count, workers) for rank, dataset in enumerate(datasets)]
        states = [state for _, state in ranks]
        for step in range(count):
            found += [taken[step].tokens_BS.numpy() for taken, _ in ranks]
        consumed += 2 * size * count
        if "order" in states[0]:
            assert merge_states(states)["order"][0] == max(0, consumed - 1) // 20 * 20
        if "cursors" in states[0]:  # the next samples, without anything to read again
            assert sum(cursor[0] for cursor in merge_states(states)["cursors"]) == consumed
    np.testing.assert_array_equal(np.concatenate(found), expected[:consumed])
    assert consumed >= 60


def test_a_state_of_a_blend_without_its_order_continues_too():
    whole, resumed = blend(), blend()
    expected = [whole.tokens(index) for index in range(60)]
    state = blend().state()
    del state["order"]
    resumed.load_state(state)
    for index in range(30, 60):
        np.testing.assert_array_equal(resumed.tokens(index), expected[index])


def test_a_loader_that_ends_early_gives_back_what_it_read_ahead():
    dataset, fmt = stream(ListSource(make_parts(9))), batch_format(data_args(), FixedTokenizer())
    loader = StreamLoader(dataset, build_loader(dataset, 2, 0, 1, 0, "external", fmt=fmt), 5)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    deadline = time.monotonic() + 60
    while dataset.state() == loader.state and time.monotonic() < deadline:
        time.sleep(0.001)
    assert dataset.state() != loader.state
    iterator.close()
    assert dataset.state() == loader.state
    assert [cursor[0] for cursor in loader.state["cursors"]] == [2, 2, 1, 1]
    again, _ = batches(dataset, 0, 1, 6, 1)
    np.testing.assert_array_equal(again[0].tokens_BS[0], stream(ListSource(make_parts(9))).tokens(6)[:-1])


def test_unusable_sources_and_states_are_errors():
    with pytest.raises(UserError, match="text: there is nothing to read"):
        stream(ListSource([]))
    with pytest.raises(UserError, match="text: no part holds text"):
        stream(ListSource([[[]], [[]]])).tokens(0)
    with pytest.raises(UserError, match="needs a tokenizer with an end-of-document token"):
        stream(ListSource([[[5]]]), tokenizer=FixedTokenizer(eod=None))
    state, fewer = stream(ListSource(make_parts(9))).state(), stream(ListSource(make_parts(8)))
    with pytest.raises(UserError, match="different files"):
        merge_states([state, fewer.state()])
    with pytest.raises(UserError, match="text: files were added, removed or changed in size"):
        fewer.load_state(state)
    with pytest.raises(UserError, match="saved with 4 streams, now there are 5; --document-streams"):
        stream(ListSource(make_parts(9)), num_streams=5).load_state(state)
    with pytest.raises(UserError, match="another number of streamed datasets"):
        blend().load_state({"blend": [state], "order": [0, 0]})


def test_a_wrong_id_is_found_in_its_document():
    parts = make_parts(3)
    parts[1][4] = [7] * 30 + [600]
    dataset = stream(ListSource(parts))
    fmt = batch_format(data_args(), FixedTokenizer())
    with pytest.raises(UserError, match="token id 600 in text, part 1, document 4 lies outside the vocabulary"):
        list(zip(StreamLoader(dataset, build_loader(dataset, 2, 0, 1, 0, "external", fmt=fmt), 2), range(40)))


# ---- files


def write_lines(path, texts, end="\n", last="\n"):
    path.write_bytes((end.join(json.dumps({"text": text, "n": 1}) for text in texts) + last).encode())


def read_all(source, first=0):
    return [document for part in source.parts() for document in source.read(part, first)]


TEXTS = [f"{number} " * (number % 7) + str(number) for number in range(200)]


@pytest.mark.parametrize("part_bytes", [1, 50, 333, 10**6])
def test_byte_ranges_of_lines_hold_every_line_once(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(document_sources, "PART_BYTES", part_bytes)
    write_lines(tmp_path / "a.jsonl", TEXTS[:150], end="\n\n \n", last="")
    write_lines(tmp_path / "b.jsonl", TEXTS[150:], end="\r\n")
    source = FileSource([str(tmp_path / "*.jsonl")], "text")
    assert read_all(source) == TEXTS
    for part in source.parts()[:60]:
        assert list(source.read(part, 2)) == list(source.read(part, 0))[2:]


def test_a_part_that_ends_before_the_cursor_is_not_empty():
    dataset = stream(ListSource(make_parts(1)))
    state = dataset.state()
    dataset.load_state({**state, "cursors": [[0, 3, 0, 99, 0]]})
    np.testing.assert_array_equal(dataset.tokens(0), stream(ListSource(make_parts(1))).tokens(0))


def test_a_byte_range_in_which_no_line_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(document_sources, "PART_BYTES", 1000)
    write_lines(tmp_path / "a.jsonl", [[5] * 30] * 9 + [[7] * 200])
    for seed in range(6):
        source = FileSource([str(tmp_path / "a.jsonl")], "text")
        assert [len(list(source.read(part, 0))) for part in source.parts()] == [10, 0]
        dataset = stream(source, seed=seed)
        assert {token for index in range(200) for token in dataset.tokens(index).tolist()} == {0, 5, 7}


def test_compressed_parquet_and_arrow_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    pytest.importorskip("pyarrow.parquet")

    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    table = pyarrow.table({"id": list(range(200)), "text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet", row_group_size=30)
    for name, make in (("c.arrow", pyarrow.ipc.new_stream), ("d.arrow", pyarrow.ipc.new_file)):
        with make(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    for name, parts in (("a.jsonl.gz", 1), ("b.parquet", 7), ("c.arrow", 1), ("d.arrow", 1)):
        source = FileSource([str(tmp_path / name)], "text")
        assert len(source.parts()) == parts and read_all(source) == TEXTS
    ids = pyarrow.table({"text": [[1, 2], [3]]})
    pyarrow.parquet.write_table(ids, tmp_path / "ids.parquet")
    assert read_all(FileSource([str(tmp_path / "ids.parquet")], "text")) == [[1, 2], [3]]
    with pytest.raises(UserError, match=r'no column "words" \(--document-text-key\); found id, text'):
        FileSource([str(tmp_path / "b.parquet")], "words")
    with pytest.raises(UserError, match="is float|found float"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [0.5]}), tmp_path / "e.parquet")
        read_all(FileSource([str(tmp_path / "e.parquet")], "text"))
    (tmp_path / "f.parquet").write_bytes(b"no")
    with pytest.raises(UserError, match="not a Parquet file"):
        FileSource([str(tmp_path / "f.parquet")], "text")


def test_a_folder_of_save_to_disk_is_its_listed_files(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    for number in range(3):
        (folder / f"data-{number}.jsonl").write_text(json.dumps({"text": f"document {number}"}) + "\n")
    (folder / "state.json").write_text(
        '{\n"_data_files": [{"filename": "data-2.jsonl"}, {"filename": "data-0.jsonl"}]}'
    )
    source = FileSource([str(folder)], "text")
    assert [text for part in source.parts() for text in source.read(part, 0)] == ["document 2", "document 0"]
    for content, words in (
        ('{"_data_files": [{"filename": "data-7.jsonl"}]}', "data-7.jsonl: no such file"),
        ("{}", 'needed a list "_data_files"'),
        (None, "is a folder; give its files"),
    ):
        if content is None:
            (folder / "state.json").unlink()
        else:
            (folder / "state.json").write_text(content)
        with pytest.raises(UserError, match=words):
            FileSource([str(folder)], "text").parts()
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="has the sets train, test"):
        FileSource([str(folder)], "text").parts()


def test_missing_libraries_files_and_keys_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt").write_text("x")
    write_lines(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\nno\n')
    for name, key, problem in (
        ("a.parquet", "text", "pip install pyarrow"),
        ("nothing*", "text", r"nothing\*: no such file"),
        ("a.txt", "text", "reads .jsonl"),
        ("a.jsonl", "body", r'a\.jsonl from 0 to \d+, document 0: the value of "body"'),
        ("b.jsonl", "text", r"b\.jsonl from 0 to \d+, line 2: not JSON \(.* at column 1\)$"),
    ):
        with pytest.raises(UserError, match=problem):
            read_all(FileSource([str(tmp_path / name)], key))


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"text": "a"\r\n', r"a, line 1: not JSON \(Expecting ',' delimiter at column 13\)$"),
        (b'{"text": "a\tb"}\n', r"a, line 1: not JSON \(Invalid control character at column 12\)$"),
    ],
)
def test_a_line_that_is_not_json_is_named_with_its_column(line, problem):
    with pytest.raises(UserError, match=problem):
        parse_json_object(line, "a, line 1")


def test_damaged_files_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    pytest.importorskip("pyarrow.parquet")
    lines = gzip.compress("\n".join(json.dumps({"text": text}) for text in TEXTS).encode())
    damaged = [("short.jsonl.gz", lines[:-30])]
    damaged += [(f"{at}.jsonl.gz", lines[:at] + bytes([lines[at] ^ 0xFF]) + lines[at + 1 :]) for at in range(10, 200)]
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "whole.parquet")
    pages = (tmp_path / "whole.parquet").read_bytes()
    damaged += [(f"{at}.parquet", pages[:at] + b"\xff" + pages[at + 1 :]) for at in (4, 34)]
    with pyarrow.OSFile(str(tmp_path / "whole.arrow"), "wb") as file:
        table = pyarrow.table({"text": TEXTS})
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    batches = (tmp_path / "whole.arrow").read_bytes()
    damaged += [(f"{size}.arrow", batches[:size]) for size in range(300, len(batches), 37)]
    num_read = 0
    for name, content in damaged:
        (tmp_path / name).write_bytes(content)
        try:
            num_read += read_all(FileSource([str(tmp_path / name)], "text")) is not None
        except UserError as error:
            assert str(error).startswith(str(tmp_path / name))
    assert num_read < 5


def test_a_source_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "my_source.py").write_text(
        "class Words:\n"
        "    def __init__(self, path):\n        self.path = path\n"
        "    def parts(self):\n        return ['a', 'b']\n"
        "    def read(self, part, first):\n        yield from [f'{self.path} {part} {n}' for n in range(first, 3)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = open_source(["name"], "text", "my_source:Words")
    assert read_all(source, 1) == ["name a 1", "name a 2", "name b 1", "name b 2"]
    for wrong in ("my_source:Nothing", "no_module:Words", "my_source", ":Words"):
        with pytest.raises(UserError, match=f"--document-source {wrong}: needed MODULE:CALLABLE"):
            open_source(["name"], "text", wrong)
    with pytest.raises(UserError, match="reads one name"):
        open_source(["a", "b"], "text", "my_source:Words")


# ---- runs

RUN = [*TINY, *"--tokenizer-type NullTokenizer --vocab-size 120 --train-iters 10 --dataloader-type external".split()]
RUN += "--document-streams 4 --eval-interval 4 --eval-iters 1 --reset-attention-mask --reset-position-ids".split()
KEEP = "--save ckpt --load ckpt --save-interval 100".split()


def test_runs_are_equal_after_a_kill_and_on_more_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(document_sources, "PART_BYTES", 2000)
    a, b, valid = (write_ids(tmp_path / f"{name}.jsonl", seed, 300) for seed, name in enumerate(("a", "b", "valid")))
    argv = [*RUN, "--train-data-path", "0.4", a, "0.6", b, "--valid-data-path", valid]
    expected = pretrain(argv, tmp_path / "whole")
    pretrain([*argv, *KEEP, "--exit-interval", "3"], tmp_path / "same")
    folder = tmp_path / "same/ckpt/iter_0000003"
    saved = common_state.parse(common_state.read(folder, read_index(folder)))[0].extra
    assert saved["streams"].keys() == {"train", "valid"}, "otherwise all text is read again"
    assert_equal_runs(pretrain([*argv, *KEEP], tmp_path / "same"), expected, 10)
    pretrain([*argv, *KEEP, "--exit-interval", "5"], tmp_path / "more", world_size=2)
    found, _ = pretrain([*argv, *KEEP], tmp_path / "more")
    every = [[record["lm loss"] for record in run if "lm loss" in record] for run in (found, expected[0])]
    assert every[0] == pytest.approx(every[1], rel=1e-6) and len(every[0]) > 10, "validation too"


def test_a_checkpoint_of_token_files_says_that_samples_are_skipped(tmp_path, capfd):
    argv = [*TINY, *"--vocab-size 120 --tokenizer-type NullTokenizer --train-iters 5 --eval-iters 0".split(), *KEEP]
    pretrain([*argv, "--mock-data", "--exit-interval", "3"], tmp_path)
    streamed = ["--dataloader-type", "external", "--train-data-path", write_ids(tmp_path / "a.jsonl", 1)]
    pretrain([*argv, *streamed, "--exit-interval", "4"], tmp_path)
    consumed = 3 * int(TINY[TINY.index("--global-batch-size") + 1])
    expected = f"text of --train-data-path continues; the {consumed} samples consumed so far are read"
    assert capfd.readouterr().err.count(expected) == 1
    pretrain([*argv, *streamed, "--exit-interval", "5"], tmp_path)
    err = capfd.readouterr().err
    assert "samples consumed so far" not in err and "the checkpoint was saved with" not in err
    packed = [*argv, *"--use-varlen-dataset --mock-data --moe-token-dispatcher-type alltoall".split()]
    pretrain([*packed, "--train-iters", "6", "--override-opt_param-scheduler"], tmp_path)
    other = "saved with --dataloader-type external, and this run has --use-varlen-dataset"
    assert capfd.readouterr().err.count(other) == 1


def test_changed_files_end_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(document_sources, "PART_BYTES", 2000)
    path = write_ids(tmp_path / "a.jsonl", 1, 300)
    argv = [*RUN, *KEEP, "--train-data-path", path]
    pretrain([*argv, "--exit-interval", "2"], tmp_path)
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(path, tmp_path / "moved/a.jsonl")
    assert len(pretrain([*argv, "--train-data-path", str(moved), "--exit-interval", "3"], tmp_path)[0]) == 3
    with open(path, "a") as file:
        file.write('{"text": "1"}\n')
    with pytest.raises(Exception, match="files were added, removed or changed in size"):
        pretrain(argv, tmp_path)


def test_streams_from_object_storage_over_a_bad_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(document_sources, "PART_BYTES", 2000)
    monkeypatch.setattr(object_storage, "_COPY_BYTES", 1000)
    monkeypatch.setattr(object_storage, "_FIRST_PAUSE_S", 0.01)
    write_ids(tmp_path / "a.jsonl", 1, 300)
    data, training = (lambda path: data_args(train_data_path=[path])), training_args(train_iters=1, global_batch_size=1)
    tokenizer = FixedTokenizer()
    tokenizer.tokenize = lambda text: [int(word) + 1 for word in text.split()]
    local = build_streams(data(str(tmp_path / "*.jsonl")), training, tokenizer, (100, 0, 0)).train
    with s3_server() as (client, proxy):
        bucket = Bucket(client, "streams", proxy)
        bucket.put("text/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
        proxy.cut_after, proxy.cuts = 700, 4
        remote = build_streams(data("s3://streams/text/*.jsonl"), training, tokenizer, (100, 0, 0)).train
        for index in range(100):
            np.testing.assert_array_equal(remote.tokens(index), local.tokens(index))
        assert proxy.cuts == 0
        pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
        pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "t.parquet", row_group_size=30)
        bucket.put("t.parquet", (tmp_path / "t.parquet").read_bytes())
        source = FileSource(["s3://streams/t.parquet"], "text")
        assert len(source.parts()) == 7 and read_all(source) == TEXTS
        bucket.put("t.parquet", (tmp_path / "t.parquet").read_bytes() + b" ")
        with pytest.raises(UserError, match="t.parquet: the object was replaced while it is in use"):
            read_all(source)
        with pytest.raises(UserError, match=r"--train-data-path: s3://streams/none\*: no such file"):
            build_streams(data("s3://streams/none*"), training, tokenizer, (100, 0, 0))

"""Text and conversations as samples of different lengths: index, ids and masks, files of every kind, errors."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from data_pipeline.corpora import data_args, training_args, write_chat_tokenizer, write_corpus

from arguments import parse_args
from moe_trainer.commands import inspect as inspect_data
from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.fingerprint import compare_fingerprints, make_fingerprint
from moe_trainer.data.loader import build_loader, make_packed_batch
from moe_trainer.data.packing import PackFormat
from moe_trainer.data.tokenizer import build_tokenizer
from moe_trainer.errors import UserError
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.length_histogram import read_histogram
from moe_trainer.training.check_files import check_files
from tests.arguments.test_tokens import TOY

QUESTION, ANSWER = {"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "the lazy dog"}
CHAT = [QUESTION, ANSWER]
RUN = [word for word in TOY if word != "--mock-data"]
TEXTS = ("the quick brown fox", "", "jumps over the lazy dog and the river", "dog</s>")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return str(write_chat_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer", None))


@pytest.fixture
def flags(tmp_path, tokenizer_folder):
    return {
        "tokenizer_type": "SFTTokenizer",
        "tokenizer_model": tokenizer_folder,
        "data_cache_path": str(tmp_path / "cache"),
        "split": "1,0,0",
        "seq_length": 64,
    }


@pytest.fixture
def tokenizer_words(tokenizer_folder):
    return ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer_folder]


def write_rows(path, rows) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(*conversations):
    return [{"messages": messages} for messages in conversations]


def build(flags, size=8, tokenizer=None, **more):
    data = data_args(**flags, **more)
    return build_datasets(data, training_args(), tokenizer or build_tokenizer(data), (size, 0, 0)).train


def kinds(test):
    return pytest.mark.parametrize("kind", [{"sft": True}, {"use_varlen_dataset": True}], ids=["sft", "varlen"])(test)


def test_rows_of_text(tmp_path, flags):
    """A sample ends with one end-of-document token; blank lines are no rows; samples repeat."""
    rows = [{"text": TEXTS[0]}, "\n", {"text": TEXTS[1], "id": 3}, "  \n", {"text": TEXTS[2]}, {"text": TEXTS[3]}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    train, tokenizer = build(flags, use_varlen_dataset=True, data_path=[path]), build_tokenizer(data_args(**flags))
    for index in range(8):
        ids = tokenizer.tokenize(TEXTS[index % 4])
        expected = ids if ids and ids[-1] == tokenizer.eod else [*ids, tokenizer.eod]
        expected = expected if len(expected) > 1 else [tokenizer.eod] * 2
        assert train.tokens(index).tolist() == expected
        assert train.length(index) == len(expected) - 1 and train.sample(index).loss_mask is None
    assert train.locate(2, 1) == f"{path}, line 5, token 1"
    files = sorted(os.path.basename(name) for name in os.listdir(flags["data_cache_path"]))
    assert [name.partition("-")[2] for name in files] == [
        "TextSequences-all-description.txt", "TextSequences-all-label_index.npy", "TextSequences-all-length_index.npy", "TextSequences-all-place_index.npy",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_equal_lines(tmp_path, flags, suffix):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": CHAT, "n": 1}, {"messages": [*CHAT, *CHAT], "n": 2}, {"messages": CHAT[:], "n": 3}]
    table = pyarrow.Table.from_pylist(rows)
    path = str(tmp_path / f"a.{suffix}")
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    lines = write_rows(tmp_path / "a.jsonl", rows)
    for kind in ({"sft": True}, {"use_varlen_dataset": True}):
        one, other = (build(flags, 3, data_path=[name], **kind) for name in (path, lines))
        for index in range(3):
            np.testing.assert_array_equal(one.tokens(index), other.tokens(index))
            np.testing.assert_array_equal(one.sample(index).loss_mask, other.sample(index).loss_mask)
    assert one.locate(2, 0) == f"{path}, row 3, token 0"


def test_conversations_and_their_masks(tmp_path, flags):
    """--sft: every system message begins a sample, which ends as its format does."""
    system = {"role": "system", "content": "brief"}
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [*CHAT, system, *CHAT, *CHAT]}, {"messages": CHAT}])
    train, tokenizer = build(flags, 3, sft=True, data_path=[path]), build_tokenizer(data_args(**flags))
    assert train.locate(1, 0) == f"{path}, line 1, conversation 2, token 0"
    expected = [CHAT, [system, *CHAT, *CHAT], CHAT]
    for index, messages in enumerate(expected):
        ids, offsets = tokenizer.tokenize_with_offsets(tokenizer.format.write(messages).text)
        ranges = tokenizer.format.write(messages).trained
        mask = [any(begin < stop and start < end for begin, end in ranges) for start, stop in offsets]
        assert train.tokens(index).tolist() == ids and train.sample(index).loss_mask.tolist() == mask
        assert 0 < sum(mask) < len(mask)


def test_long_samples_are_cut_and_counted(tmp_path, flags, caplog):
    """--use-varlen-dataset ends with the end-of-document token; --sft does not."""
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [*CHAT, *CHAT, *CHAT]}, {"messages": CHAT}])
    short = flags | {"seq_length": 13}
    whole, cut = build(flags, 2, sft=True, data_path=[path]), build(short, 2, sft=True, data_path=[path])
    assert f"{path}: 1 of 2 samples are cut to --seq-length 13" in caplog.text
    assert whole.length(0) > cut.length(0) == cut.length(1) == whole.length(1) == 13
    assert cut.tokens(0).tolist() == whole.tokens(0)[:14].tolist()
    assert cut.sample(0).loss_mask.tolist() == whole.sample(0).loss_mask[:14].tolist()
    eod = build_tokenizer(data_args(**flags)).eod
    short = flags | {"seq_length": 17}
    for limits in (short, flags):
        varlen = build(limits, 2, use_varlen_dataset=True, data_path=[path])
        for index in range(2):
            assert varlen.tokens(index)[-1] == eod
            assert (varlen.length(index) == 17) == (limits is short)
            assert not varlen.sample(index).loss_mask[:8].any()


def test_packed_batch_has_no_loss_on_prompts(tmp_path, flags):
    path = write_rows(tmp_path / "a.jsonl", chats(CHAT, [*CHAT, *CHAT]))
    data = data_args(**flags, sft=True, data_path=[path])
    train = build(flags, 2, sft=True, data_path=[path])
    fmt = batch_format(data, build_tokenizer(data))
    batch = make_packed_batch(train, [0, 1], fmt, PackFormat(128, sequence_multiple=8).pack)
    for index, start in enumerate(batch.packed.cu_seqlens_padded[:2]):
        length, mask = train.length(index), batch.loss_mask_BS[0, start:]
        assert mask[:length].tolist() == train.sample(index).loss_mask[1:].astype(float).tolist()
        assert not mask[length : batch.packed.padded_lengths[index]].any()


def test_samples_of_a_pack_are_tokenized_once(tmp_path, flags, monkeypatch):
    count = 200
    data = data_args(**flags, sft=True, data_path=[write_rows(tmp_path / "a.jsonl", chats(CHAT) * count)])
    tokenizer, calls = build_tokenizer(data), []
    tokenize = type(tokenizer).tokenize_with_offsets
    train = build_datasets(data, training_args(), tokenizer, (count, 0, 0)).train
    monkeypatch.setattr(
        type(tokenizer), "tokenize_with_offsets", lambda self, text: calls.append(text) or tokenize(self, text)
    )
    make_packed_batch(train, range(count), batch_format(data, tokenizer), PackFormat(4096, sequence_multiple=1).pack)
    assert len(calls) == count


LONG_QUESTION = [{"role": "user", "content": "the fox? " * 40}, ANSWER]


@kinds
def test_answers_that_are_cut_off_are_counted(tmp_path, flags, caplog, kind):
    path = write_rows(tmp_path / "a.jsonl", chats(LONG_QUESTION, CHAT))
    train = build(flags, 2, **kind, data_path=[path])
    assert f"{path}: 1 of 2 samples have no trained token: their answers begin after --seq-length 64" in caplog.text
    assert [train.sample(index).loss_mask[1:].any() for index in range(2)] == [False, True]
    write_rows(tmp_path / "b.jsonl", chats(LONG_QUESTION) * 3)
    with pytest.raises(UserError, match="b.jsonl: 3 of 3 samples have no trained token"):
        build(flags, 2, **kind, data_path=[str(tmp_path / "b.jsonl")])


@kinds
def test_untrained_samples_are_those_without_a_label(tmp_path, flags, caplog, kind):
    """At every length at which a conversation can be cut."""
    path = write_rows(tmp_path / "a.jsonl", [*chats(CHAT), {"text": "dog"}][: 1 + ("sft" not in kind)])
    whole = build(flags, 1, **kind, data_path=[path])
    first = int(whole.sample(0).loss_mask[1:].argmax()) + 1
    for seq_length, is_trained in ((first - 1, False), (first, True)):
        caplog.clear()
        try:
            sample = build(flags | {"seq_length": seq_length}, 1, **kind, data_path=[path]).sample(0)
            assert sample.loss_mask[1:].any() == is_trained
        except UserError:
            assert "sft" in kind and not is_trained
        assert ("no trained token" in caplog.text) == (not is_trained and "sft" not in kind)


def test_end_token_in_place_of_a_prompt_has_no_loss(tmp_path, flags):
    """The end-of-document token of a cut sample has the loss of the token that it replaces."""
    path = write_rows(tmp_path / "a.jsonl", [*chats([*CHAT, *CHAT, *CHAT]), {"text": "dog"}])
    made = {"tokenizer": build_tokenizer(data_args(**flags)), "use_varlen_dataset": True, "data_path": [path]}
    whole = build(flags, 1, **made).sample(0)
    for seq_length in range(4, 30):
        assert len(whole.ids) > seq_length + 1
        ids, mask = build(flags | {"seq_length": seq_length}, 1, **made).sample(0)
        assert ids[:-1].tolist() == whole.ids[:seq_length].tolist() and ids[-1] == whole.ids[-1]
        assert mask.tolist() == whole.loss_mask[: seq_length + 1].tolist(), seq_length


def test_padded_batch(tmp_path, flags):
    """--varlen-sbhd-validation: a row for every sample, with its tokens, labels and mask, then padding."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": TEXTS[0]}, *chats(CHAT), {"text": TEXTS[2] * 9}])
    data = data_args(**flags, use_varlen_dataset=True, varlen_sbhd_validation=True, data_path=[path])
    tokenizer = build_tokenizer(data)
    train = build_datasets(data, training_args(), tokenizer, (3, 0, 0)).train
    (batch,) = build_loader(train, 3, 0, 1, fmt=batch_format(data, tokenizer))
    assert batch.tokens_BS.shape == batch.labels_BS.shape == (3, 64) and batch.packed is None
    assert batch.lengths == tuple(map(train.length, range(3))) and batch.lengths[2] == 64
    assert (batch.position_ids_BS == np.arange(64)).all()
    for row, length in enumerate(batch.lengths):
        ids, mask = train.tokens(row), train.sample(row).loss_mask
        assert batch.tokens_BS[row, :length].tolist() == ids[:-1].tolist()
        assert batch.labels_BS[row, :length].tolist() == ids[1:].tolist()
        assert batch.loss_mask_BS[row, :length].tolist() == ([1] * length if mask is None else mask[1:].tolist())
        assert not batch.tokens_BS[row, length:].any() and not batch.loss_mask_BS[row, length:].any()


def test_blends_splits_and_token_files(tmp_path, flags):
    text = write_rows(tmp_path / "a.jsonl", [{"text": f"dog {number}"} for number in range(10)])
    tokens = write_corpus(tmp_path / "b", [5] * 4, vocab_size=300)
    flags = flags | {"split": "80,20,0"}
    data = data_args(**flags, use_varlen_dataset=True, data_path=["1", text, "1", tokens])
    found = build_datasets(data, training_args(), build_tokenizer(data), (8, 2, 0))
    names = [found.train.locate(index, 0).split(", ")[0] for index in range(8)]
    assert sorted(map(os.path.basename, names)) == ["a.jsonl"] * 4 + ["b.bin"] * 4
    assert {found.valid[0].locate(index, 0).split(", ")[1] for index in range(2)} == {"line 9", "sequence 3"}


def test_index_is_built_once_and_checked(tmp_path, flags, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    data = data_args(**flags, use_varlen_dataset=True, data_path=[path])
    tokenizer, calls = build_tokenizer(data), []
    tokenize = type(tokenizer).tokenize
    monkeypatch.setattr(type(tokenizer), "tokenize", lambda self, text: calls.append(text) or tokenize(self, text))

    def build_rank(is_builder):
        run_once = (lambda write: write()) if is_builder else (lambda write: None)
        return build_datasets(data, training_args(), tokenizer, (4, 0, 0), run_once=run_once).train

    build_rank(True)
    assert calls == list(TEXTS)
    train = build_rank(False)
    assert len(calls) == 4, "another rank maps the index"
    train.sample(2)
    assert calls[4:] == [TEXTS[2]]
    monkeypatch.setattr(type(tokenizer), "tokenize", lambda self, text: [5])
    with pytest.raises(UserError, match=r"line 1: 2 tokens, \d+ when its index was built: .* delete the index in"):
        build_rank(True).tokens(0)


@pytest.mark.parametrize(
    "row, problem",
    [
        ('{"messages": [\n', "line 2: not JSON"),
        ("[1]\n", "line 2: needed a JSON object, found list"),
        ('{"text": "a \\ud800 b"}\n', "line 2: has half of a surrogate pair"),
        ({"text": "a"}, 'line 2: "messages" must be a list of turns, found nothing'),
        ({"conversations": []}, "line 2: .* found nothing; --use-varlen-dataset in place of --sft reads such rows"),
        ({"prompt": "a", "answer": "b"}, "line 2: .* found nothing; --use-varlen-dataset in place of --sft"),
        ({"messages": []}, "line 2: .* found an empty list$"),
        ({"messages": [QUESTION]}, "line 2: the conversation has no turn of the assistant"),
        ({"messages": [*CHAT, {"role": "system", "content": ""}, QUESTION]}, "line 2, conversation 2: .* no turn of"),
        ({"messages": [{"role": "user"}, {"content": "a"}]}, 'line 2: turn 2 of "messages" has no "role"'),
    ],
)
def test_bad_lines_are_named_before_training(tmp_path, flags, row, problem):
    path = write_rows(tmp_path / "a.jsonl", [*chats(CHAT), row])
    with pytest.raises(UserError, match=f"a.jsonl, {problem}"):
        build(flags, sft=True, data_path=[path])


def test_bad_files(tmp_path, flags):
    pytest.importorskip("pyarrow")
    for existing in ("a.jsonl.gz", "a.parquet", "a.arrow"):
        (tmp_path / existing).write_bytes(b"nonsense")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, problem in (
        ("absent.jsonl", "--data-path: .*absent.jsonl: no such file"),
        ("a.jsonl.gz", "a compressed file cannot be read from the middle"),
        ("prefix", "needed a file .jsonl, .json, .ndjson, .parquet, .arrow"),
        ("a.parquet", "a.parquet: not a Parquet file"),
        ("a.arrow", "a.arrow: not an Arrow file"),
        ("empty.jsonl", "empty.jsonl: there is nothing to read"),
    ):
        with pytest.raises(UserError, match=problem):
            build(flags, sft=True, data_path=[str(tmp_path / name)])


def test_conversations_need_their_tokenizer(tmp_path, flags):
    path = write_rows(tmp_path / "a.jsonl", chats(CHAT))
    with pytest.raises(UserError, match="a.jsonl, line 1: conversations need --tokenizer-type SFTTokenizer"):
        build(flags | {"tokenizer_type": "HuggingFaceTokenizer"}, use_varlen_dataset=True, data_path=[path])


@kinds
def test_replaced_text_is_noticed(tmp_path, flags, kind):
    path = write_rows(tmp_path / "a.jsonl", chats(CHAT))
    data = data_args(**flags, **kind, data_path=[path])
    before = make_fingerprint(data, ())
    assert len(before["data"]) == 1 and compare_fingerprints(before, make_fingerprint(data, ())) == []
    write_rows(tmp_path / "a.jsonl", chats(CHAT * 2))
    assert "other content in" in compare_fingerprints(before, make_fingerprint(data, ()))[0]


def test_index_files_that_do_not_fit_are_an_error(tmp_path, flags):
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    build(flags, None, use_varlen_dataset=True, data_path=[path])
    for name in ("place", "length", "label"):
        (file,) = (tmp_path / "cache").glob(f"*-{name}_index.npy")
        content = file.read_bytes()
        np.save(file, np.load(file)[:2])
        with pytest.raises(UserError, match="the files of its index do not fit; delete those in"):
            build(flags, None, use_varlen_dataset=True, data_path=[path])
        file.write_bytes(content)


def test_another_file_or_tokenizer_makes_another_index(tmp_path, flags):
    """Also a file that is older than the index."""
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    assert len(build(flags, None, use_varlen_dataset=True, data_path=[path])) == 4
    older = write_rows(tmp_path / "b.jsonl", [{"text": text} for text in TEXTS * 2])
    os.utime(older, (1, 1))
    os.replace(older, path)
    assert len(build(flags, None, use_varlen_dataset=True, data_path=[path])) == 8
    before = len(os.listdir(flags["data_cache_path"]))
    build(flags, None, use_varlen_dataset=True, data_path=[path], sft_tokenizer_prompt_format="identity")
    assert len(os.listdir(flags["data_cache_path"])) > before


def test_inspection_shows_what_is_trained(tmp_path, tokenizer_words, capsys):
    path = write_rows(tmp_path / "a.jsonl", chats(CHAT, CHAT))
    assert inspect_data.main([path, "--sft", "--preview", "1", *tokenizer_words]) == 0
    *numbers, first, masked, trained = capsys.readouterr().out.splitlines()
    assert "2 documents, 28 tokens (text), 8 trained" in numbers[0] and "repeat an earlier one" in numbers[-1]
    assert first.startswith(f"{path}, line 1: ") and first.endswith("tokens, 4 trained"), first
    assert masked == "  masked  '<SPECIAL_11>User\\nthe fox?\\n<SPECIAL_11>Assistant\\n'"
    assert trained == "  trained 'the lazy dog\\n'"
    out = tmp_path / "out.json"
    assert inspect_data.main([path, "--sft", *tokenizer_words, "--json", str(out), "--strict"]) == 1
    (found,) = json.loads(out.read_text())
    assert (found["documents"], found["longest"], found["trained"], found["duplicates"]) == (2, 14, 8, 1)
    bad = write_rows(tmp_path / "b.jsonl", chats(CHAT, [QUESTION]))
    assert inspect_data.main([bad, "--sft", *tokenizer_words]) == 2
    assert "b.jsonl, line 2: the conversation has no turn" in capsys.readouterr().err
    assert inspect_data.main([path, "--sft"]) == 2
    assert "text needs --tokenizer-type" in capsys.readouterr().err


def test_lengths_of_text_are_written_for_plans(tmp_path, flags, tokenizer_words, capsys):
    """As the index of the run has them; corpus names the way, since a plan has no tokenizer."""
    chat = write_rows(tmp_path / "a.jsonl", chats(CHAT, CHAT, CHAT * 3))
    text = write_rows(tmp_path / "b.jsonl", [{"text": text} for text in TEXTS])
    tokens, table = write_corpus(tmp_path / "c", [5, 70]), str(tmp_path / "lengths.csv")
    for words, kind, data, more in (
        ([chat, "--sft"], {"sft": True}, chat, ()),
        ([text, tokens], {"use_varlen_dataset": True}, text, (5, 70)),
    ):
        assert inspect_data.main([*words, *tokenizer_words, "--length-histogram", table]) == 0, capsys.readouterr().err
        expected = Counter([*build(flags, **kind, data_path=[data])._sequences.index[1].tolist(), *more])
        assert dict(read_histogram(table).counts) == expected and len(expected) > 1, kind
    argv = [*RUN, *tokenizer_words, "--length-histogram", "corpus", "--world-size", "1"]
    for words in (["--sft", "--data-path", chat], ["--use-varlen-dataset", "--data-path", text]):
        with pytest.raises(ValueError, match="is text, and only a tokenizer gives its lengths.*inspect_data.py"):
            plan_of_flags([*argv, *words])


def test_check_files_tokenizes_the_first_samples(tmp_path, flags, tokenizer_words):
    path = write_rows(tmp_path / "a.jsonl", chats(CHAT, CHAT * 9))
    argv = [*RUN, *tokenizer_words, "--sft", "--data-path", path]

    def check(*more):
        return check_files(parse_args([*argv, *more], 1))

    checked = check()
    assert any(f"{path}: the first 2 samples have" in line and "1 are longer" in line for line in checked.lines)
    assert checked.problems == [] and not (tmp_path / "a.jsonl.cache").exists()
    write_rows(tmp_path / "a.jsonl", chats(CHAT, [QUESTION]))
    (problem,) = check().problems
    assert problem.flags == ("--data-path",) and "a.jsonl, line 2: the conversation has no turn" in problem.message
    write_rows(tmp_path / "a.jsonl", chats(LONG_QUESTION, CHAT))
    checked = check()
    assert checked.problems == []
    assert any("WARNING" in line and "1 of the first 2 samples have no" in line for line in checked.lines)
    first = int(build(flags, 1, sft=True, data_path=[path]).sample(1).loss_mask[1:].argmax()) + 1
    write_rows(tmp_path / "a.jsonl", chats(CHAT))
    assert check("--seq-length", str(first)).problems == []
    (problem,) = check("--seq-length", str(first - 1)).problems
    assert problem.flags == ("--data-path",) and "no trained token" in problem.message


def test_check_files_counts_cut_sequences(tmp_path):
    prefix = write_corpus(tmp_path / "a", [5, 200, 5], vocab_size=100)
    argv = [*RUN, "--use-varlen-dataset", "--data-path", prefix]
    argv += "--tokenizer-type NullTokenizer --vocab-size 127 --split 1,0,0 --eval-iters 0".split()
    cut = [line for line in check_files(parse_args(argv, 1)).lines if "cut" in line]
    assert cut == [f"data: {prefix}: 1 of 3 sequences are longer than --seq-length and will be cut"]

"""Every tokenizer against its own library; clear errors; the description that enters cache names."""

import base64
import json
import shlex

import pytest
from commands import call_main
from data_pipeline.corpora import data_args, train_byte_level_bpe

from moe_trainer.commands import train_tokenizer
from moe_trainer.data import tokenizer_training
from moe_trainer.data.tokenizer import build_tokenizer

TEXTS = [
    "The red boat counts to 593.",
    "  two  blanks ",
    "",
    "tab\tand\nnewline",
    "\u00e9\u00df\u4e2d\U0001f600 <|endoftext|> x",
]
CORPUS = [f"the quick brown fox number {i} jumps over the lazy dog and the river" for i in range(300)]


def build(kind, model=None, **flags):
    return build_tokenizer(
        data_args(tokenizer_type=kind, tokenizer_model=None if model is None else str(model), **flags)
    )


def write_json_tokenizer(folder, config, template=None):
    """A small byte-level BPE folder, as Hugging Face models have it."""
    tokenizers = pytest.importorskip("tokenizers")
    encoder = train_byte_level_bpe(CORPUS, ["<s>", "</s>", "<pad>", "<|endoftext|>"])
    if template:
        encoder.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0)])
    folder.mkdir()
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
NEW_EOS = {"content": "<|new_eos|>", "lstrip": False, "normalized": False, "rstrip": False}
NEW_TOKENS = {
    "400": {"content": "<|new_eos|>", "special": True},
    "401": {"content": "<|new_pad|>", "special": True},
    "402": {"content": "<tool>", "special": False},
}
CONFIGS = {
    "plain": ({**FAST, "eos_token": "</s>", "pad_token": "<pad>"}, None),
    "template": ({**FAST, "eos_token": "</s>", "bos_token": "<s>"}, "<s> $A"),
    "no_eos": ({**FAST, "sep_token": "</s>"}, None),
    "objects": (
        {
            **FAST,
            "eos_token": {"__type": "AddedToken", **NEW_EOS},
            "pad_token": "<|new_pad|>",
            "added_tokens_decoder": NEW_TOKENS,
        },
        None,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("include_special", [True, False])
def test_hugging_face_folder_equals_transformers(tmp_path, name, include_special):
    transformers = pytest.importorskip("transformers")
    folder = write_json_tokenizer(tmp_path / "tok", *CONFIGS[name])
    ours = build("HuggingFaceTokenizer", folder, tokenizer_hf_no_include_special_tokens=not include_special)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in [*TEXTS, "a <tool> b"]:
        assert ours.tokenize(text) == theirs(text, add_special_tokens=include_special).input_ids, text
    assert ours.vocab_size == len(theirs)
    assert ours.eod == (theirs.eos_token_id if theirs.eos_token_id is not None else theirs.sep_token_id)
    assert ours.pad == theirs.pad_token_id
    assert ours.plain_text(ours.tokenize("the lazy dog")).endswith("the lazy dog")


def test_recorded_tokenizer_equals_transformers(shared):
    transformers = pytest.importorskip("transformers")
    folder = shared / "golden" / "dataset" / "tokenizer"
    for path in (folder, folder / "tokenizer.json"):
        ours = build("HuggingFaceTokenizer", path)
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        assert [ours.tokenize(text) for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
        assert (ours.vocab_size, ours.eod, ours.pad) == (500, 0, 1)


@pytest.mark.parametrize(
    ("template", "switch", "warned"), [(None, True, "not add"), ("<s> $A", True, None), ("<s> $A", False, "does add")]
)
def test_tokenizer_json_template_decides_about_bos(tmp_path, caplog, template, switch, warned):
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": switch}
    folder = write_json_tokenizer(tmp_path / "a", config, template)
    assert (build("HuggingFaceTokenizer", folder).tokenize("the")[0] == 0) == (template is not None)
    assert caplog.text == "" if warned is None else warned in caplog.text


def test_slow_hugging_face_tokenizers_go_through_transformers(tmp_path):
    pytest.importorskip("transformers")
    folder = write_json_tokenizer(tmp_path / "tok", *CONFIGS["plain"])
    slow = build("HuggingFaceTokenizer", folder, tokenizer_hf_no_use_fast=True)
    fast = build("HuggingFaceTokenizer", folder)
    assert [slow.tokenize(text) for text in TEXTS] == [fast.tokenize(text) for text in TEXTS]
    assert (slow.vocab_size, slow.eod, slow.pad) == (fast.vocab_size, fast.eod, fast.pad)


def test_added_special_tokens(tmp_path):
    folder = write_json_tokenizer(tmp_path / "tok", *CONFIGS["plain"])
    plain, more = build("HuggingFaceTokenizer", folder), build("HuggingFaceTokenizer", folder, special_tokens=["<x>"])
    assert more.vocab_size == plain.vocab_size + 1
    assert more.tokenize("the<x>dog") == [*plain.tokenize("the"), plain.vocab_size, *plain.tokenize("dog")]


def test_invalid_hugging_face_tokenizers_are_rejected(tmp_path):
    write_json_tokenizer(tmp_path / "tok", {}).joinpath("tokenizer.json").write_text("{")
    write_json_tokenizer(tmp_path / "other", {}).joinpath("tokenizer_config.json").write_text("{")
    for folder, problem in (
        ("tok", r"--tokenizer-model .*tokenizer\.json cannot be read"),
        ("other", r"tokenizer_config\.json: cannot be read"),
        ("absent", "no such file or folder"),
    ):
        with pytest.raises(ValueError, match=problem):
            build("HuggingFaceTokenizer", tmp_path / folder)
    with pytest.raises(ValueError, match="needs --tokenizer-model"):
        build("HuggingFaceTokenizer")


def test_hub_name_offline_gives_download_instructions(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"not in the local cache(.|\n)*hf download no-owner/no-model tokenizer\.json"):
        build("HuggingFaceTokenizer", "no-owner/no-model")


def test_hub_name_from_the_local_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    folder = write_json_tokenizer(tmp_path / "tok", *CONFIGS["plain"])
    monkeypatch.setattr(hub, "hf_hub_download", lambda name, file: cached(hub, folder / file))
    ours = build("HuggingFaceTokenizer", "some/model")
    assert ours.tokenize("the") == build("HuggingFaceTokenizer", folder).tokenize("the")
    assert ours.unique_identifiers["tokenizer_path"] == "some/model"


def cached(hub, path):
    if not path.exists():
        raise hub.errors.LocalEntryNotFoundError("offline")
    return str(path)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    library = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("sp") / "m"
    settings = {"vocab_size": 120, "model_type": "bpe", "pad_id": 3, "minloglevel": 2}
    library.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_prefix=str(prefix), **settings)
    return f"{prefix}.model"


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_equals_the_library(sentencepiece_model, kind):
    import sentencepiece

    ours = build(kind, sentencepiece_model)
    theirs = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_model)
    assert [ours.tokenize(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert (ours.vocab_size, ours.eod, ours.pad) == (120, theirs.eos_id(), 3)


def test_sentencepiece_ids_become_text_again(sentencepiece_model):
    flags = {"special_tokens": ["<x>"], "tokenizer_sentencepiece_legacy": True}
    tokenizer = build("Llama2Tokenizer", sentencepiece_model, **flags)
    assert tokenizer.decode(tokenizer.tokenize("the dog<x><x>the dog")) == "the dog<x><x>the dog"
    assert tokenizer.decode([*tokenizer.tokenize("the dog"), 999, -1, tokenizer.eod]) == "the dog"


def test_sentencepiece_special_tokens_need_legacy(sentencepiece_model):
    with pytest.raises(ValueError, match="--tokenizer-sentencepiece-legacy"):
        build("Llama2Tokenizer", sentencepiece_model, special_tokens=["<x>"])
    plain = build("Llama2Tokenizer", sentencepiece_model)
    flags = {"special_tokens": ["<x>", "<xy>", "</s>"], "tokenizer_sentencepiece_legacy": True}
    ours = build("Llama2Tokenizer", sentencepiece_model, **flags)
    assert ours.vocab_size == 122
    the, dog = plain.tokenize("the"), plain.tokenize("dog")
    joined = ours.tokenize("the<xy>dog</s>")
    assert joined[: len(the)] == the and joined[len(the)] == 121 and joined[-1] == plain.eod
    assert joined[len(the) + 1 : -1] in (dog, dog[1:])


def test_sentencepiece_keeps_extra_whitespace_on_request(sentencepiece_model):
    keep = build("Llama2Tokenizer", sentencepiece_model, tokenizer_sentencepiece_ignore_extra_whitespaces=False)
    drop = build("Llama2Tokenizer", sentencepiece_model)
    assert drop.tokenize("the   dog") == drop.tokenize("the dog") == keep.tokenize("the dog")
    assert len(keep.tokenize("the   dog")) == len(drop.tokenize("the dog")) + 2


def test_unreadable_sentencepiece(tmp_path):
    (tmp_path / "m.model").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"m\.model: not a SentencePiece model"):
        build("Llama2Tokenizer", tmp_path / "m.model")
    with pytest.raises(ValueError, match="no such file"):
        build("Llama2Tokenizer", tmp_path / "absent")


def write_tiktoken(path, extra):
    tokens = [base64.b64encode(token).decode() for token in [*(bytes([i]) for i in range(256)), *extra]]
    if path.suffix == ".json":
        path.write_text(json.dumps([{"rank": i, "token_bytes": token} for i, token in enumerate(tokens)]))
    else:
        path.write_text("".join(f"{token} {i}\n" for i, token in enumerate(tokens)))
    return path


@pytest.mark.parametrize("name", ["v.json", "v.tiktoken"])
@pytest.mark.parametrize("pattern", ["v1", "v2", None])
def test_tiktoken(tmp_path, name, pattern):
    pytest.importorskip("tiktoken")
    path = write_tiktoken(tmp_path / name, [b"th", b"the", b" t", b"12"])
    flags = {"tiktoken_num_special_tokens": 10, "vocab_size": 270, "tiktoken_pattern": pattern}
    ours = build("TikTokenizer", path, **flags)
    assert (ours.vocab_size, ours.eod, ours.pad) == (270, 2, 4)
    assert ours.tokenize("the") == [10 + 257]
    assert ours.tokenize("<s>12</s>") == [1, 10 + ord("1"), 10 + ord("2"), 2]  # digits stay single in both patterns
    assert all(ours.plain_text(ours.tokenize(text)) == text for text in TEXTS)
    with pytest.raises(ValueError, match="found 260 tokens.*needs 1000"):
        build("TikTokenizer", path, tiktoken_num_special_tokens=10, vocab_size=1010)
    with pytest.raises(ValueError, match="missing .'<unk>'"):
        build("TikTokenizer", path, special_tokens=["<s>"])


def test_unreadable_tiktoken(tmp_path):
    (tmp_path / "v.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"v\.json: not a tiktoken vocabulary"):
        build("TikTokenizer", tmp_path / "v.json")
    (tmp_path / "v.tiktoken").write_text("QQ== 1\n")
    with pytest.raises(ValueError, match="ranks must count up"):
        build("TikTokenizer", tmp_path / "v.tiktoken", vocab_size=1001)


def test_gpt2_equals_the_library(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=330, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(tmp_path))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    ours = build("GPT2BPETokenizer", **files)
    theirs = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    theirs.add_special_tokens(["<|endoftext|>"])
    assert [ours.tokenize(text) for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]
    assert ours.eod == trained.token_to_id("<|endoftext|>") and ours.vocab_size == trained.get_vocab_size()
    assert ours.plain_text(ours.tokenize("the lazy dog")) == "the lazy dog"
    assert build(None, **files).vocab_size == ours.vocab_size  # Megatron's default type
    with pytest.raises(ValueError, match="needs --merge-file"):
        build("GPT2BPETokenizer", vocab_file=files["vocab_file"])
    with pytest.raises(ValueError, match="--vocab-file .*absent: no such file"):
        build("GPT2BPETokenizer", vocab_file=str(tmp_path / "absent"), merge_file=files["merge_file"])
    (tmp_path / "vocab.json").write_text("nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        build("GPT2BPETokenizer", **files)


def test_null_tokenizer():
    ours = build("NullTokenizer", vocab_size=511)
    assert (ours.vocab_size, ours.eod, ours.pad) == (511, 510, -1)
    assert ours.tokenize("3 1 2") == [3, 1, 2]
    assert build("NullTokenizer", vocab_size=511, null_tokenizer_eod_id=7).eod == 7
    with pytest.raises(ValueError, match="ids separated by single blanks"):
        ours.tokenize("a b")
    with pytest.raises(ValueError, match="stand for no text"):
        ours.byte_lengths()
    with pytest.raises(ValueError, match="needs --vocab-size"):
        build("NullTokenizer")
    with pytest.raises(ValueError, match="--null-tokenizer-eod-id 511 lies outside --vocab-size 511"):
        build("NullTokenizer", vocab_size=511, null_tokenizer_eod_id=511)


@pytest.mark.parametrize(("kind", "product"), [("BertWordPieceCase", "BERT"), ("MultimodalTokenizer", "multimodal")])
def test_tokenizers_of_other_products_are_rejected_by_name(kind, product):
    with pytest.raises(ValueError, match=f"--tokenizer-type {kind} belongs to {product}"):
        build(kind)


def test_description_of_the_tokenizer(shared, monkeypatch):
    monkeypatch.chdir(shared)
    recorded = json.loads(next((shared / "golden/dataset/train_cache").glob("*description.txt")).read_text())
    ours = build("HuggingFaceTokenizer", "golden/dataset/tokenizer").unique_identifiers
    assert json.dumps(ours) == json.dumps(recorded["tokenizer"])


def test_tokenizer_library_is_read_from_metadata(tmp_path, sentencepiece_model):
    def build_by(name, text=None):
        if text:
            (tmp_path / name).write_text(text)
        return build("HuggingFaceTokenizer", sentencepiece_model, metadata_path=str(tmp_path / name))

    assert build_by("meta.json", '{"library": "sentencepiece"}').vocab_size == 120
    with pytest.raises(ValueError, match="library multimodal is not for text"):
        build_by("meta.json", '{"library": "multimodal"}')
    with pytest.raises(ValueError, match="--tokenizer-metadata .*absent"):
        build_by("absent")


def num_bytes(tokenizer, text):
    lengths = tokenizer.byte_lengths()
    return sum(lengths[number] for number in tokenizer.tokenize(text))


def test_byte_lengths_of_tokens_add_up_to_the_text(tmp_path, sentencepiece_model):
    pytest.importorskip("tiktoken")
    folder = write_json_tokenizer(tmp_path / "tok", CONFIGS["template"][0], CONFIGS["template"][1])
    vocabulary = write_tiktoken(tmp_path / "v.json", [b"th", b"the", b" t", b"12"])
    byte_level = [
        build("HuggingFaceTokenizer", folder),
        build("HuggingFaceTokenizer", folder, tokenizer_hf_no_use_fast=True),
        build("TikTokenizer", vocabulary, tiktoken_num_special_tokens=10, vocab_size=270),
    ]
    for tokenizer in byte_level:
        for text in TEXTS[:4]:
            assert num_bytes(tokenizer, text) == len(text.encode())  # a begin token counts none
    assert num_bytes(byte_level[0], TEXTS[4]) == len(TEXTS[4].encode()) - len("<|endoftext|>")
    pieces = build("SentencePieceTokenizer", sentencepiece_model)
    assert num_bytes(pieces, "the lazy dog") == len(" the lazy dog")  # SentencePiece's own blank before a text
    assert num_bytes(pieces, "the \u4e2d") == len(" the ")  # an unknown character
    lengths = pieces.byte_lengths()
    assert lengths[pieces.eod] == lengths[pieces.pad] == 0 and len(lengths) == 120


def test_byte_lengths_with_byte_fallback_and_wordpiece(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581theogd", "\u2581the"]
    model = tokenizers.models.BPE(
        {name: number for number, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
    )
    encoder = tokenizers.Tokenizer(model)
    encoder.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    decoders = tokenizers.decoders
    encoder.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    path = tmp_path / "tokenizer.json"
    encoder.save(str(path))
    assert num_bytes(build("HuggingFaceTokenizer", path), "the dog \u4e2d") == len("the dog \u4e2d".encode())
    encoder.decoder = decoders.WordPiece()
    encoder.save(str(path))
    with pytest.raises(ValueError, match=r"decoder \(WordPiece\) does not say which bytes"):
        build("HuggingFaceTokenizer", path).byte_lengths()


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_trained_tokenizer_is_what_its_flags_name(tmp_path, capsys, kind):
    """It encodes what it has not seen, and has an end-of-document token and the asked size."""
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in CORPUS))
    (tmp_path / "b.txt").write_text("\n\n".join(CORPUS))
    words = ["--input", str(tmp_path / "*.*"), "--json-keys", "body", "--vocab-size", 320, "--tokenizer-type", kind]
    done = call_main(train_tokenizer.main, [*words, "--output-dir", tmp_path / "made here"], capsys)
    assert done.returncode == 0, done.stderr
    flags = dict(zip(*[iter(shlex.split(done.stdout))] * 2))
    assert flags["--tokenizer-type"] == kind
    tokenizer = build(kind, flags["--tokenizer-model"])
    assert tokenizer.vocab_size == 320 and tokenizer.eod is not None
    decode = tokenizer._model.decode if kind == "SentencePieceTokenizer" else tokenizer.plain_text
    assert [decode(tokenizer.tokenize(text)) for text in TEXTS[:4]] == TEXTS[:4]
    again = call_main(train_tokenizer.main, [*words, "--output-dir", tmp_path / "made here"], capsys)
    assert again.returncode == 2 and "there is a tokenizer." in again.stderr


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
@pytest.mark.parametrize(
    "text, size, message",
    [
        ("", 400, "--input: the files have no text"),
        ("a b", 0, "0 must be above 0"),
        ("a b", 200, "are needed, for bytes"),
        ("a b", 9999, "9999"),
        ("a b", 2**31 - 1, "must be above 0 and at most"),
        ("a b", 10**30, "must be above 0 and at most"),
    ],
)
def test_tokenizer_that_cannot_be_trained_writes_nothing(tmp_path, capsys, kind, text, size, message):
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.txt").write_text(text)
    words = ["--input", tmp_path / "a.txt", "--vocab-size", size, "--output-dir", tmp_path / "made"]
    done = call_main(train_tokenizer.main, [*words, "--tokenizer-type", kind], capsys)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "made").exists()


def test_folder_is_checked_before_a_tokenizer_is_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokenizer_training, "train_sentencepiece", None)
    file, other = tmp_path / "a.txt", tmp_path / "of_a_model"
    file.write_text("a b")
    other.mkdir()
    (other / "tokenizer_config.json").touch()  # next to a vocab.json, for example
    no_folder = f"{file} is no folder"
    for folder, problem in ((file, no_folder), (file / "made", no_folder), (other, "there is a tokenizer_config.json")):
        words = ["--input", file, "--vocab-size", 300, "--output-dir", folder]
        done = call_main(train_tokenizer.main, words, capsys)
        assert done.returncode == 2 and f"--output-dir {folder}: {problem}" in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def test_tokenizer_is_trained_on_lines_of_any_length(tmp_path, capsys, kind):
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abcdefghijklm nopqrstuvwxyz" * 10_000}))
    words = ["--input", tmp_path / "a.jsonl", "--vocab-size", 290, "--output-dir", tmp_path / "made"]
    done = call_main(train_tokenizer.main, [*words, "--tokenizer-type", kind], capsys)
    assert done.returncode == 0, done.stderr

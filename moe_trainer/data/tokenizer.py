"""Tokenizers: one small interface over each library, and the choice among them by `--tokenizer-type`.

A `Tokenizer` turns text into ids (`tokenize`) and knows `vocab_size`, `eod` (appended to documents, and the
token that the reset flags look for) and `pad`. `unique_identifiers` is what Megatron writes about its tokenizer into
the description of an index cache; it is made from the flags, in Megatron's order, so that caches are shared. (The
order is verified against recorded caches for HuggingFaceTokenizer; for the others it follows the same source's
argument lists.)

The libraries live in `tokenizer_libraries.py` and are imported when chosen.
"""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any, Protocol

from arguments.data import DataArgs
from arguments.regular_file import regular_file

_MEGATRON_CLASS = "megatron.core.tokenizers.text.text_tokenizer.MegatronTokenizerText"
_OTHER_PRODUCTS = MappingProxyType(
    {
        "BertWordPieceLowerCase": "BERT",
        "BertWordPieceCase": "BERT",
        "MultimodalTokenizer": "multimodal models",
        "NullMultimodalTokenizer": "multimodal models",
    }
)
_LIBRARY_OF_TYPE = MappingProxyType(
    {
        "SentencePieceTokenizer": "sentencepiece",
        "GPTSentencePieceTokenizer": "sentencepiece",
        "Llama2Tokenizer": "sentencepiece",
        "HuggingFaceTokenizer": "huggingface",
        "SFTTokenizer": "sft",
        "TikTokenizer": "tiktoken",
        "GPT2BPETokenizer": "megatron",
        "NullTokenizer": "null-text",
    }
)


class Tokenizer(Protocol):
    """Text to ids. eod, pad and bos are None where the tokenizer has no such token.

    Those that --fim-data takes also have `plain_text`, without special tokens, and `token_id` of one token.
    """

    vocab_size: int
    eod: int | None
    pad: int | None
    bos: int | None
    unique_identifiers: dict[str, Any]

    def tokenize(self, text: str) -> list[int]: ...

    def byte_lengths(self) -> list[int]:
        """Return, for every id, the UTF-8 bytes of its text; 0 for special tokens and those of unknown text.

        Raises:
            ValueError: saying why that is not known.
        """
        ...


def build_tokenizer(data: DataArgs) -> Tokenizer:
    """Build the tokenizer that the flags describe.

    Raises:
        ValueError: naming the flag or file when it is missing, unreadable, or belongs to another product, and the
            install line of an absent library.
    """
    kind = data.tokenizer_type or "GPT2BPETokenizer"
    if kind in _OTHER_PRODUCTS:
        raise ValueError(
            f"--tokenizer-type {kind} belongs to {_OTHER_PRODUCTS[kind]}; for pretraining use one of "
            f"{', '.join(_LIBRARY_OF_TYPE)}"
        )
    if kind not in _LIBRARY_OF_TYPE:
        raise ValueError(f"--tokenizer-type {kind} is unknown; use one of {', '.join(_LIBRARY_OF_TYPE)}")
    library = _find_library(data, kind)
    tokenizer = _open(data, kind, library)
    tokenizer.unique_identifiers = _unique_identifiers(data, kind, library)
    return tokenizer


def _find_library(data: DataArgs, kind: str) -> str:
    """Return the library of a type; `--tokenizer-metadata` may name another one."""
    library = _LIBRARY_OF_TYPE[kind]
    if data.metadata_path is None or library in ("null-text", "sft"):
        return library
    try:
        named = json.loads(regular_file(data.metadata_path).read_text(encoding="utf-8"))["library"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"--tokenizer-metadata {data.metadata_path}: needed a JSON file with the key library ({error})"
        ) from None
    if named not in _LIBRARY_OF_TYPE.values():
        raise ValueError(f"--tokenizer-metadata {data.metadata_path}: library {named} is not for text pretraining")
    return named


def _open(data: DataArgs, kind: str, library: str) -> Tokenizer:
    from moe_trainer.data import tokenizer_libraries as libraries

    if library == "null-text":
        if not data.vocab_size:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(data.vocab_size, data.null_tokenizer_eod_id, data.null_tokenizer_pad_id)
    if library == "megatron":
        return libraries.open_gpt2(data.vocab_file, data.merge_file, data.special_tokens or [])
    if not data.tokenizer_model:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model")
    if library == "sft":
        return libraries.open_sft(
            data.tokenizer_model, data.special_tokens or [], data.sft_tokenizer_prompt_format, data.chat_template
        )
    if library == "sentencepiece":
        return libraries.SentencePieceTokenizer(
            data.tokenizer_model,
            special_tokens=data.special_tokens or [],
            legacy=data.tokenizer_sentencepiece_legacy,
            ignore_extra_whitespaces=data.tokenizer_sentencepiece_ignore_extra_whitespaces,
        )
    if library == "tiktoken":
        return libraries.TikTokenizer(
            data.tokenizer_model,
            pattern=data.tiktoken_pattern or "v2",
            vocab_size=data.vocab_size or libraries.TIKTOKEN_VOCAB_SIZE,
            num_special_tokens=data.tiktoken_num_special_tokens,
            special_tokens=data.special_tokens,
        )
    return libraries.open_hugging_face(
        data.tokenizer_model,
        special_tokens=data.special_tokens or [],
        use_fast=not data.tokenizer_hf_no_use_fast,
        trust_remote_code=data.trust_remote_code,
        include_special_tokens=not data.tokenizer_hf_no_include_special_tokens,
    )


def _unique_identifiers(data: DataArgs, kind: str, library: str) -> dict[str, Any]:
    """Describe the tokenizer as Megatron does: class, path, then its constructor's arguments as strings."""
    path = {"megatron": kind, "null-text": None}.get(library, data.tokenizer_model)
    if library == "sft":
        arguments: dict[str, Any] = {"prompt_format": data.sft_tokenizer_prompt_format}
        arguments |= {} if data.chat_template is None else {"chat_template": data.chat_template}
        return _describe(path, arguments)
    # a flag of chat models; it is part of the description all the same
    arguments = {} if library in ("megatron", "null-text") else {"chat_template": None}
    hugging_face = {
        "use_fast": not data.tokenizer_hf_no_use_fast,
        "trust_remote_code": data.trust_remote_code,
        "include_special_tokens": not data.tokenizer_hf_no_include_special_tokens,
        "use_gigatoken": data.use_gigatoken,
    }
    files = {"vocab_file": data.vocab_file, "merges_file": data.merge_file}
    special = {"additional_special_tokens": data.special_tokens or []}
    if library == "huggingface":
        arguments |= files | special | hugging_face
    elif library == "megatron":
        arguments |= special | files | hugging_face
    elif library == "sentencepiece":
        arguments |= {
            "legacy": data.tokenizer_sentencepiece_legacy,
            "special_tokens": data.special_tokens,
            "ignore_extra_whitespaces": data.tokenizer_sentencepiece_ignore_extra_whitespaces,
        }
    elif library == "tiktoken":
        given = {"pattern": data.tiktoken_pattern, "vocab_size": data.vocab_size}
        arguments |= {key: value for key, value in given.items() if value}
        arguments |= {"num_special_tokens": data.tiktoken_num_special_tokens, "special_tokens": data.special_tokens}
    else:
        eod = data.null_tokenizer_eod_id
        arguments |= {"vocab_size": data.vocab_size} | ({} if eod is None else {"eod_id": eod})
        arguments["pad_id"] = data.null_tokenizer_pad_id
    return _describe(path, arguments)


def _describe(path: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"class": _MEGATRON_CLASS, "tokenizer_path": path} | {key: str(value) for key, value in arguments.items()}


class NullTokenizer:
    """Text that is ids already, separated by single blanks. eod is the last id unless given."""

    unique_identifiers: dict[str, Any]

    def __init__(self, vocab_size: int, eod: int | None = None, pad: int = -1):
        self.vocab_size = vocab_size
        self.eod: int | None = vocab_size - 1 if eod is None else eod
        self.pad: int | None = pad
        self.bos: int | None = None
        if not 0 <= self.eod < self.vocab_size:
            raise ValueError(f"--null-tokenizer-eod-id {self.eod} lies outside --vocab-size {self.vocab_size}")

    def tokenize(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split(" ")]
        except ValueError as error:
            raise ValueError(f"NullTokenizer needs ids separated by single blanks: {error}") from None

    def byte_lengths(self) -> list[int]:
        raise ValueError("the ids of a NullTokenizer stand for no text")

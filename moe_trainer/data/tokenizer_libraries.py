"""The tokenizer libraries behind the `Tokenizer` interface: tokenizers, transformers, sentencepiece, tiktoken.

Hugging Face folders are read with the `tokenizers` library alone: `tokenizer.json` holds the whole encoder,
`tokenizer_config.json` and `special_tokens_map.json` name eos and pad. Special tokens that only the config knows are
added, as transformers does on loading. Begin and end tokens of texts are the file's template's business, as in
transformers 5 (older versions let `add_bos_token` of Llama-style configs override it; a disagreement is logged).
Folders without `tokenizer.json`, slow tokenizers and remote code go through transformers.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import logging
import os
import re
from collections.abc import Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from arguments.regular_file import regular_file
from moe_trainer.data.chat_templates import TURN_FORMATS, ChatFormat, TurnFormat
from moe_trainer.data.template_process import LimitedTemplate

logger = logging.getLogger(__name__)

TIKTOKEN_VOCAB_SIZE = 1 << 17
_TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
# Pre-tokenization patterns v1 and v2 as the tokenizer files of these models were trained with; data, not code.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_TIKTOKEN_PATTERNS = MappingProxyType(
    {
        "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        "v2": f"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*"
        + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
_EXTRA_SPACE = "\u262f"  # stands for a blank that SentencePiece would drop; not a character of any vocabulary
_SPACE_PIECE = "\u2581"
_BYTE_PIECE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")
_HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _import_library(name: str, flag: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{flag} needs the library {name}: pip install {name}") from None


class JsonTokenizer:
    """A `tokenizers.Tokenizer` with its special tokens; `include_special_tokens` applies the encoder's own template."""

    unique_identifiers: dict[str, Any]

    def __init__(
        self, encoder: Any, eod: int | None, pad: int | None, include_special_tokens: bool, bos: int | None = None
    ):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads for batches of one text
        self._encoder, self._include = encoder, include_special_tokens
        self.eod, self.pad, self.bos = eod, pad, bos
        self.vocab_size = encoder.get_vocab_size(with_added_tokens=True)

    def tokenize(self, text: str) -> list[int]:
        # NOTE: only batches have the fast form, which does not find the place of every token in the text.
        return self._encoder.encode_batch_fast([text], add_special_tokens=self._include)[0].ids

    def byte_lengths(self) -> list[int]:
        return json_byte_lengths(self._encoder)

    def plain_text(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        return self._encoder.token_to_id(token)


class SFTTokenizer(JsonTokenizer):
    """The tokenizer of conversations: a Hugging Face tokenizer and the format of its prompts.

    Attributes:
        format: how conversations are written.

    Source: Megatron-LM, sft_tokenizer.py (commit d98e8a64).
    """

    def __init__(self, tokenizer: JsonTokenizer, pad: int | None, chat_format: ChatFormat):
        super().__init__(tokenizer._encoder, tokenizer.eod, pad, include_special_tokens=True, bos=tokenizer.bos)
        self.format = chat_format

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids, without the encoder's begin and end tokens, and the characters that each stands for."""
        encoding = self._encoder.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        return self._encoder.decode(list(ids), skip_special_tokens=False)


class TransformersTokenizer:
    """A transformers tokenizer (slow ones, remote code, folders without tokenizer.json)."""

    unique_identifiers: dict[str, Any]

    def __init__(self, tokenizer: Any, include_special_tokens: bool):
        self._tokenizer, self._include = tokenizer, include_special_tokens
        self.vocab_size = len(tokenizer)
        self.eod = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        self.pad = tokenizer.pad_token_id
        self.bos = tokenizer.bos_token_id

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=self._include).input_ids

    def plain_text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)

    def byte_lengths(self) -> list[int]:
        encoder = getattr(self._tokenizer, "backend_tokenizer", None)
        if encoder is None:
            raise ValueError(
                f"the tokenizer {type(self._tokenizer).__name__} does not say which bytes its tokens stand for"
            )
        return json_byte_lengths(encoder)


def json_byte_lengths(encoder: Any) -> list[int]:
    """Return the bytes of every token of a `tokenizers.Tokenizer`, by its decoder.

    The decoder is byte-level, or one of pieces with byte fallback.

    Raises:
        ValueError: for decoders whose tokens do not stand for fixed bytes (WordPiece, ...).
    """
    content = json.loads(encoder.to_str())
    decoder = content.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    added = {token["id"]: token for token in content.get("added_tokens") or ()}
    unknown = (content.get("model") or {}).get("unk_token")
    if not kinds & {"ByteLevel", "Metaspace", "ByteFallback", "Replace"}:
        raise ValueError(
            f"the tokenizer's decoder ({', '.join(sorted(map(str, kinds)))}) does not say which bytes a token stands "
            "for"
        )

    def count_bytes(token: str) -> int:
        if "ByteLevel" in kinds:
            return len(token)  # one character of the byte alphabet stands for one byte
        if "ByteFallback" in kinds and _BYTE_PIECE.match(token):
            return 1
        return len(token.replace(_SPACE_PIECE, " ").encode())

    lengths = [0] * encoder.get_vocab_size(with_added_tokens=True)
    for token, number in encoder.get_vocab(with_added_tokens=True).items():
        if number >= len(lengths):
            continue
        if number in added:
            lengths[number] = 0 if added[number].get("special") else len(token.encode())
        elif token != unknown:
            lengths[number] = count_bytes(token)
    return lengths


def open_hugging_face(
    model: str, special_tokens: Sequence[str], use_fast: bool, trust_remote_code: bool, include_special_tokens: bool
) -> JsonTokenizer | TransformersTokenizer:
    """Open a local folder, a tokenizer.json, or a hub name.

    Raises:
        ValueError: if it cannot be found, fetched or read.
    """
    if use_fast and not trust_remote_code:
        path = _find_json(model)
        if path is not None:
            return _open_json(path, model, special_tokens, include_special_tokens)
    return _open_with_transformers(model, special_tokens, use_fast, trust_remote_code, include_special_tokens)


def open_sft(model: str, special_tokens: Sequence[str], prompt_format: str, chat_template: str | None) -> SFTTokenizer:
    """Open a local folder, a tokenizer.json, or a hub name, and the format of prompts.

    Args:
        model: --tokenizer-model.
        special_tokens: tokens to add.
        prompt_format: --sft-tokenizer-prompt-format.
        chat_template: --chat-template: Jinja text or a file; None for the tokenizer's own.

    Raises:
        ValueError: if one of them cannot be found or read.
    """
    path = _find_json(model, (*_HUB_FILES, _TEMPLATE_FILE))
    if path is None:
        raise ValueError(f"--tokenizer-model {model}: --tokenizer-type SFTTokenizer needs a folder with tokenizer.json")
    tokenizer = _open_json(path, model, special_tokens, include_special_tokens=True)
    chat_format: ChatFormat
    if prompt_format in TURN_FORMATS:
        write_turn, pad_token = TURN_FORMATS[prompt_format]
        chat_format = TurnFormat(write_turn)
        pad = tokenizer.token_id(pad_token)
        missing = [token for token in chat_format.special_tokens if tokenizer.token_id(token) is None]
        if missing:
            logger.warning(
                "--sft-tokenizer-prompt-format %s writes %s, for which %s has no token: they become pieces of "
                "text; the format assistant writes the tokenizer's chat template",
                prompt_format,
                ", ".join(missing),
                model,
            )
    else:
        config = _read_config(os.path.dirname(path))
        source = _find_template(os.path.dirname(path), config, model) if chat_template is None else chat_template
        where = f"--tokenizer-model {model}" if chat_template is None else "--chat-template"
        if chat_template is not None and "{" not in chat_template:
            source, where = _read_text(chat_template, where), f"{where} {chat_template}"
        texts = {
            name: token["content"] if isinstance(token := config.get(name), dict) else token for name in _TEMPLATE_NAMES
        }
        names = {name: text for name, text in texts.items() if isinstance(text, str)}
        chat_format = LimitedTemplate(where, source, names, trains_prompts=prompt_format == "default")
        pad = tokenizer.eod if tokenizer.pad is None else tokenizer.pad
    return SFTTokenizer(tokenizer, pad, chat_format)


def _find_template(folder: str, config: dict, model: str) -> str:
    """Return the chat template of a tokenizer: a separate file, or in tokenizer_config.json one or several by name."""
    path = os.path.join(folder, _TEMPLATE_FILE)
    if os.path.isfile(path):
        return _read_text(path, "--tokenizer-model")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ValueError(
            f"--tokenizer-model {model}: has no chat template; give --chat-template, or another "
            "--sft-tokenizer-prompt-format"
        )
    return found


def _read_text(path: str, flag: str) -> str:
    try:
        return regular_file(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error})") from None


def _find_json(model: str, files: Sequence[str] = _HUB_FILES) -> str | None:
    """Return the path of tokenizer.json, None where there is none; `files` are fetched of a hub name."""
    if os.path.isfile(model):
        return model
    folder = model if os.path.exists(model) else _fetch(model, files)
    path = None if folder is None else os.path.join(folder, "tokenizer.json")
    return path if path is not None and os.path.isfile(path) else None


def _fetch(name: str, files: Sequence[str]) -> str | None:
    """Return the hub cache's folder with a repository's tokenizer files, downloaded where missing.

    None when the repository has no tokenizer.json.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"--tokenizer-model {name}: no such file or folder")
    hub = _import_library("huggingface_hub", f"--tokenizer-model {name} (a hub name)")
    found = None
    for file in files:
        try:
            path = hub.hf_hub_download(name, file)
        except hub.errors.LocalEntryNotFoundError:
            # NOTE: before EntryNotFoundError, which it derives from: this one means offline, not absent.
            if found is None:
                raise ValueError(_fetch_advice(name, "it is not in the local cache and cannot be downloaded")) from None
            continue
        except hub.errors.EntryNotFoundError:
            if found is None:
                return None
            continue
        except (OSError, ValueError) as error:
            raise ValueError(_fetch_advice(name, str(error).strip().splitlines()[0])) from None
        found = os.path.dirname(path)
    return found


def _fetch_advice(name: str, reason: str) -> str:
    return (
        f"--tokenizer-model {name}: no such folder here, and as a hub name {reason}. On a machine with access run\n"
        f"    hf download {name} {' '.join(_HUB_FILES)} --local-dir DIR\n"
        "and give DIR as --tokenizer-model (or copy its Hugging Face cache and set HF_HOME)"
    )


def _open_json(path: str, model: str, special_tokens: Sequence[str], include_special_tokens: bool) -> JsonTokenizer:
    tokenizers = _import_library("tokenizers", "--tokenizer-type HuggingFaceTokenizer")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(regular_file(path)))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise ValueError(f"--tokenizer-model {model}: {path} cannot be read ({error})") from None
    encoder.no_padding()
    encoder.no_truncation()
    config = _special_token_config(os.path.dirname(path))
    for token in (tokenizers.AddedToken(**fields) for fields in config["added"]):  # in the order of their ids
        if encoder.token_to_id(token.content) is None:
            (encoder.add_special_tokens if token.special else encoder.add_tokens)([token])
    roles = {role: config[role] for role in ("eos_token", "sep_token", "pad_token", "bos_token") if config[role]}
    encoder.add_special_tokens([*roles.values(), *special_tokens])
    ids = {role: encoder.token_to_id(token) for role, token in roles.items()}
    eod, bos = ids.get("eos_token", ids.get("sep_token")), ids.get("bos_token")
    tokenizer = JsonTokenizer(encoder, eod, ids.get("pad_token"), include_special_tokens, bos)
    if include_special_tokens:
        _warn_of_template(model, config, tokenizer.tokenize("a"), bos, eod)
    return tokenizer


def _warn_of_template(model: str, config: dict, ids: list[int], bos: int | None, eod: int | None) -> None:
    """Say where the config's begin/end switches and the encoder's template disagree."""
    for switch, wanted, found in (("add_bos_token", bos, ids[:1]), ("add_eos_token", eod, ids[-1:])):
        if config[switch] is not None and wanted is not None and config[switch] != (found == [wanted]):
            logger.warning(
                "--tokenizer-model %s: tokenizer_config.json says %s = %s, but tokenizer.json decides, and it does "
                "%sadd the token",
                model,
                switch,
                config[switch],
                "not " if config[switch] else "",
            )


def _read_config(folder: str) -> dict:
    """Merge the folder's small JSON files."""
    merged: dict = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(folder, file)
        if os.path.isfile(path):
            try:
                with open(path, encoding="utf-8") as stream:
                    merged |= {key: value for key, value in json.load(stream).items() if value is not None}
            except (OSError, ValueError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}: cannot be read ({error})") from None
    return merged


def _special_token_config(folder: str) -> dict:
    """Return of the folder's settings: role -> token text or None, `added` tokens, begin/end switches."""
    merged = _read_config(folder)
    result: dict = {}
    try:
        for role in ("eos_token", "sep_token", "pad_token", "bos_token"):
            token = merged.get(role)
            result[role] = token["content"] if isinstance(token, dict) else token
            if not isinstance(result[role], str | None):
                raise TypeError(f"{role} is no text")
        keys = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        by_id = sorted(merged.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
        result["added"] = [{key: token[key] for key in keys if key in token} for _, token in by_id]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{os.path.join(folder, 'tokenizer_config.json')}: its special tokens cannot be read ({error})"
        ) from None
    return result | {switch: merged.get(switch) for switch in ("add_bos_token", "add_eos_token")}


def _open_with_transformers(
    model: str, special_tokens: Sequence[str], use_fast: bool, trust_remote_code: bool, include_special_tokens: bool
) -> TransformersTokenizer:
    transformers = _import_library(
        "transformers", f"--tokenizer-model {model} (no tokenizer.json, a slow tokenizer, or remote code)"
    )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            model, use_fast=use_fast, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        if os.path.exists(model):
            raise ValueError(f"--tokenizer-model {model}: transformers cannot read it ({reason})") from None
        raise ValueError(_fetch_advice(model, reason)) from None
    if special_tokens:
        tokenizer.add_tokens(list(special_tokens), special_tokens=True)
    return TransformersTokenizer(tokenizer, include_special_tokens)


def open_gpt2(vocab_file: str | None, merge_file: str | None, special_tokens: Sequence[str]) -> JsonTokenizer:
    """Open GPT-2's byte-level BPE from its vocabulary and merge files; eod is `<|endoftext|>`."""
    for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if not path:
            raise ValueError(f"--tokenizer-type GPT2BPETokenizer needs {flag} (vocab.json and merges.txt of gpt2)")
        if not os.path.isfile(path):
            raise ValueError(f"{flag} {path}: no such file")
    tokenizers = _import_library("tokenizers", "--tokenizer-type GPT2BPETokenizer")
    try:
        model = tokenizers.models.BPE.from_file(vocab_file, merge_file)
    except Exception as error:  # the library raises plain Exception for every fault of the files
        raise ValueError(f"--vocab-file {vocab_file} / --merge-file {merge_file}: cannot be read ({error})") from None
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens(["<|endoftext|>", *special_tokens])
    return JsonTokenizer(encoder, encoder.token_to_id("<|endoftext|>"), None, include_special_tokens=True)


class SentencePieceTokenizer:
    """A SentencePiece model; no begin or end tokens are added to texts.

    Args:
        path: the model file.
        special_tokens: cut out of texts before encoding; those without a piece get ids after the last one.
        legacy: whether special tokens may be given.
        ignore_extra_whitespaces: False preserves runs of blanks that the model would collapse.
    """

    unique_identifiers: dict[str, Any]

    def __init__(
        self, path: str, special_tokens: Sequence[str] = (), legacy: bool = False, ignore_extra_whitespaces: bool = True
    ):
        if not os.path.isfile(path):
            raise ValueError(f"--tokenizer-model {path}: no such file")
        sentencepiece = _import_library("sentencepiece", "a SentencePiece tokenizer")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"--tokenizer-model {path}: not a SentencePiece model ({str(error).strip()})") from None
        if special_tokens and not legacy:
            raise ValueError("--tokenizer-special-tokens with SentencePiece needs --tokenizer-sentencepiece-legacy")
        self.vocab_size = self._model.get_piece_size()
        self.eod, self.pad, self.bos = (
            number if number >= 0 else None
            for number in (self._model.eos_id(), self._model.pad_id(), self._model.bos_id())
        )
        self._special: dict[str, int] = {}
        for token in special_tokens:
            piece = self._model.piece_to_id(token)
            if piece == self._model.unk_id():
                piece, self.vocab_size = self.vocab_size, self.vocab_size + 1
            self._special[token] = piece
        collapses = self._model.encode("x  y", out_type=str) == self._model.encode("x y", out_type=str)
        self._keep_blanks = collapses and not ignore_extra_whitespaces
        # NOTE: longest first, so that a token is not cut inside a longer one that begins alike.
        names = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def tokenize(self, text: str) -> list[int]:
        if self._keep_blanks:
            text = re.sub(r"(?<= )(?= )|^ | $", f" {_EXTRA_SPACE} ", text).rstrip()
        if self._cut is None:
            return self._encode(text)
        ids: list[int] = []
        after_special = False
        for piece in self._cut.split(text):
            if piece in self._special:
                ids.append(self._special[piece])
                after_special = True
                continue
            encoded = self._encode(piece)
            # The blank that SentencePiece puts before a text does not belong between a special token and its word.
            if after_special and encoded and encoded[0] == self._model.piece_to_id(_SPACE_PIECE):
                encoded = encoded[1:]
            ids.extend(encoded)
        return ids

    def _encode(self, text: str) -> list[int]:
        if not self._keep_blanks:
            return self._model.encode(text)
        ids: list[int] = []
        for part in text.split(_EXTRA_SPACE):
            if part:
                # The mark, encoded as the last piece, keeps the part's own trailing blank; then it is dropped.
                ids.extend(self._model.encode(part + _EXTRA_SPACE)[:-1])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with the tokens of --tokenizer-special-tokens, without ids outside the vocabulary."""
        names = {number: token for token, number in self._special.items()}
        runs = groupby((number for number in ids if 0 <= number < self.vocab_size), key=names.get)
        return "".join(self._model.decode(list(run)) if name is None else name * len(list(run)) for name, run in runs)

    def byte_lengths(self) -> list[int]:
        model, lengths = self._model, [0] * self.vocab_size
        for number in range(model.get_piece_size()):
            if model.is_byte(number):
                lengths[number] = 1
            elif not (model.is_control(number) or model.is_unknown(number) or model.is_unused(number)):
                lengths[number] = len(model.id_to_piece(number).replace(_SPACE_PIECE, " ").encode())
        return [0 if number in self._special.values() else length for number, length in enumerate(lengths)]


class TikTokenizer:
    """A tiktoken vocabulary: special tokens first, then the file's byte sequences by rank.

    Seven special tokens have names, the rest are fillers.

    Files: the JSON list of {rank, token_bytes, token_str}, or tiktoken's own lines of base64 and rank. eod is `</s>`.
    """

    unique_identifiers: dict[str, Any]

    def __init__(
        self,
        path: str,
        pattern: str,
        vocab_size: int,
        num_special_tokens: int,
        special_tokens: Sequence[str] | None = None,
    ):
        names = list(_TIKTOKEN_SPECIAL if special_tokens is None else special_tokens)
        missing = [name for name in _TIKTOKEN_SPECIAL if name not in names]
        if missing or len(set(names)) != len(names):
            raise ValueError(
                f"--tokenizer-special-tokens: tiktoken needs each of {', '.join(_TIKTOKEN_SPECIAL)} once; missing "
                f"{missing}"
            )
        if not len(names) <= num_special_tokens < vocab_size:
            raise ValueError(
                f"--tiktoken-num-special-tokens {num_special_tokens}: needed at least {len(names)} and less than the "
                f"vocabulary of {vocab_size}"
            )
        if not os.path.isfile(path):
            raise ValueError(f"--tokenizer-model {path}: no such file")
        tokens = _read_tiktoken(path)[: vocab_size - num_special_tokens]
        if len(tokens) < vocab_size - num_special_tokens:
            raise ValueError(
                f"--tokenizer-model {path}: found {len(tokens)} tokens, --vocab-size {vocab_size} with "
                f"{num_special_tokens} special ones needs {vocab_size - num_special_tokens}"
            )
        tiktoken = _import_library("tiktoken", "--tokenizer-type TikTokenizer")
        special = names + [f"<SPECIAL_{number}>" for number in range(len(names), num_special_tokens)]
        self._encoding = tiktoken.Encoding(
            name=os.path.basename(os.path.dirname(os.path.abspath(path))),
            pat_str=_TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks={token: num_special_tokens + rank for rank, token in enumerate(tokens)},
            special_tokens={name: number for number, name in enumerate(special)},
        )
        self.vocab_size = vocab_size
        self.eod: int | None = names.index("</s>")
        self.pad: int | None = names.index("<pad>")
        self.bos: int | None = None
        self._num_special = num_special_tokens

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def plain_text(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([number for number in ids if number >= self._num_special])

    def token_id(self, token: str) -> int | None:
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None

    def byte_lengths(self) -> list[int]:
        lengths = [0] * self.vocab_size
        special = {self._encoding.encode_single_token(name) for name in self._encoding.special_tokens_set}
        for number in set(range(self.vocab_size)) - special:
            lengths[number] = len(self._encoding.decode_single_token_bytes(number))
        return lengths


def _read_tiktoken(path: str) -> list[bytes]:
    """Return the byte sequences of a vocabulary file in order of rank."""
    try:
        with open(regular_file(path), encoding="utf-8") as stream:
            if path.endswith(".json"):
                ranked = [(int(entry["rank"]), base64.b64decode(entry["token_bytes"])) for entry in json.load(stream)]
            else:
                ranked = [
                    (int(rank), base64.b64decode(token))
                    for token, rank in (line.split() for line in stream if line.strip())
                ]
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, binascii.Error) as error:
        raise ValueError(f"--tokenizer-model {path}: not a tiktoken vocabulary ({error})") from None
    if [rank for rank, _ in ranked] != list(range(len(ranked))) or len({token for _, token in ranked}) != len(ranked):
        raise ValueError(f"--tokenizer-model {path}: ranks must count up from 0 and tokens be distinct")
    return [token for _, token in ranked]

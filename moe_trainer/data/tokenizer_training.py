"""Train a tokenizer on texts: a SentencePiece model, or byte-level BPE for Hugging Face.

Both encode every text: bytes stand for characters that the vocabulary lacks. Both have an end-of-document token. All
text is held in memory.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from moe_trainer.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
"""Of byte-level BPE; a SentencePiece model has </s>."""
_LONGEST_PIECE = 1 << 14
"""Characters: SentencePiece leaves out lines above its limit of bytes, and BPE is slow in long words."""
_SENTENCEPIECE_TOKENS = 3 + 1 + 256  # unknown, begin, end; the line break; bytes


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return the content of a tokenizer.model: BPE with bytes as fallback that keeps every blank and line break.

    Raises:
        UserError: if the library is missing, or the texts do not give a vocabulary of this size.
    """
    sentencepiece = _import_library("sentencepiece")
    if vocab_size <= _SENTENCEPIECE_TOKENS:
        raise UserError(f"--vocab-size {vocab_size}: more than {_SENTENCEPIECE_TOKENS} are needed, for bytes alone")
    lines = (piece for text in texts for line in text.splitlines() if line.strip() for piece in _pieces(line))
    first = _first(lines)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * _LONGEST_PIECE,
            user_defined_symbols=["\n"],
            minloglevel=2,
        )
    except RuntimeError as error:
        # between the place in the library's source and the library's own options
        reason = str(error).rpartition("] ")[2].partition(" Increase vocab_size")[0].strip()
        raise UserError(f"--vocab-size {vocab_size}: {reason or f'SentencePiece rejects it ({error})'}") from None
    return model.getvalue()


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> dict[str, str]:
    """Return the files of a Hugging Face tokenizer by name: GPT-2's byte-level BPE with END_OF_DOCUMENT.

    Raises:
        UserError: if the library is missing, or the texts do not give a vocabulary of this size.
    """
    tokenizers = _import_library("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise UserError(f"--vocab-size {vocab_size}: at least {len(alphabet) + 1} are needed, for bytes and one token")
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    pieces = (piece for text in texts for piece in _pieces(text))
    encoder.train_from_iterator(chain([_first(pieces)], pieces), trainer)
    found = encoder.get_vocab_size()
    if found < vocab_size:
        raise UserError(f"--vocab-size {vocab_size}: this text has only {found} different tokens; give more text")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    return {"tokenizer.json": encoder.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2)}


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most _LONGEST_PIECE characters."""
    return (text[start : start + _LONGEST_PIECE] for start in range(0, len(text), _LONGEST_PIECE))


def _first(pieces: Iterator[str]) -> str:
    """Return the first piece.

    Raises:
        UserError: if there is none.
    """
    first = next(pieces, None)
    if first is None:
        raise UserError("--input: the files have no text")
    return first


def _import_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"training this tokenizer needs the library {name}: pip install {name}") from None

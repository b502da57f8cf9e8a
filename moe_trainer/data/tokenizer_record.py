"""Which tokenizer made token files: `<prefix>.tokenizer.json` next to them, which Megatron-LM does not read.

Tokenizers are compared by the ids that they give a sample of text, so the same one is recognized under another path,
in another file format and by another library. Special tokens at the ends of texts do not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import dropwhile
from typing import Any

from moe_trainer.data.object_storage import is_remote
from moe_trainer.data.tokenizer import NullTokenizer, Tokenizer
from moe_trainer.errors import UserError
from moe_trainer.io import atomic_write

logger = logging.getLogger(__name__)

_SAMPLE = (
    "The quick brown fox jumps over the lazy dog, while 12,345.67 others watch it from the hill.",
    "def area(width: int, height=3):\n    return width * height  # nothing else\n\tif x != y: {'a': [1, 2]}",
    "Training of a language model begins with the distribution of its weights; information about it is public.",
    'https://example.org/a/b?c=1&d=%20 <p class="x">HTML</p> $x^2 + \\frac{1}{2}$ UPPER lower MixedCase snake_case',
    "Gr\u00fc\u00dfe, \u00e9t\u00e9, ni\u00f1o, \u041f\u0440\u0438\u0432\u0435\u0442, \u4f60\u597d\uff0c\u4e16\u754c, "
    "\u3053\u3093\u306b\u3061\u306f, \u0645\u0631\u062d\u0628\u0627, \ud55c\uad6d\uc5b4, \U0001f600  three   spaces",
)


def record_path(prefix: str) -> str:
    """Return the path of the record of token files."""
    return f"{prefix}.tokenizer.json"


@contextmanager
def recorded_tokenizer(prefix: str, tokenizer: Tokenizer) -> Iterator[None]:
    """Write the record of token files after the block, which writes them; one of earlier files does not stay.

    Raises:
        OSError: if it cannot be written.
    """
    yield
    digest = _digest(tokenizer)
    if digest is None:
        with suppress(FileNotFoundError):
            os.unlink(record_path(prefix))
        return
    with atomic_write(record_path(prefix)) as file:
        content = {"tokenizer": tokenizer.unique_identifiers, "vocab_size": tokenizer.vocab_size, "digest": digest}
        json.dump(content, file, indent=1)


class TokenizerCheck:
    """Compares the run's tokenizer with those that made token files."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @cached_property
    def _digest(self) -> str | None:
        return _digest(self._tokenizer)

    def check(self, prefix: str) -> None:
        """Check that token files without a record, or with that of this tokenizer, are read.

        A tokenizer that reads no text is not compared, nor are files in object storage.

        Raises:
            UserError: if another tokenizer made the files, or their record is damaged.
        """
        path = record_path(prefix)
        if is_remote(prefix) or not os.path.exists(path):
            return
        try:
            with open(path, encoding="utf-8") as file:
                record: dict[str, Any] = json.load(file)
            digest, size = str(record["digest"]), int(record["vocab_size"])
            name = (record.get("tokenizer") or {}).get("tokenizer_path") or "a tokenizer"
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem = f"is no record of a tokenizer ({error}); without this file nothing is compared"
            raise UserError(f"{path}: {problem}") from None
        here = self._digest
        if here is not None and here != digest:
            raise UserError(
                f"{path}: these tokens are of {name} ({size:,} tokens), which makes other ids of the same text than "
                "this run's tokenizer; use that one, or tokenize the text again. Without this file nothing is compared"
            )


def _digest(tokenizer: Tokenizer) -> str | None:
    """Return a digest of the ids of the sample; None for a tokenizer that does not read it."""
    if isinstance(tokenizer, NullTokenizer):
        return None
    special = {tokenizer.bos, tokenizer.eod, tokenizer.pad}
    try:
        ids = [_without_ends([int(token) for token in tokenizer.tokenize(text)], special) for text in _SAMPLE]
    except Exception as error:  # whatever a tokenizer raises for text that the run need not have
        reason = f"{type(error).__name__}: {error}"
        logger.warning("token files are not compared with the tokenizer, which does not read the sample: %s", reason)
        return None
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).hexdigest()


def _without_ends(ids: list[int], special: set[int | None]) -> list[int]:
    """Leave out special tokens around a text. In it they stand for something, such as an unknown word."""
    kept = list(dropwhile(special.__contains__, ids))[::-1]
    return list(dropwhile(special.__contains__, kept))[::-1]

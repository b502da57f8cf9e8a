"""A tokenizer as evaluation uses it: ids with or without the begin token, text without special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import UserError


class TextCodec:
    """Encodes prompts and decodes answers.

    Attributes:
        eos: id that ends a text.
        prefix: id that stands before a text without context: begin, else end of text.

    Raises:
        UserError: if the tokenizer has no text (NullTokenizer), or no token that ends one.
    """

    def __init__(self, tokenizer: Tokenizer):
        decode: Callable[[Sequence[int]], str] | None = getattr(
            tokenizer, "plain_text", getattr(tokenizer, "decode", None)
        )
        if decode is None:
            raise UserError(
                f"--tokenizer-type: {type(tokenizer).__name__} has no text; give the tokenizer "
                "that the model was trained with (--tokenizer-type, --tokenizer-model)"
            )
        if tokenizer.eod is None:
            raise UserError("the tokenizer has no end-of-text token, at which answers end")
        self._tokenizer, self.decode, self.eos = tokenizer, decode, tokenizer.eod
        self.prefix = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        self._begin = (
            tokenizer.bos if tokenizer.bos is not None and tokenizer.tokenize("")[:1] == [tokenizer.bos] else None
        )

    def encode(self, text: str, with_begin: bool | None = None) -> list[int]:
        """Return the ids of a text.

        `with_begin`: False leaves out the begin token that the tokenizer adds; None does so if the text has one.

        Raises:
            UserError: if the text is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{ascii(text[:40])}: not UTF-8, or with half of a surrogate pair") from error
        ids = self._tokenizer.tokenize(text)
        if self._begin is not None and (
            (with_begin is False and ids[:1] == [self._begin])
            or (with_begin is None and ids[:2] == [self._begin, self._begin])
        ):
            ids = ids[1:]
        return ids

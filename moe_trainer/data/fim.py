"""Fill-in-the-middle samples (--fim-data): documents are cut in three and rearranged, to train models to fill gaps.

A sample is divided at its end-of-document tokens, and each document is rearranged with probability --fim-rate: its text
is cut at two random characters into prefix, middle and suffix, which are tokenized by themselves and joined by three
sentinel tokens, in the order prefix-suffix-middle (PSM) or, with probability --fim-spm-rate, suffix-prefix-middle
(SPM). With --fim-split-sample a document is divided once more, at that token, and --fim-fragment-rate decides on each
fragment. The sample keeps its length: its end is dropped, or padded.

The numbers are those of Megatron-LM's GPTFIMDataset for the same random stream. There one stream serves all samples
that a process happens to read, so samples depend on ranks, workers and resumes; here every sample has its own stream.
Source: arXiv 2207.14255; Megatron-LM, megatron/training/datasets/fim_dataset.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from arguments.data import DataArgs


class TextTokenizer(Protocol):
    """What rearranging text needs of a tokenizer."""

    def tokenize(self, text: str) -> list[int]: ...
    def plain_text(self, ids: list[int]) -> str: ...
    def token_id(self, token: str) -> int | None: ...


@dataclass(frozen=True)
class FillInTheMiddle:
    """How samples are rearranged; tokens by their ids."""

    tokenizer: TextTokenizer
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None
    fragment_rate: float = 0.0
    no_prefix: str | None = None

    @staticmethod
    def from_args(data: DataArgs, tokenizer: Any) -> FillInTheMiddle | None:
        """Return what the flags ask for; None without --fim-data.

        Raises:
            ValueError: naming a token that the vocabulary does not have.
        """
        if not data.fim_data:
            return None
        tokens = {
            "prefix": data.fim_prefix_token,
            "middle": data.fim_middle_token,
            "suffix": data.fim_suffix_token,
            "pad": data.fim_pad_token,
            "eod": data.fim_eod_token,
        }
        return FillInTheMiddle(
            tokenizer,
            data.fim_rate,
            data.fim_spm_rate,
            **{role: _find_id(tokenizer, f"--fim-{role}-token", token) for role, token in tokens.items()},
            split=_find_id(tokenizer, "--fim-split-sample", data.fim_split_sample) if data.fim_split_sample else None,
            fragment_rate=data.fim_fragment_rate or 0.0,
            no_prefix=data.fim_no_prefix,
        )

    def rearrange(self, ids: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        """Return the sample of the same length that a model is to learn from. ids: int64 [L+1]."""
        parts = _rearrange_parts(ids, self.eod, lambda part: self._document(part, rng))
        found = parts.astype(np.int64)[: len(ids)]
        return np.concatenate([found, np.full(len(ids) - len(found), self.pad, dtype=np.int64)])

    def _document(self, ids: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
        if self.split is None or not (ids == self.split).any():
            return self._fragment(ids, self.rate, rng)
        if not rng.binomial(1, self.rate):
            return ids
        return _rearrange_parts(ids, self.split, lambda part: self._fragment(part, self.fragment_rate, rng))

    def _fragment(self, ids: np.ndarray, rate: float, rng: np.random.RandomState) -> np.ndarray:
        if not rng.binomial(1, rate):
            return ids
        text = self.tokenizer.plain_text(ids.tolist())
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return ids
        first, second = sorted(rng.randint(low=0, high=len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            self.tokenizer.tokenize(piece) for piece in (text[:first], text[first:second], text[second:])
        )
        if rng.binomial(1, self.spm_rate):
            return np.array([self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle], dtype=np.int64)
        return np.array([self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle], dtype=np.int64)


def _rearrange_parts(ids: np.ndarray, end_id: int, rearrange: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Rearrange the parts that end with `end_id` by themselves; an empty part goes, with its end."""
    parts, begin = [], 0
    for end in np.flatnonzero(ids == end_id).tolist():
        if end > begin:
            parts += [rearrange(ids[begin:end]), np.array([end_id])]
        begin = end + 1
    return np.concatenate([*parts, rearrange(ids[begin:])])


def _find_id(tokenizer: TextTokenizer, flag: str, token: str) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise ValueError(
            f"{flag} {token}: the tokenizer's vocabulary has no such token; name one that it has, or add it with "
            "--tokenizer-special-tokens"
        )
    return found

"""The three indices of a GPT dataset, equal to Megatron's to the last entry, built with whole-array operations.

A split of a token file is a range of its sequences ("documents" below). Given lengths, sequence length L, requested
samples N and a seed:

* document index: every document, once per epoch, in one shuffle over all epochs, or with the last epoch shuffled on
  its own when only a small part of it (under 80 %) will be read, so that its documents do not thin out the earlier
  epochs;
* sample index: sample s starts at token s*L of the concatenated documents and reads L+1 tokens, so neighbours share
  one token. Row s is (position in the document index, offset in that document). The start of s > 0 is the last token
  its predecessor read, therefore never the first token after a document's end;
* shuffle index: the order in which samples are read; with a separate last epoch, its samples come last.

One `numpy.random.RandomState(seed)` is consumed by the document index, then by the shuffle index, and by nothing else.

The sample index of the reference is a loop over documents. Here each chunk of documents contributes the multiples of
L that fall between its cumulative token counts, so the whole is one cumulative sum, one division and one repeat per
chunk: linear, without a Python loop over documents or samples. Chunks bound the memory in addition to the result.

Source: Megatron-Core gpt_dataset semantics (snapshot v0.20).
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from arguments.data import split_weights

_SEPARATE_BELOW = 0.80
_CHUNK = 1 << 22
"""Documents or samples, whichever are more."""

SplitMatrix = tuple[tuple[float, float] | None, ...]


class GPTIndices(NamedTuple):
    """document int32 [epochs*documents]; sample int32|int64 [samples+1, 2]; shuffle uint32|int64 [samples]."""

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


class EpochPlan(NamedTuple):
    """What is known about a dataset from counts alone: `samples` is its length."""

    epochs: int
    samples: int
    samples_before_last_epoch: int
    separate_last_epoch: bool


def parse_split(split: str) -> SplitMatrix:
    """Return (begin, end) of the three shares of `--split "a,b,c"`; None for an empty one.

    Raises:
        ValueError: if the text is not one to three non-negative numbers with a positive sum.
    """
    try:
        weights = split_weights(split)
    except ValueError as error:
        raise ValueError(f'--split "{split}" {error}') from None
    ends = [0, *accumulate(weights)]
    return tuple(None if low == high else (low, high) for low, high in pairwise(ends))


def split_range(share: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """Return the first and one-past-last sequence of a split share (ties round to even, as Python does)."""
    return round(share[0] * float(num_sequences)), round(share[1] * float(num_sequences))


def plan_epochs(tokens_per_epoch: int, sequence_length: int, num_samples: int | None) -> EpochPlan:
    """Decide epochs, the dataset's length, and whether the last epoch is kept apart.

    `num_samples` None means exactly one epoch. The caller has refused an empty split.
    """
    tokens, length = tokens_per_epoch, sequence_length
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * length + 1) // tokens))
    samples = (epochs * tokens - 1) // length
    before = ((epochs - 1) * tokens - 1) // length if epochs > 1 else 0
    is_separate = False
    if num_samples is not None and epochs > 1:
        is_separate = num_samples - before < int(_SEPARATE_BELOW * ((tokens - 1) // length))
    return EpochPlan(epochs, samples, before, is_separate)


def build_indices(
    lengths: np.ndarray, begin: int, end: int, sequence_length: int, plan: EpochPlan, seed: int
) -> GPTIndices:
    """Build all three indices of the sequences [begin, end) of a token file."""
    random = np.random.RandomState(seed)
    document = build_document_index(begin, end, plan.epochs, plan.separate_last_epoch, random)
    sample = build_sample_index(lengths, document, sequence_length, plan.samples)
    first = plan.samples_before_last_epoch if plan.separate_last_epoch else plan.samples
    return GPTIndices(document, sample, build_shuffle_index(first, plan.samples, random))


def build_document_index(
    begin: int, end: int, epochs: int, separate: bool, random: np.random.RandomState
) -> np.ndarray:
    """Return the shuffled document order, int32 [epochs * (end - begin)]."""
    index = np.tile(np.arange(begin, end, dtype=np.int32), epochs)
    if not separate:
        random.shuffle(index)
        return index
    last = (epochs - 1) * (end - begin)
    random.shuffle(index[:last])
    random.shuffle(index[last:])
    return index


def build_shuffle_index(first: int, total: int, random: np.random.RandomState) -> np.ndarray:
    """Return the order of samples: [0, first) shuffled, then [first, total) shuffled."""
    index = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(index[:first])
    if first != total:
        random.shuffle(index[first:])
    return index


def build_sample_index(lengths: np.ndarray, document: np.ndarray, sequence_length: int, num_samples: int) -> np.ndarray:
    """Return [num_samples + 1, 2]: position in the document index, and token offset, of every sample's start.

    `lengths` holds tokens per sequence of the whole file; `document` selects from it.
    """
    largest = max(len(document), int(lengths.max(initial=0)))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    index = np.empty((num_samples + 1, 2), dtype=dtype)
    index[0] = 0  # also when the first document is empty: the start is a position, not yet a token
    tokens_before, written = 0, 1
    step = max(1, _CHUNK * len(document) // max(len(document), num_samples))
    for low in range(0, len(document), step):
        chunk = document[low : low + step]
        bounds = np.empty(len(chunk) + 1, dtype=np.int64)
        bounds[0] = tokens_before
        np.cumsum(lengths[chunk], dtype=np.int64, out=bounds[1:])
        bounds[1:] += tokens_before
        tokens_before = int(bounds[-1])
        # Samples whose first token lies in document i: the multiples of L in [bounds[i], bounds[i + 1]).
        starts = -(-bounds // sequence_length)
        starts = np.clip(starts, written, num_samples + 1)
        counts = np.diff(starts)
        here = slice(int(starts[0]), int(starts[-1]))
        index[here, 0] = np.repeat(np.arange(low, low + len(chunk), dtype=dtype), counts)
        first_token = np.arange(here.start, here.stop, dtype=np.int64) * sequence_length
        index[here, 1] = first_token - np.repeat(bounds[:-1], counts)
        written = here.stop
        if written > num_samples:
            break
    assert written == num_samples + 1, f"sample index: {written - 1} of {num_samples} samples placed"
    return index

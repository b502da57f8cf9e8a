"""GPT datasets: samples of a token file, and mock data.

A dataset answers one question, `tokens(i)`: the L+1 token ids of sample i. Everything else of a batch (labels, masks,
positions) is a function of those ids and is made for a whole batch at once in `loader.py`. Packed samples are read by
`sample(i)`, which also returns the ids that are trained: of conversations not all are. `locate` translates a token of a
sample back to file, document and offset; only error messages use it. `prefetch(i)` starts reading what is in object
storage.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from moe_trainer.data.fim import FillInTheMiddle
from moe_trainer.data.index_build import GPTIndices, SplitMatrix, build_indices, plan_epochs
from moe_trainer.data.index_cache import CachedIndex
from moe_trainer.data.indexed import IndexedDataset
from moe_trainer.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NO_PAD = -1


class Sample(NamedTuple):
    """Ids of a sample [n], and which of them are trained as labels, bool [n] (None: all)."""

    ids: np.ndarray
    loss_mask: np.ndarray | None


class SampleReader(Protocol):
    """What a batch needs of a dataset."""

    def tokens(self, index: int) -> np.ndarray: ...
    def sample(self, index: int) -> Sample: ...
    def part_lengths(self, index: int) -> list[int]: ...
    def locate(self, index: int, position: int) -> str: ...


class TokenDataset(SampleReader, Protocol):
    """What the loader needs of a dataset."""

    def __len__(self) -> int: ...
    def length(self, index: int) -> int: ...
    def prefetch(self, index: int) -> None: ...


class SampleSource(TokenDataset, Protocol):
    """What a training phase needs of its dataset."""

    def write_cache(self) -> None: ...
    def load(self) -> None: ...


class BlendSource(SampleSource, Protocol):
    """What a blend needs of its datasets."""

    @property
    def name(self) -> str: ...
    @property
    def identifiers(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class DatasetConfig:
    """What the indices of a dataset depend on, besides files and sizes.

    Attributes:
        tokenizer: its `unique_identifiers` enter the cache name; `eod` and `vocab_size` shape mock data.
        split: None, as `split_matrix`, when each split has its own files.
        fim: how samples are rearranged, not at all with None.
    """

    sequence_length: int
    seed: int
    tokenizer: Tokenizer
    split: str | None = None
    split_matrix: SplitMatrix | None = None
    cache_path: str | None = None
    memory_map: bool = True
    fim: FillInTheMiddle | None = None


class MockTokens:
    """Token "file" of `--mock-data`: 100,000 documents of 1 to 4,095 tokens, each counting up from 1 and ended by eod.

    Source: Megatron-Core mock data (lengths from numpy's default generator, seed 0; ids modulo the vocabulary size).
    """

    def __init__(self, vocab_size: int, eod: int | None):
        self._vocab_size, self._eod = vocab_size, eod
        self.sequence_lengths = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        whole = int(self.sequence_lengths[index])
        end = whole if length is None else offset + length
        ids = np.arange(offset + 1, end + 1, dtype=np.int64) % self._vocab_size
        if end == whole and end > offset and self._eod is not None:
            ids[-1] = self._eod
        return ids


class GPTDataset(CachedIndex):
    """Samples of L+1 tokens cut from the shuffled documents of one split of one token file.

    Its index is that of index_build.GPTIndices, for `plan`.

    Args:
        source: the token file.
        path: its prefix, None for mock data.
        begin: first sequence of the split.
        end: one past the last one.
        num_samples: None for one epoch, otherwise at least that many; the length is what whole epochs give.

    Raises:
        ValueError: if samples are asked of a split without tokens.
    """

    def __init__(
        self,
        source: IndexedDataset | MockTokens,
        path: str | None,
        begin: int,
        end: int,
        num_samples: int | None,
        split_name: str,
        config: DatasetConfig,
    ):
        self._source, self._path, self._begin, self._end = source, path, begin, end
        self._num_samples, self._config = num_samples, config
        tokens = int(source.sequence_lengths[begin:end].sum(dtype=np.int64))
        if tokens == 0:
            raise ValueError(
                f"{self.name}: the {split_name} split (sequences {begin} to {end} of {len(source)}) holds no tokens, "
                "and samples were asked of it; change --split, add data, or do not evaluate (--eval-iters 0)"
            )
        self.plan = plan_epochs(tokens, config.sequence_length, num_samples)
        class_name = "GPTDataset" if config.fim is None else "GPTFIMDataset"
        cache_folder = config.cache_path
        if cache_folder is None and isinstance(source, IndexedDataset):
            # Megatron uses the data prefix as a folder name here; kept, so that existing caches are found.
            cache_folder = os.path.join(source.idx_path.removesuffix(".idx"), "cache", f"{class_name}_indices")
        super().__init__(
            class_name if path is not None else "MockGPTDataset",
            split_name,
            {"document": None, "sample": len(self) + 1, "shuffle": len(self)},
            cache_folder,
            source.idx_path if isinstance(source, IndexedDataset) else None,
        )

    @property
    def name(self) -> str:
        return self._path or "mock data"

    def __len__(self) -> int:
        return self.plan.samples

    @property
    def identifiers(self) -> dict[str, Any]:
        config = self._config
        return {
            "class": self.class_name,
            "dataset_path": self._path,
            "num_samples": self._num_samples,
            "index_split": self._split_name,
            "random_seed": config.seed,
            "sequence_length": config.sequence_length,
            "split": config.split,
            "split_matrix": config.split_matrix,
            "tokenizer": config.tokenizer.unique_identifiers,
        }

    @property
    def order(self) -> str:
        """What the order of the samples depends on, besides the file and their number."""
        config = self._config
        return f"sequences {self._begin} to {self._end}, --seq-length {config.sequence_length}, --seed {config.seed}"

    @property
    def requests(self) -> tuple[int | None]:
        """The number of samples that was asked for; None for one epoch."""
        return (self._num_samples,)

    def shuffled_with(self, index: int) -> tuple[int, int]:
        """Return the first and one past the last of the samples that are shuffled together with sample `index`."""
        first = self.plan.samples_before_last_epoch if self.plan.separate_last_epoch else 0
        return (first, len(self)) if index >= first else (0, first)

    def _build(self) -> GPTIndices:
        logger.info(
            "building the %s index of %s: %d samples, %d epochs",
            self._split_name,
            self.name,
            len(self),
            self.plan.epochs,
        )
        if isinstance(self._source, IndexedDataset):
            self._source.check_sequences()  # here, where lengths are read anyway; a cached index is of sound files
        lengths = np.ascontiguousarray(self._source.sequence_lengths)
        return build_indices(
            lengths, self._begin, self._end, self._config.sequence_length, self.plan, self._config.seed
        )

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of sample `index`, int64 [L+1]."""
        out = np.empty(self._config.sequence_length + 1, dtype=np.int64)
        at = 0
        for document, offset, length in self._parts(index):
            out[at : at + length] = self._source.get(document, offset, length)
            at += length
        if self._config.fim is None:
            return out
        return self._config.fim.rearrange(out, np.random.RandomState([self._config.seed, index]))

    def sample(self, index: int) -> Sample:
        """Return the ids of sample `index`, all of which are trained as labels."""
        return Sample(self.tokens(index), None)

    def prefetch(self, index: int) -> None:
        if isinstance(self._source, IndexedDataset):
            for document, offset, length in self._parts(index):
                self._source.prefetch(document, offset, length)

    def _parts(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, offset, length) of the parts of a sample.

        Raises:
            ValueError: if the index is damaged.
        """
        documents, samples, shuffle = self.index
        row, missing = int(shuffle[index]), self._config.sequence_length + 1
        if not 0 <= row < len(self):
            raise self.damaged(index)
        (first, first_offset), (last, last_offset) = samples[row].tolist(), samples[row + 1].tolist()
        if not 0 <= first <= last < len(documents):
            raise self.damaged(index)
        for position in range(first, last + 1):
            document = int(documents[position])
            if not self._begin <= document < self._end:
                raise self.damaged(index)
            size = int(self._source.sequence_lengths[document])
            offset = first_offset if position == first else 0
            end = last_offset + 1 if position == last else size
            missing -= end - offset
            if not (0 <= offset <= end <= size and missing >= 0):
                raise self.damaged(index)
            yield document, offset, end - offset
        if missing:
            raise self.damaged(index)

    def length(self, index: int) -> int:
        """Return the number of tokens that the model reads of a sample."""
        return self._config.sequence_length

    def part_lengths(self, index: int) -> list[int]:
        """Return how many tokens of sample `index` come from each of its documents (they sum to L+1).

        A rearranged sample counts as one document, as in Megatron-LM.
        """
        if self._config.fim is not None:
            return [self._config.sequence_length + 1]
        return [length for _, _, length in self._parts(index)]

    def locate(self, index: int, position: int) -> str:
        """Say where token `position` of sample `index` comes from."""
        if self._config.fim is not None:
            return f"{self._path}.bin, sample {index}, rearranged by --fim-data (token {position})"
        for document, offset, length in self._parts(index):
            if position < length:
                file = f"{self._path}.bin" if self._path else self.name
                return f"{file}, sequence {document}, token {offset + position}"
            position -= length
        return self.name

"""GPT datasets: samples of a token file, blends of them, and mock data.

A dataset answers one question, `tokens(i)`: the L+1 token ids of sample i. Everything else of a batch (labels, masks,
positions) is a function of those ids and is made for a whole batch at once in `loader.py`. `locate` translates a
token of a sample back to file, document and offset; only error messages use it. `prefetch(i)` starts reading what is in
object storage.

Three steps keep several ranks in line: every rank opens the files and knows all lengths from counts
(`GPTDataset(...)`: no index yet); one rank builds what is missing in the cache (`write_cache`); after a barrier every
rank maps the cached arrays (`load`). What cannot be cached (no folder, or one that cannot be written) is built in
memory by `load`, with the same result.

Cache names, description text and arrays are those of Megatron-Core, so that caches serve both programs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from moe_trainer.data.blend import build_blend_index, build_exhaustive_index, normalize
from moe_trainer.data.fim import FillInTheMiddle
from moe_trainer.data.index_build import GPTIndices, SplitMatrix, build_indices, plan_epochs
from moe_trainer.data.indexed import IndexedDataset
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.io import atomic_write

logger = logging.getLogger(__name__)

NO_PAD = -1


class TokenDataset(Protocol):
    """What the loader needs of a dataset."""

    def __len__(self) -> int: ...
    def tokens(self, index: int) -> np.ndarray: ...
    def part_lengths(self, index: int) -> list[int]: ...
    def length(self, index: int) -> int: ...
    def locate(self, index: int, position: int) -> str: ...
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


Source = TypeVar("Source", bound=TokenDataset)


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


class CachedIndex(ABC):
    """Arrays that tell where the samples of a dataset are: built by one rank, mapped from the cache by all.

    Args:
        class_name: in Megatron-LM; part of the names of the cache files.
        split_name: train, valid or test.
        num_rows: of every array of the index, by its name; None where only the index tells.
        cache_folder: None without a cache.
        data_file: the cache is valid if it is not older than this file.
    """

    def __init__(
        self,
        class_name: str,
        split_name: str,
        num_rows: Mapping[str, int | None],
        cache_folder: str | None,
        data_file: str | None = None,
    ):
        self.class_name, self._split_name, self._num_rows = class_name, split_name, num_rows
        self._cache_folder, self._data_file = cache_folder, data_file
        self._index: tuple[np.ndarray, ...] | None = None

    @property
    def index(self) -> tuple[np.ndarray, ...]:
        assert self._index is not None, "load() comes before samples"
        return self._index

    @property
    @abstractmethod
    def identifiers(self) -> dict[str, Any]:
        """Everything that the index depends on, as Megatron-Core describes it."""

    @abstractmethod
    def _build(self) -> tuple[np.ndarray, ...]: ...

    def _cache(self) -> IndexCache | None:
        if self._cache_folder is None:
            return None
        return IndexCache(self._cache_folder, self.class_name, self._split_name, self.identifiers, self._num_rows)

    def write_cache(self) -> None:
        """Build the index and write it to the cache unless it is there (one rank, before the barrier)."""
        cache = self._cache()
        if cache is not None and not cache.is_valid(self._data_file):
            index = self._build()
            if not cache.write(index):
                self._index = index

    def load(self) -> None:
        """Map the cached index, or build it in memory where there is no cache."""
        cache = self._cache()
        if self._index is not None:
            return
        if cache is not None and cache.is_valid(self._data_file):
            self._index = cache.read()
            return
        if cache is not None:
            logger.warning("the index cache %s is not visible to this rank: building the index in memory", cache.folder)
        self._index = self._build()


class GPTDataset(CachedIndex):
    """Samples of L+1 tokens cut from the shuffled documents of one split of one token file.

    Its index is that of index_build.GPTIndices.

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
        self._plan = plan_epochs(tokens, config.sequence_length, num_samples)
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
        return self._plan.samples

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

    def _build(self) -> GPTIndices:
        logger.info(
            "building the %s index of %s: %d samples, %d epochs",
            self._split_name,
            self.name,
            len(self),
            self._plan.epochs,
        )
        if isinstance(self._source, IndexedDataset):
            self._source.check_sequences()  # here, where lengths are read anyway; a cached index is of sound files
        lengths = np.ascontiguousarray(self._source.sequence_lengths)
        return build_indices(
            lengths, self._begin, self._end, self._config.sequence_length, self._plan, self._config.seed
        )

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of sample `index`, int64 [L+1]."""
        out = np.empty(self._config.sequence_length + 1, dtype=np.int64)
        at = 0
        for document, offset, length in self._parts(index):
            out[at : at + length] = self._source.get(document, offset, length)
            at += length
        assert at == len(out), f"{self.name}: sample {index} has {at} tokens, needed {len(out)}"
        if self._config.fim is None:
            return out
        return self._config.fim.rearrange(out, np.random.RandomState([self._config.seed, index]))

    def prefetch(self, index: int) -> None:
        if isinstance(self._source, IndexedDataset):
            for document, offset, length in self._parts(index):
                self._source.prefetch(document, offset, length)

    def _parts(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, offset, length) of the parts of a sample."""
        documents, samples, shuffle = self.index
        row = int(shuffle[index])
        (first, first_offset), (last, last_offset) = samples[row].tolist(), samples[row + 1].tolist()
        for position in range(first, last + 1):
            document = int(documents[position])
            offset = first_offset if position == first else 0
            end = last_offset + 1 if position == last else int(self._source.sequence_lengths[document])
            yield document, offset, end - offset

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


class CombinedDataset(ABC, Generic[Source]):
    """Samples of several datasets; a subclass finds the dataset of a sample."""

    @abstractmethod
    def _find(self, index: int) -> tuple[Source, int]:
        """Return the dataset of a sample and the sample's number inside it."""

    def tokens(self, index: int) -> np.ndarray:
        dataset, inside = self._find(index)
        return dataset.tokens(inside)

    def prefetch(self, index: int) -> None:
        dataset, inside = self._find(index)
        dataset.prefetch(inside)

    def part_lengths(self, index: int) -> list[int]:
        dataset, inside = self._find(index)
        return dataset.part_lengths(inside)

    def length(self, index: int) -> int:
        """Return the number of tokens that the model reads of a sample."""
        dataset, inside = self._find(index)
        return dataset.length(inside)

    def locate(self, index: int, position: int) -> str:
        dataset, inside = self._find(index)
        return dataset.locate(inside, position)


class BlendedDataset(CombinedDataset[BlendSource], CachedIndex):
    """Several GPT datasets read in the order of a blend (see blend.py).

    Its index holds, for every sample, the dataset (int16) and the sample inside it (int64).

    Args:
        datasets: those of the blend.
        weights: normalized if there is a size.
        size: number of samples; None reads every sample of every dataset once.

    Raises:
        ValueError: if the blend would need more samples of a dataset than it has.
    """

    def __init__(
        self,
        datasets: Sequence[BlendSource],
        weights: Sequence[float],
        size: int | None,
        split_name: str,
        config: DatasetConfig,
    ):
        self.datasets = tuple(datasets)
        self._weights = normalize(weights) if size is not None else list(weights)
        self._size = size
        num_rows = {"dataset": len(self), "dataset_sample": len(self)}
        super().__init__("BlendedDataset", split_name, num_rows, config.cache_path)

    @property
    def identifiers(self) -> dict[str, Any]:
        return {
            "class": self.class_name,
            "datasets": [dataset.identifiers for dataset in self.datasets],
            "split": self._split_name,
            "weights": self._weights,
            "size": self._size,
        }

    def __len__(self) -> int:
        return self._size if self._size is not None else sum(map(len, self.datasets))

    def write_cache(self) -> None:
        for dataset in self.datasets:
            dataset.write_cache()
        super().write_cache()

    def load(self) -> None:
        for dataset in self.datasets:
            dataset.load()
        super().load()

    def _build(self) -> tuple[np.ndarray, np.ndarray]:
        if self._size is None:
            return build_exhaustive_index([len(dataset) for dataset in self.datasets])
        index = build_blend_index(self._weights, self._size)
        needed = np.bincount(index[0], minlength=len(self.datasets))
        for number, (count, dataset) in enumerate(zip(needed, self.datasets)):
            if count > len(dataset):
                raise ValueError(
                    f"blend ({self._split_name}): dataset {number}, {dataset.name}, gives {len(dataset)} samples, its "
                    f"weight needs {count}; raise --mid-level-dataset-surplus"
                )
        return index

    def _find(self, index: int) -> tuple[BlendSource, int]:
        dataset, inside = self.index
        return self.datasets[dataset[index]], int(inside[index])


class PhasedDataset(CombinedDataset[SampleSource]):
    """Training samples of consecutive phases: the samples of one dataset, then those of the next.

    A resumed run needs no dataset of a phase that is complete: `begin` is its first sample, counted over the whole run.

    Args:
        datasets: (first sample of the phase, its dataset), ascending.
        end: one past the last sample of the last phase.

    Raises:
        ValueError: if a dataset has fewer samples than its phase.
    """

    def __init__(self, datasets: Sequence[tuple[int, SampleSource]], end: int):
        self.begin, self._end = datasets[0][0], end
        self._starts, self.datasets = tuple(start for start, _ in datasets), tuple(dataset for _, dataset in datasets)
        for (start, dataset), stop in zip(datasets, [*self._starts[1:], end], strict=True):
            if len(dataset) < stop - start:
                raise ValueError(f"samples {start} to {stop} are one phase, whose data gives {len(dataset)}")

    def __len__(self) -> int:
        return self._end

    def write_cache(self) -> None:
        for dataset in self.datasets:
            dataset.write_cache()

    def load(self) -> None:
        for dataset in self.datasets:
            dataset.load()

    def _find(self, index: int) -> tuple[SampleSource, int]:
        number = bisect_right(self._starts, index) - 1
        if number < 0 or index >= self._end:
            raise IndexError(f"sample {index} lies outside the phases {self.begin} to {self._end}")
        return self.datasets[number], index - self._starts[number]


class IndexCache:
    """The files of one index in a cache folder: `<md5>-<class>-<split>-{description.txt,<name>_index.npy}`.

    The md5 is that of the description, the JSON text of everything the index depends on. Files are written under
    temporary names and renamed, the description last, so that a complete set is a correct set.
    """

    def __init__(
        self,
        folder: str,
        class_name: str,
        split_name: str,
        identifiers: Mapping[str, Any],
        num_rows: Mapping[str, int | None],
    ):
        self.folder, self._num_rows = folder, num_rows
        self._description = json.dumps(identifiers, indent=4)
        digest = hashlib.md5(self._description.encode("utf-8"), usedforsecurity=False).hexdigest()
        self._base = os.path.join(folder, f"{digest}-{class_name}-{split_name}")

    def is_valid(self, data_file: str | None) -> bool:
        """Return whether all files exist and none is older than the data, whose content their names do not tell."""
        arrays = list(map(self._array_path, self._num_rows))
        if not all(map(os.path.isfile, (f"{self._base}-description.txt", *arrays))):
            return False
        return data_file is None or min(map(os.path.getmtime, arrays)) >= os.path.getmtime(data_file)

    def write(self, arrays: Sequence[np.ndarray]) -> bool:
        """Write all files; return False, with a warning, when the folder cannot be written."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            for name, array in zip(self._num_rows, arrays, strict=True):
                with atomic_write(self._array_path(name), "wb") as file:
                    np.save(file, array)
            with atomic_write(f"{self._base}-description.txt") as file:
                file.write(self._description)
        except OSError as error:
            logger.warning(
                "the index cache %s cannot be written (%s): every rank keeps its own copy in memory; "
                "--data-cache-path DIR names another folder",
                self.folder,
                error.strerror,
            )
            return False
        return True

    def read(self) -> tuple[np.ndarray, ...]:
        """Map the arrays.

        Raises:
            ValueError: if one is damaged or has another number of rows than needed.
        """
        arrays = []
        for name, needed in self._num_rows.items():
            path = self._array_path(name)
            try:
                array = np.load(path, mmap_mode="r")
                if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
                    raise ValueError(f"an array of {array.ndim} dimensions and type {array.dtype}")
            except Exception as error:  # numpy reads the header with Python's parser, whose errors are of many types
                raise ValueError(f"index cache {path}: cannot be read ({error}); delete it and start again") from None
            if needed is not None and len(array) != needed:
                raise ValueError(
                    f"index cache {path}: found {len(array)} rows, needed {needed}; delete it and start again"
                )
            arrays.append(array)
        return tuple(arrays)

    def _array_path(self, name: str) -> str:
        return f"{self._base}-{name}_index.npy"

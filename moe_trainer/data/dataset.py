"""GPT datasets: samples of a token file, blends of them, and mock data.

A dataset answers one question, `tokens(i)`: the L+1 token ids of sample i. Everything else of a batch (labels, masks,
positions) is a function of those ids and is made for a whole batch at once in `loader.py`. `locate` translates a
token of a sample back to file, document and offset; only error messages use it.

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
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moe_trainer.data.blend import build_blend_index, build_exhaustive_index, normalize
from moe_trainer.data.fim import FillInTheMiddle
from moe_trainer.data.index_build import GPTIndices, SplitMatrix, build_indices, plan_epochs
from moe_trainer.data.indexed import IndexedDataset
from moe_trainer.io import atomic_write

logger = logging.getLogger(__name__)

NO_PAD = -1


class TokenDataset(Protocol):
    """What the loader needs of a dataset."""

    def __len__(self) -> int: ...
    def tokens(self, index: int) -> np.ndarray: ...
    def locate(self, index: int, position: int) -> str: ...


@dataclass(frozen=True)
class DatasetConfig:
    """What the indices of a dataset depend on, besides files and sizes.

    tokenizer: its `unique_identifiers` enter the cache name; `eod` and `vocab_size` shape mock data.
    split, split_matrix: both None when each split has its own files. fim: how samples are rearranged, not at all with None.
    """

    sequence_length: int
    seed: int
    tokenizer: object
    split: str | None = None
    split_matrix: SplitMatrix | None = None
    cache_path: str | None = None
    memory_map: bool = True
    fim: FillInTheMiddle | None = None


class MockTokens:
    """Token "file" of `--mock-data`: 100,000 documents of 1 to 4,095 tokens, each counting up from 1 and ended by eod.

    Source: Megatron-Core mock data (lengths from numpy's default generator, seed 0; ids modulo the vocabulary size).
    """

    def __init__(self, vocab_size: int, eod: int):
        self._vocab_size, self._eod = vocab_size, eod
        self.sequence_lengths = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        whole = int(self.sequence_lengths[index])
        end = whole if length is None else offset + length
        ids = np.arange(offset + 1, end + 1, dtype=np.int64) % self._vocab_size
        if end == whole and end > offset:
            ids[-1] = self._eod
        return ids


class GPTDataset:
    """Samples of L+1 tokens cut from the shuffled documents of one split of one token file.

    num_samples: None for one epoch; otherwise at least that many (the length is what whole epochs give, usually more).
    Raises: ValueError when samples are asked of a split without tokens.
    """

    def __init__(
        self,
        low: IndexedDataset | MockTokens,
        path: str | None,
        begin: int,
        end: int,
        num_samples: int | None,
        split_name: str,
        config: DatasetConfig,
    ):
        self._low, self._path, self._begin, self._end = low, path, begin, end
        self._num_samples, self._split_name, self._config = num_samples, split_name, config
        tokens = int(low.sequence_lengths[begin:end].sum(dtype=np.int64))
        if tokens == 0:
            raise ValueError(
                f"{self.name}: the {split_name} split (sequences {begin} to {end} of {len(low)}) holds no tokens, and "
                "samples were asked of it; change --split, add data, or do not evaluate (--eval-iters 0)"
            )
        self._plan = plan_epochs(tokens, config.sequence_length, num_samples)
        self._indices: GPTIndices | None = None

    @property
    def name(self) -> str:
        return self._path or "mock data"

    @property
    def epochs(self) -> int:
        return self._plan.epochs

    @property
    def indices(self) -> GPTIndices:
        assert self._indices is not None, "load() comes before samples"
        return self._indices

    def __len__(self) -> int:
        return self._plan.samples

    @property
    def class_name(self) -> str:
        if isinstance(self._low, MockTokens):
            return "MockGPTDataset"
        return "GPTDataset" if self._config.fim is None else "GPTFIMDataset"

    @property
    def identifiers(self) -> OrderedDict:
        config = self._config
        return OrderedDict(
            [
                ("class", self.class_name),
                ("dataset_path", self._path),
                ("num_samples", self._num_samples),
                ("index_split", self._split_name),
                ("random_seed", config.seed),
                ("sequence_length", config.sequence_length),
                ("split", config.split),
                ("split_matrix", config.split_matrix),
                ("tokenizer", config.tokenizer.unique_identifiers),
            ]
        )

    def write_cache(self) -> None:
        """Build the indices and write them to the cache unless they are there (one rank, before the barrier)."""
        cache = self._cache()
        if cache is None or self._is_current(cache):
            return
        logger.info(
            "building the %s index of %s: %d samples, %d epochs", self._split_name, self.name, len(self), self.epochs
        )
        indices = self._build()
        if not cache.write(indices._asdict()):
            self._indices = indices

    def _is_current(self, cache: IndexCache) -> bool:
        """Is the cache complete, and not older than the data? Its name follows from the path of the data, whatever is in the file."""
        return cache.is_complete() and (self._path is None or cache.time() >= os.stat(self._path + ".idx").st_mtime)

    def load(self) -> None:
        """Map the cached indices, or build them in memory where there is no cache."""
        if self._indices is not None:
            return
        cache = self._cache()
        if cache is not None and self._is_current(cache):
            self._indices = GPTIndices(*cache.read(("document", "sample", "shuffle"), (None, len(self) + 1, len(self))))
            return
        if cache is not None:
            logger.warning("the index cache %s is not visible to this rank: building the index in memory", cache.folder)
        self._indices = self._build()

    def _build(self) -> GPTIndices:
        if isinstance(self._low, IndexedDataset):
            self._low.check_sequences()  # here, where lengths are read for long anyway; a cached index was built from sound files
        lengths = np.ascontiguousarray(self._low.sequence_lengths)
        return build_indices(
            lengths, self._begin, self._end, self._config.sequence_length, self._plan, self._config.seed
        )

    def _cache(self) -> IndexCache | None:
        folder = self._config.cache_path
        if folder is None and self._path is not None:
            # Megatron uses the data prefix as a folder name here; kept, so that existing caches are found.
            folder = os.path.join(self._path, "cache", f"{self.class_name}_indices")
        if folder is None:
            return None
        return IndexCache(
            folder, self.class_name, self._split_name, self.identifiers, ("document", "sample", "shuffle")
        )

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of sample `index`, int64 [L+1]."""
        out = np.empty(self._config.sequence_length + 1, dtype=np.int64)
        at = 0
        for document, offset, length in self._parts(index):
            out[at : at + length] = self._low.get(document, offset, length)
            at += length
        assert at == len(out), f"{self.name}: sample {index} has {at} tokens, needed {len(out)}"
        if self._config.fim is None:
            return out
        return self._config.fim.rearrange(out, np.random.RandomState([self._config.seed, index]))

    def _parts(self, index: int):
        """Yield (document, offset, length) of the pieces of a sample."""
        documents, samples, shuffle = self.indices
        row = int(shuffle[index])
        (first, first_offset), (last, last_offset) = samples[row].tolist(), samples[row + 1].tolist()
        for position in range(first, last + 1):
            document = int(documents[position])
            offset = first_offset if position == first else 0
            end = last_offset + 1 if position == last else int(self._low.sequence_lengths[document])
            yield document, offset, end - offset

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


class BlendedDataset:
    """Several GPT datasets read in the order of a blend (see blend.py).

    weights with size: normalised weights, `size` samples. size None: every sample of every dataset once.
    Raises: ValueError when the blend would need more samples of a dataset than it has.
    """

    def __init__(
        self,
        datasets: list[GPTDataset],
        weights: list[float] | list[int],
        size: int | None,
        split_name: str,
        config: DatasetConfig,
    ):
        self._datasets, self._split_name, self._config = datasets, split_name, config
        self._weights = normalize(weights) if size is not None else weights
        self._size = size
        self._index: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def datasets(self) -> tuple[GPTDataset, ...]:
        return tuple(self._datasets)

    @property
    def index(self) -> tuple[np.ndarray, np.ndarray]:
        """(dataset int16, sample inside it int64) of every sample."""
        assert self._index is not None, "load() comes before samples"
        return self._index

    @property
    def identifiers(self) -> OrderedDict:
        return OrderedDict(
            [
                ("class", "BlendedDataset"),
                ("datasets", [dataset.identifiers for dataset in self._datasets]),
                ("split", self._split_name),
                ("weights", self._weights),
                ("size", self._size),
            ]
        )

    def __len__(self) -> int:
        return self._size if self._size is not None else sum(map(len, self._datasets))

    def write_cache(self) -> None:
        """Build what is missing: every dataset's indices, then the blend's. One rank calls this, before the barrier."""
        for dataset in self._datasets:
            dataset.write_cache()
        cache = self._cache()
        if cache is not None and not cache.is_complete():
            index = self._build()
            if not cache.write({"dataset": index[0], "dataset_sample": index[1]}):
                self._index = index

    def load(self) -> None:
        for dataset in self._datasets:
            dataset.load()
        if self._index is not None:
            return
        cache = self._cache()
        if cache is not None and cache.is_complete():
            self._index = cache.read(("dataset", "dataset_sample"), (len(self), len(self)))
        else:
            self._index = self._build()

    def _build(self):
        if self._size is None:
            return build_exhaustive_index([len(dataset) for dataset in self._datasets])
        index = build_blend_index(self._weights, self._size)
        for number, (taken, dataset) in enumerate(
            zip(np.bincount(index[0], minlength=len(self._datasets)), self._datasets)
        ):
            if taken > len(dataset):
                raise ValueError(
                    f"blend ({self._split_name}): dataset {number}, {dataset.name}, gives {len(dataset)} samples, its "
                    f"weight needs {taken}; "
                    "raise --mid-level-dataset-surplus"
                )
        return index

    def _cache(self) -> IndexCache | None:
        if self._config.cache_path is None:
            return None
        return IndexCache(
            self._config.cache_path, "BlendedDataset", self._split_name, self.identifiers, ("dataset", "dataset_sample")
        )

    def tokens(self, index: int) -> np.ndarray:
        dataset, inside = self.index
        return self._datasets[dataset[index]].tokens(int(inside[index]))

    def part_lengths(self, index: int) -> list[int]:
        dataset, inside = self.index
        return self._datasets[dataset[index]].part_lengths(int(inside[index]))

    def locate(self, index: int, position: int) -> str:
        dataset, inside = self.index
        return self._datasets[dataset[index]].locate(int(inside[index]), position)


class IndexCache:
    """The files of one index in a cache folder: `<md5>-<class>-<split>-{description.txt,<name>_index.npy}`.

    The md5 is that of the description, the JSON text of everything the index depends on. Files are written under
    temporary names and renamed, the description last, so that a complete set is a correct set.
    """

    def __init__(self, folder: str, class_name: str, split_name: str, identifiers: OrderedDict, names: tuple[str, ...]):
        self.folder = folder
        self.description = json.dumps(identifiers, indent=4)
        self.digest = hashlib.md5(self.description.encode("utf-8"), usedforsecurity=False).hexdigest()
        self._base = f"{self.digest}-{class_name}-{split_name}"
        self._names = names

    def is_complete(self) -> bool:
        return all(
            os.path.isfile(path) for path in (self._path("description.txt"), *map(self._array_path, self._names))
        )

    def time(self) -> float:
        """When the oldest of the files was written."""
        return min(os.stat(self._array_path(name)).st_mtime for name in self._names)

    def write(self, arrays: dict[str, np.ndarray]) -> bool:
        """Write all files; False, with a warning, when the folder cannot be written."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            for name, array in arrays.items():
                self._write(self._array_path(name), lambda stream, array=array: np.save(stream, array))
            self._write(self._path("description.txt"), lambda stream: stream.write(self.description.encode("utf-8")))
        except OSError as error:
            logger.warning(
                "the index cache %s cannot be written (%s): every rank keeps its own copy in memory; "
                "--data-cache-path DIR names another folder",
                self.folder,
                error.strerror,
            )
            return False
        return True

    def read(self, names: tuple[str, ...], rows: tuple[int | None, ...]) -> tuple[np.ndarray, ...]:
        """Map the arrays. ValueError when one is damaged or has another number of rows than needed."""
        arrays = []
        for name, needed in zip(names, rows):
            path = self._array_path(name)
            try:
                array = np.load(path, mmap_mode="r")
                if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
                    raise ValueError(f"an array of {array.ndim} dimensions and type {array.dtype}")
            except Exception as error:  # noqa: BLE001  numpy reads the header with Python's own parser, which has errors of its own
                raise ValueError(f"index cache {path}: cannot be read ({error}); delete it and start again") from None
            if needed is not None and len(array) != needed:
                raise ValueError(
                    f"index cache {path}: found {len(array)} rows, needed {needed}; delete it and start again"
                )
            arrays.append(array)
        return tuple(arrays)

    def _path(self, ending: str) -> str:
        return os.path.join(self.folder, f"{self._base}-{ending}")

    def _array_path(self, name: str) -> str:
        return self._path(f"{name}_index.npy")

    def _write(self, path: str, save) -> None:
        with atomic_write(path, "wb") as file:
            save(file)

"""Indices of datasets, built once and mapped from a cache folder.

Three steps keep several ranks in line: every rank opens the files and knows all lengths from counts (a dataset is made
without its index); one rank builds what is missing in the cache (`write_cache`); after a barrier every rank maps the
cached arrays (`load`). What cannot be cached (no folder, or one that cannot be written) is built in memory by `load`,
with the same result.

Cache names, description text and arrays are those of Megatron-Core, so that caches serve both programs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from moe_trainer.io import atomic_write

logger = logging.getLogger(__name__)


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

    @cached_property
    def index(self) -> tuple[np.ndarray, ...]:
        """The arrays, mapped from the cache, or built in memory where there is none."""
        cache = self._cache()
        if cache is not None:
            if cache.is_valid(self._data_file):
                return cache.read()
            logger.warning("the index cache %s is not visible to this rank: building the index in memory", cache.folder)
        return self._build()

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

    def damaged(self, sample: int) -> ValueError:
        """Return the error of a sample whose entries in the index lie outside of what it is about."""
        cache = self._cache()
        files = "in memory" if cache is None else f"{cache.base}-*_index.npy"
        return ValueError(f"index cache {files}: damaged (sample {sample}); delete its files and start again")

    def write_cache(self) -> None:
        """Build the index and write it to the cache unless it is there (one rank, before the barrier)."""
        cache = self._cache()
        if cache is not None and not cache.is_valid(self._data_file):
            index = self._build()
            if not cache.write(index):
                self.index = index

    def load(self) -> None:
        """Map the index, or build it; `write_cache` of one rank comes first."""
        _ = self.index


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
        self.base = os.path.join(folder, f"{digest}-{class_name}-{split_name}")

    def is_valid(self, data_file: str | None) -> bool:
        """Return whether all files exist and none is older than the data, whose content their names do not tell."""
        arrays = list(map(self._array_path, self._num_rows))
        if not all(map(os.path.isfile, (f"{self.base}-description.txt", *arrays))):
            return False
        return data_file is None or min(map(os.path.getmtime, arrays)) >= os.path.getmtime(data_file)

    def write(self, arrays: Sequence[np.ndarray]) -> bool:
        """Write all files; return False, with a warning, when the folder cannot be written."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            for name, array in zip(self._num_rows, arrays, strict=True):
                with atomic_write(self._array_path(name), "wb") as file:
                    np.save(file, array)
            with atomic_write(f"{self.base}-description.txt") as file:
                file.write(self._description)
        except OSError as error:
            logger.warning(
                "the index cache %s cannot be written (%s): every rank keeps its own copy in memory; "
                "--data-cache-path DIR names another folder",
                self.folder,
                error.strerror or error,
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
        return f"{self.base}-{name}_index.npy"

"""Datasets that consist of others: blends, phases of a run, and epochs that follow those of a run that is extended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from moe_trainer.data.blend import build_blend_index, build_exhaustive_index, normalize
from moe_trainer.data.dataset import BlendSource, DatasetConfig, GPTDataset, Sample, SampleSource, TokenDataset
from moe_trainer.data.index_cache import CachedIndex

Source = TypeVar("Source", bound=TokenDataset)
Indexed = TypeVar("Indexed", bound=SampleSource)


class CombinedDataset(ABC, Generic[Source]):
    """Samples of several datasets; a subclass finds the dataset of a sample."""

    @abstractmethod
    def _find(self, index: int) -> tuple[Source, int]:
        """Return the dataset of a sample and the sample's number inside it."""

    def tokens(self, index: int) -> np.ndarray:
        dataset, inside = self._find(index)
        return dataset.tokens(inside)

    def sample(self, index: int) -> Sample:
        """Return the ids of a sample, and which are trained as labels."""
        dataset, inside = self._find(index)
        return dataset.sample(inside)

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
        number, inside = (int(column[index]) for column in self.index)
        if not (0 <= number < len(self.datasets) and 0 <= inside < len(self.datasets[number])):
            raise self.damaged(index)
        return self.datasets[number], inside


class ConsecutiveDatasets(CombinedDataset[Indexed]):
    """Samples of one dataset, then those of the next; each has its index."""

    datasets: tuple[Indexed, ...]

    def write_cache(self) -> None:
        for dataset in self.datasets:
            dataset.write_cache()

    def load(self) -> None:
        for dataset in self.datasets:
            dataset.load()


class ContinuedDataset(ConsecutiveDatasets[GPTDataset]):
    """Samples of the same documents in several orders: those of one dataset to its end, then those of the next."""

    def __init__(self, datasets: Sequence[GPTDataset]):
        self.datasets = tuple(datasets)
        self._starts = (0, *accumulate(map(len, self.datasets)))

    @property
    def name(self) -> str:
        return self.datasets[0].name

    @property
    def identifiers(self) -> dict[str, Any]:
        return {"class": "ContinuedDataset", "datasets": [dataset.identifiers for dataset in self.datasets]}

    @property
    def order(self) -> str:
        """What the order of the samples depends on; see GPTDataset."""
        return self.datasets[0].order

    @property
    def requests(self) -> tuple[int | None, ...]:
        """The numbers of samples that were asked for."""
        return tuple(number for dataset in self.datasets for number in dataset.requests)

    def shuffled_with(self, index: int) -> tuple[int, int]:
        """Return the first and one past the last of the samples that are shuffled together with sample `index`."""
        dataset, inside = self._find(index)
        begin, end = dataset.shuffled_with(inside)
        return begin + index - inside, end + index - inside

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[GPTDataset, int]:
        number = min(bisect_right(self._starts, index), len(self.datasets)) - 1
        return self.datasets[number], index - self._starts[number]


class PhasedDataset(ConsecutiveDatasets[SampleSource]):
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

    def phases(self) -> Iterator[tuple[int, SampleSource]]:
        """Yield the first sample of every phase, and its dataset."""
        return zip(self._starts, self.datasets)

    def _find(self, index: int) -> tuple[SampleSource, int]:
        number = bisect_right(self._starts, index) - 1
        if number < 0 or index >= self._end:
            raise IndexError(f"sample {index} lies outside the phases {self.begin} to {self._end}")
        return self.datasets[number], index - self._starts[number]

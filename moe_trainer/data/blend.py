"""Blending: which dataset each sample comes from.

The order is a deterministic greedy rule: at sample k pick the dataset whose share weight_d * max(k, 1) exceeds what
it has delivered by the most (the first one on ties). It is sequential by definition: every pick changes the next
comparison.

To build it with whole-array operations the range of samples is cut into blocks that advance in lockstep, one numpy
operation handling one step of every block. A block cannot know its starting counts, so it starts early, from rounded
ideal counts, and runs a warm-up: the rule always favors the dataset that lags most, so different starting states
fall together after a few steps. Fall together is not proof, therefore every block's end state is compared with its
neighbour's start state; the blocks that began wrongly are done again, from the end states before them, until none is
left. The first block is exact, so at that point all are: for any weights, at most as many rounds as blocks, in practice
one to three. Small blends use the plain loop, which is also the definition the tests compare with.

Source: Megatron-Core blended dataset semantics (snapshot v0.20).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_PLAIN_LOOP_BELOW = 50_000
_ORDER_BLOCK = 4096


def normalize(weights: Sequence[float]) -> list[float]:
    """Scale weights to sum to one, in float64."""
    array = np.asarray(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def build_blend_index(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset (int16 [size]) and the sample inside it (int64 [size]) of every sample of a weighted blend.

    `weights` sum to one.
    """
    return _build(np.asarray(weights, dtype=np.float64), size, None)


def build_exhaustive_index(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the same pair for a blend that reads every sample of every dataset once, in proportion to their sizes."""
    total = sum(sizes)
    limits = np.asarray(sizes, dtype=np.int64)
    return _build(limits / np.float64(max(total, 1)), total, limits)


class BlendOrder:
    """The order of a weighted blend without an end, computed in blocks while samples are asked for.

    Args:
        weights: one per dataset, with any sum.
    """

    def __init__(self, weights: Sequence[float]):
        self._weights = np.asarray(normalize(weights), dtype=np.float64)
        self._start(0, np.zeros(len(weights), dtype=np.int64))

    def find(self, index: int) -> tuple[int, int]:
        """Return the dataset of a sample of the blend, and the sample inside it."""
        if index < self._blocks[0].begin:
            self._start(0, np.zeros(len(self._weights), dtype=np.int64))
        while index >= self._blocks[-1].begin + _ORDER_BLOCK:
            self._append(self._blocks[-1].begin + _ORDER_BLOCK, self._end)
        block = next(block for block in self._blocks if index < block.begin + _ORDER_BLOCK)
        return int(block.dataset[index - block.begin]), int(block.inside[index - block.begin])

    def state(self) -> list[int]:
        """Return the first sample of the last block, and how many samples of every dataset come before it."""
        return [self._blocks[-1].begin, *self._blocks[-1].counts.tolist()]

    def load_state(self, state: Sequence[int]) -> None:
        """Continue at a state."""
        begin, *counts = state
        self._start(begin, np.asarray(counts, dtype=np.int64))

    def _start(self, begin: int, counts: np.ndarray) -> None:
        self._blocks: deque[_OrderBlock] = deque(maxlen=2)  # the samples of a microbatch may lie in two
        self._append(begin, counts)

    def _append(self, begin: int, counts: np.ndarray) -> None:
        self._end = counts.copy()
        self._blocks.append(
            _OrderBlock(begin, counts, *_plain_loop(self._weights, _ORDER_BLOCK, None, begin, self._end))
        )


class _OrderBlock(NamedTuple):
    begin: int
    counts: np.ndarray
    """Samples of every dataset before `begin`."""
    dataset: np.ndarray
    inside: np.ndarray


def _build(weights: np.ndarray, size: int, limits: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    if len(weights) > np.iinfo(np.int16).max:
        raise ValueError(f"a blend of {len(weights)} datasets: at most {np.iinfo(np.int16).max} are possible")
    if len(weights) == 1:
        return np.zeros(size, dtype=np.int16), np.arange(size, dtype=np.int64)
    if size < _PLAIN_LOOP_BELOW:
        return _plain_loop(weights, size, limits, 0, np.zeros(len(weights), dtype=np.int64))
    return _lockstep(weights, size, limits)


def _plain_loop(weights, size, limits, begin, counts):
    """Run the rule for `size` samples from number `begin` on; `counts` before them become those after them."""
    dataset = np.empty(size, dtype=np.int16)
    inside = np.empty(size, dtype=np.int64)
    for k in range(size):
        lag = weights * max(begin + k, 1) - counts
        if limits is not None:
            lag[counts >= limits] = -np.inf
        pick = int(lag.argmax())
        dataset[k], inside[k] = pick, counts[pick]
        counts[pick] += 1
    return dataset, inside


def _lockstep(weights, size, limits):
    num = len(weights)
    warm_up = 64 + 16 * num
    length = max(8 * warm_up, math.isqrt(size))
    starts = np.arange(0, size, length)
    stops = np.minimum(starts + length, size)
    early = np.maximum(starts - warm_up, 0)
    counts = _ideal_counts(weights, early, limits)
    _advance(weights, limits, counts[:, 1:], early[1:], warm_up)  # block 0 has no warm-up: its start is exact
    picks = np.empty((length, len(starts)), dtype=np.int16)
    begun, wrong = counts.copy(), np.arange(len(starts))
    while len(wrong):
        ended, chosen = begun[:, wrong], picks[:, wrong]
        _advance(weights, limits, ended, starts[wrong], length, chosen, stops[wrong])
        counts[:, wrong], picks[:, wrong] = ended, chosen
        wrong = 1 + np.flatnonzero((begun[:, 1:] != counts[:, :-1]).any(axis=0))
        begun[:, wrong] = counts[:, wrong - 1]
    dataset = np.ascontiguousarray(picks.T).reshape(-1)[:size]
    return dataset, _occurrences(dataset, num)


def _ideal_counts(weights, positions, limits):
    """Integer counts [num, blocks] close to weights * position, summing to the position: largest remainders first."""
    ideal = weights[:, None] * positions[None, :]
    counts = np.floor(ideal).astype(np.int64)
    if limits is not None:
        counts = np.minimum(counts, limits[:, None])
    order = np.argsort(counts - ideal, axis=0, kind="stable")
    missing = positions - counts.sum(axis=0)
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(len(weights))[:, None].repeat(len(positions), 1), axis=0)
    counts += rank < missing[None, :]
    return counts


def _advance(weights, limits, counts, positions, steps, picks=None, stops=None):
    """Run the rule on every column of `counts`, in place, each from its own position, at most up to `stops`."""
    columns = np.arange(counts.shape[1])
    shortest = steps if stops is None else int((stops - positions).min())
    for step in range(steps):
        k = positions + step
        m = np.maximum(k, 1).astype(np.float64)
        best = np.full(len(columns), -np.inf)
        pick = np.zeros(len(columns), dtype=np.int16)
        for d in range(len(weights)):
            lag = weights[d] * m - counts[d]
            if limits is not None:
                lag = np.where(counts[d] < limits[d], lag, -np.inf)
            better = lag > best
            np.copyto(best, lag, where=better)
            pick[better] = d
        if picks is not None:
            picks[step] = pick
        if step < shortest:
            counts[pick, columns] += 1
        else:
            running = k < stops
            counts[pick[running], columns[running]] += 1


def _occurrences(dataset: np.ndarray, num: int) -> np.ndarray:
    """For every element, how many equal ones came before it."""
    inside = np.empty(len(dataset), dtype=np.int64)
    for d in range(num):
        where = np.flatnonzero(dataset == d)
        inside[where] = np.arange(len(where))
    return inside

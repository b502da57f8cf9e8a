"""Small parallel mappings that represent a large one.

A dimension of size 1 stays 1, a larger one stays above 1 as far as the ranks suffice. Also kept are whether the expert
grid exceeds the data ranks (and so folds over tensor and context ranks), whether experts have data ranks, and whether
experts are sharded less than the rest. All mappings of at most N ranks are scored. If no single one keeps everything,
further ones are chosen so that every pair of dimensions is above 1 in one of them, because most bugs involve two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

NAMES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")
_MAX_MAPPINGS = 6


@dataclass(frozen=True)
class ParallelMapping:
    """Sizes of the parallel dimensions. Without virtual stages vpp is 1."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def active(self) -> frozenset[str]:
        """Names of the dimensions above 1."""
        return frozenset(name for name in NAMES if getattr(self, name) > 1)

    def __str__(self) -> str:
        sizes = " ".join(f"{name} {getattr(self, name)}" for name in NAMES if getattr(self, name) > 1)
        return f"{sizes or 'one process'}" + (f" on {self.world} ranks" if self.world > 1 else "")


@dataclass(frozen=True)
class MappingRequirements:
    """Requirements of a mapping besides its sizes.

    Attributes:
        moe: the model has experts.
        middle_stages: a feature needs a stage between the first and the last.
        nested_context: context ranks have two levels.
        same_data_ranks: as many data ranks as expert-data ranks (--use-tp-pp-dp-mapping).
        instances: of the distributed optimizer.
        single_expert: one expert per rank.
    """

    moe: bool
    middle_stages: bool = False
    nested_context: bool = False
    same_data_ranks: bool = False
    instances: int = 1
    single_expert: bool = False


def shrink_mapping(original: ParallelMapping, ranks: int, requirements: MappingRequirements) -> list[ParallelMapping]:
    """Choose mappings of at most `ranks` ranks that represent the original; the first one keeps most of it.

    Raises:
        ValueError: if there is none.
    """
    scores = {
        mapping: _score(mapping, original, requirements) for mapping in _candidates(original, ranks, requirements)
    }
    if not scores:
        raise ValueError(f"no mapping of at most {ranks} ranks has the shape of {original}")
    chosen: list[ParallelMapping] = []
    missing = {frozenset(pair) for pair in itertools.combinations_with_replacement(sorted(original.active), 2)}
    while len(chosen) < _MAX_MAPPINGS:
        best = max(scores, key=lambda mapping: (bool(chosen) and len(_covered(mapping, missing)), scores[mapping]))
        covered = _covered(best, missing)
        if chosen and not covered:
            break
        chosen.append(best)
        missing -= covered
    return chosen


def _covered(mapping: ParallelMapping, pairs: set[frozenset[str]]) -> set[frozenset[str]]:
    return {pair for pair in pairs if pair <= mapping.active}


def _sizes(size: int, ranks: int) -> list[int]:
    """Return the possible sizes of a dimension: powers of two and the original size."""
    powers = [power for power in (1, 2, 4, 8, 16, 32) if power <= min(size, ranks)]
    return sorted({*powers, size} if size <= ranks else powers)


def _candidates(original: ParallelMapping, ranks: int, requirements: MappingRequirements) -> Iterator[ParallelMapping]:
    choices = [_sizes(getattr(original, name), ranks) for name in ("tp", "cp", "pp", "dp", "ep", "etp")]
    for tp, cp, pp, dp, ep, etp in itertools.product(*choices):
        etp = etp if requirements.moe else tp
        mapping = ParallelMapping(tp, cp, pp, 2 if original.vpp > 1 and pp > 1 else 1, dp, ep, etp)
        if mapping.world > ranks or mapping.world % (etp * ep * pp):
            continue
        if requirements.same_data_ranks and pp > 1 and mapping.edp != dp:
            continue
        yield mapping


def _sign(a: int, b: int) -> int:
    return (a > b) - (a < b)


def _score(mapping: ParallelMapping, original: ParallelMapping, requirements: MappingRequirements) -> float:
    """Return how much of the original a mapping keeps; on a tie fewer ranks score higher."""
    score = 100.0 * len(mapping.active & {"tp", "cp", "pp", "ep"}) + 60.0 * len(mapping.active & {"dp"})
    score += 8.0 * (min(mapping.pp, 3) == min(original.pp, 3)) + 80.0 * (requirements.middle_stages and mapping.pp > 2)
    # a ring of two has only one direction
    score += 8.0 * (min(mapping.cp, 3) == min(original.cp, 3))
    score += 80.0 * (requirements.nested_context and mapping.cp >= 4)
    score += 30.0 * (requirements.instances > 1 and mapping.dp * mapping.cp >= 4)
    if requirements.moe:
        score += 40.0 * (requirements.single_expert and mapping.ep >= 4)
        score += 100.0 * ("etp" in mapping.active) if original.etp > 1 else 0.0
        score += 20.0 * (_sign(mapping.ep, mapping.dp) == _sign(original.ep, original.dp))
        score += 20.0 * (_sign(mapping.etp, mapping.tp) == _sign(original.etp, original.tp))
        score += 20.0 * ((mapping.edp > 1) == (original.edp > 1))
    return score - 0.5 * mapping.world

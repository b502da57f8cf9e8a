"""Straggler detection: which rank keeps the others waiting (`--log-straggler`).

An iteration takes every rank the same time, because all wait for the slowest; what differs is the compute time
(phase_timer.py). At every log interval the ranks all-gather a dozen numbers, and the last rank, which writes the log,
compares them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.resilience.http_toggle import HttpToggle
from moe_trainer.resilience.phase_timer import PARTS, WAITING, attach_phase_timer

logger = logging.getLogger(__name__)

# A rank is compared with the other ranks of its pipeline stage, which do the same work. It is an outlier if its
# compute time is more than MIN_RATIO times the median of the others; further from it than MIN_DEVIATIONS times their
# median absolute deviation, because experts have different loads; and the excess is more than MIN_SHARE of the
# iteration, because a stage that waits for another one anyway costs nothing. It is reported if it is an outlier in
# two consecutive intervals: a checkpoint's page cache or another job makes any rank slow for a while. Both medians
# exclude the rank, which is half of a group of two.
MIN_RATIO, MIN_DEVIATIONS, MIN_SHARE = 1.2, 3.0, 0.05
_MAX_CANDIDATES = 32  # only this many of the slowest ranks are tested
MAX_LISTED_RANKS = 256


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than its peers. Times are seconds per iteration.

    Attributes:
        ratio: its compute time over the median of its peers.
        num_peers: number of the other ranks of its stage.
        part: the part of the iteration with the largest excess.
        excess_s: how much longer that part takes than the median of the peers.
    """

    rank: int
    ratio: float
    compute_s: float
    median_s: float
    num_peers: int
    stage: int
    part: str
    excess_s: float


@dataclass(frozen=True)
class ComputeTimeSummary:
    """Compute times of an interval over all ranks, in seconds per iteration.

    Attributes:
        stragglers: the outliers of both this interval and the previous one.
        slowest: (rank, seconds), the slowest first.
        fastest: (rank, seconds), the fastest first.
        parts_s: time of every part of an iteration, with waiting, the mean over ranks.
        ranks_s: compute time of every rank; of more than MAX_LISTED_RANKS, of each block of as many, its slowest.
        memory_mb: peak memory of the same ranks, the largest of a block.
    """

    low_s: float
    median_s: float
    high_s: float
    stragglers: tuple[Straggler, ...] = ()
    slowest: tuple[tuple[int, float], ...] = ()
    fastest: tuple[tuple[int, float], ...] = ()
    parts_s: Mapping[str, float] = field(default_factory=dict)
    ranks_s: tuple[float, ...] = ()
    memory_mb: tuple[float, ...] = ()


def is_outlier(seconds: float, others: Sequence[float], ratio: float) -> bool:
    """Return whether a time is far above the others, by ratio and by median absolute deviation."""
    center = median(others)
    deviation = median(abs(other - center) for other in others)
    return seconds > ratio * center and seconds - center > MIN_DEVIATIONS * deviation


def find_stragglers(parts: Sequence[Sequence[float]], stages: Sequence[int]) -> list[Straggler]:
    """Return the outliers, slowest first.

    Args:
        parts: for every rank, the seconds per iteration of each of PARTS.
        stages: for every rank, its pipeline stage.
    """
    waiting = PARTS.index(WAITING)
    compute = [sum(row) - row[waiting] for row in parts]
    stragglers = []
    for rank in sorted(range(len(compute)), key=lambda each: -compute[each])[:_MAX_CANDIDATES]:
        peers = [peer for peer, stage in enumerate(stages) if stage == stages[rank] and peer != rank]
        if not peers:
            continue
        others = [compute[peer] for peer in peers]
        center = median(others)
        is_small = compute[rank] - center <= sum(parts[rank]) * MIN_SHARE
        if is_small or not is_outlier(compute[rank], others, MIN_RATIO):
            continue
        excess = {
            part: parts[rank][index] - median(parts[peer][index] for peer in peers)
            for index, part in enumerate(PARTS)
            if part != WAITING
        }
        worst = max(excess, key=lambda part: excess[part])
        ratio = compute[rank] / center if center > 0.0 else float("inf")
        stragglers.append(Straggler(rank, ratio, compute[rank], center, len(peers), stages[rank], worst, excess[worst]))
    return stragglers


class StragglerDetector:
    """Measures this rank and, on the last rank, finds the slow ones. Collective over ps.world: build it on every rank.

    A report lists the `num_extremes` slowest and fastest ranks. The `switch`, only on rank 0, changes `on` for all
    ranks at the next report. `get_memory_mb` returns this rank's peak memory.
    """

    def __init__(
        self,
        ps: ParallelState,
        device: torch.device,
        num_extremes: int,
        on: bool,
        switch: HttpToggle | None = None,
        get_memory_mb: Callable[[], float] = lambda: 0.0,
    ):
        self._ps, self._device, self._num_extremes, self._get_memory_mb = ps, device, num_extremes, get_memory_mb
        self._switch, self.on = switch, on
        self._timer = attach_phase_timer(ps.trace, device)
        self._iterations = 0
        self._suspects: frozenset[int] = frozenset()
        ranks = collectives.all_gather_object((socket.gethostname(), ps.pp.rank), ps.world)
        self._hosts, self._stages = [host for host, _ in ranks], [stage for _, stage in ranks]

    def start(self) -> None:
        if self.on:
            self._timer.start()

    def stop(self) -> None:
        if self.on:
            self._timer.stop()
            self._iterations += 1

    def report(self, iteration: int) -> ComputeTimeSummary | None:
        """Compare the ranks over the iterations since the last call. Collective over ps.world.

        Returns:
            The summary on the last rank; None on the others, and if nothing was measured.
        """
        seconds, count, self._iterations = self._timer.pop_totals(), self._iterations, 0
        requested = self.on if self._switch is None else self._switch.on
        values = [seconds[part] / max(count, 1) for part in PARTS] + [self._get_memory_mb(), float(requested)]
        local = torch.tensor(values, dtype=torch.float64, device=self._device)
        gathered = local.new_empty(local.numel() * self._ps.world.size)
        collectives.all_gather_flat(gathered, local, self._ps.world)
        rows = gathered.view(self._ps.world.size, -1).tolist()
        was_on, self.on = self.on, bool(rows[0][-1])
        if was_on != self.on:
            self._suspects = frozenset()
            logger.info("straggler detection %s from iteration %d", "enabled" if self.on else "disabled", iteration + 1)
        if not was_on or count == 0 or self._ps.world.rank != self._ps.world.size - 1:
            return None
        return self._summarize([row[: len(PARTS)] for row in rows], [row[len(PARTS)] for row in rows])

    def close(self) -> None:
        self._ps.trace.observer = None
        if self._switch is not None:
            self._switch.close()

    def _summarize(self, parts: list[list[float]], memory_mb: list[float]) -> ComputeTimeSummary:
        outliers = find_stragglers(parts, self._stages)
        stragglers = tuple(outlier for outlier in outliers if outlier.rank in self._suspects)
        self._suspects = frozenset(outlier.rank for outlier in outliers)
        compute = [sum(row) - row[PARTS.index(WAITING)] for row in parts]
        ascending = sorted(enumerate(compute), key=lambda each: each[1])
        slowest, fastest = (tuple(order[: self._num_extremes]) for order in (ascending[::-1], ascending))
        block = -(-len(compute) // MAX_LISTED_RANKS)
        starts = range(0, len(compute), block)
        return ComputeTimeSummary(
            min(compute),
            median(compute),
            max(compute),
            stragglers,
            slowest,
            fastest,
            {part: sum(row[index] for row in parts) / len(parts) for index, part in enumerate(PARTS)},
            tuple(max(compute[start : start + block]) for start in starts),
            tuple(max(memory_mb[start : start + block]) for start in starts),
        )

    def lines(self, summary: ComputeTimeSummary) -> list[str]:
        """Return the log lines: one per straggler and one of the extremes; none if there is no straggler."""
        if not summary.stragglers:
            return []
        extremes = "; ".join(
            f"{name}: " + ", ".join(f"rank {rank} {seconds * 1e3:.1f} ms" for rank, seconds in ranks)
            for name, ranks in (("slowest", summary.slowest), ("fastest", summary.fastest))
            if ranks
        )
        return [*map(self._line, summary.stragglers), *([f"straggler: {extremes}"] if extremes else [])]

    def _line(self, straggler: Straggler) -> str:
        count = straggler.num_peers
        peers = "the other rank" if count == 1 else f"the median of the other {count} ranks"
        stage = f" of pipeline stage {straggler.stage}" if len(set(self._stages)) > 1 else ""
        return (
            f"straggler: rank {straggler.rank} ({self._hosts[straggler.rank]}): compute time "
            f"{straggler.compute_s * 1e3:.1f} ms/iteration, {straggler.ratio:.2f} times {peers}{stage} "
            f"({straggler.median_s * 1e3:.1f} ms); "
            f"largest excess: {straggler.part} ({straggler.excess_s * 1e3:+.1f} ms)"
        )

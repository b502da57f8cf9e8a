"""Which rank keeps the others waiting? (`--log-straggler`)

Iterations take every rank the same time, since all wait for the slowest; what differs is how much of it is a rank's own (stopwatch.py). At
every log interval each rank sends a dozen numbers to all (one small all-gather), and the last rank, which writes the log, judges.

A rank is only compared with the others of its pipeline stage, which do the same work; a stage of one rank is not judged. It sticks out when its
own time is more than 1.2 times the median of the others, further from it than three times their median absolute deviation (experts have
different loads, so a group may be uneven), and the difference is more than a twentieth of the iteration (on a stage that waits for another
one anyway it costs nothing). And it is named only when that was so in the interval before, too: a checkpoint's page cache or a
neighbour's job makes any rank slow for a while.

Both medians are those of the *other* ranks: of two ranks, the slow one is half of the group.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from moe_trainer.guard.stopwatch import PARTS, WAITING, attach
from moe_trainer.guard.switch import Switch
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)

RATIO, DEVIATIONS, SHARE = 1.2, 3.0, 0.05
_MOST = 32  # ranks that are judged, the slowest first: what does not stick out among these does not stick out


@dataclass(frozen=True)
class Slow:
    """A rank that sticks out. ratio: its own time by the median of its peers. part, excess_s: what takes it longer than them, and by how much.

    Times are seconds of an iteration.
    """

    rank: int
    ratio: float
    own_s: float
    usual_s: float
    peers: int
    stage: int
    part: str
    excess_s: float


@dataclass(frozen=True)
class OwnTimes:
    """What an interval showed: seconds of own work an iteration over all ranks, and those who stuck out in this and in the last interval.

    slowest, fastest: (rank, seconds), the most extreme first.
    """

    low_s: float
    median_s: float
    high_s: float
    stragglers: tuple[Slow, ...] = ()
    slowest: tuple[tuple[int, float], ...] = ()
    fastest: tuple[tuple[int, float], ...] = ()


def sticks_out(seconds: float, others: Sequence[float], ratio: float) -> bool:
    """Is a time far above those of the others, by ratio and by deviation?"""
    usual = median(others)
    return seconds > ratio * usual and seconds - usual > DEVIATIONS * median(abs(each - usual) for each in others)


def find_slow(parts: Sequence[Sequence[float]], stages: Sequence[int]) -> list[Slow]:
    """The ranks that stick out, by the rule above.

    parts: of every rank, seconds an iteration of each of PARTS. stages: of every rank, its place in the pipeline.
    """
    waiting = PARTS.index(WAITING)
    own = [sum(row) - row[waiting] for row in parts]
    found = []
    for rank in sorted(range(len(own)), key=lambda each: -own[each])[:_MOST]:
        others = [each for each, stage in enumerate(stages) if stage == stages[rank] and each != rank]
        if not others:
            continue
        usual = median(own[each] for each in others)
        if not sticks_out(own[rank], [own[each] for each in others], RATIO) or own[rank] - usual <= SHARE * sum(parts[rank]):
            continue
        excess = {part: parts[rank][index] - median(parts[each][index] for each in others)
                  for index, part in enumerate(PARTS) if part != WAITING}
        worst = max(excess, key=excess.get)
        ratio = own[rank] / usual if usual > 0.0 else float("inf")
        found.append(Slow(rank, ratio, own[rank], usual, len(others), stages[rank], worst, excess[worst]))
    return found


class StragglerWatch:
    """Measures this rank, and knows on the last rank who is slow. Collective over ps.world: build it on every rank.

    extremes: how many of the slowest and of the fastest ranks a report lists. on: whether it measures from the start; `switch`, which only
    rank 0 has, changes that for all ranks at the next report.
    """

    def __init__(self, ps: ParallelState, device: torch.device, extremes: int, on: bool, switch: Switch | None = None):
        self._ps, self._device, self._extremes = ps, device, extremes
        self._switch = switch
        self.on = on
        self._stopwatch = attach(ps.trace, device)
        self._iterations = 0
        self._suspects: frozenset[int] = frozenset()
        places = collectives.all_gather_object((socket.gethostname(), ps.pp.rank), ps.world)
        self._hosts, self._stages = [host for host, _ in places], [stage for _, stage in places]

    def start(self) -> None:
        """An iteration begins."""
        if self.on:
            self._stopwatch.start()

    def stop(self) -> None:
        """It is over."""
        if self.on:
            self._stopwatch.stop()
            self._iterations += 1

    def report(self, iteration: int) -> OwnTimes | None:
        """Compare the ranks over the iterations since the last call. Collective over ps.world.

        Returns: on the last rank what the interval showed; None elsewhere, and where nothing was measured.
        """
        seconds, count, self._iterations = self._stopwatch.take(), self._iterations, 0
        wanted = self.on if self._switch is None else self._switch.on
        mine = torch.tensor([seconds[part] / max(count, 1) for part in PARTS] + [float(wanted)], dtype=torch.float64, device=self._device)
        everyone = mine.new_empty(mine.numel() * self._ps.world.size)
        collectives.all_gather_flat(everyone, mine, self._ps.world)
        rows = everyone.view(self._ps.world.size, -1).tolist()
        was_on, self.on = self.on, bool(rows[0][-1])
        if was_on != self.on:
            self._suspects = frozenset()
            logger.info("the search for slow ranks is %s from iteration %d on", "on" if self.on else "off", iteration + 1)
        if not was_on or count == 0 or self._ps.world.rank != self._ps.world.size - 1:
            return None
        return self._judge([row[:-1] for row in rows])

    def close(self) -> None:
        """Measure no more, and give the switch's port back."""
        self._ps.trace.meter = None
        if self._switch is not None:
            self._switch.close()

    def _judge(self, parts: list[list[float]]) -> OwnTimes:
        slow = find_slow(parts, self._stages)
        named = tuple(each for each in slow if each.rank in self._suspects)
        self._suspects = frozenset(each.rank for each in slow)
        own = [sum(row) - row[PARTS.index(WAITING)] for row in parts]
        order = sorted(enumerate(own), key=lambda each: each[1])
        return OwnTimes(min(own), median(own), max(own), named, tuple(order[::-1][:self._extremes]), tuple(order[:self._extremes]))

    def lines(self, times: OwnTimes) -> list[str]:
        """What the log says of it: a line for every straggler and one of the extremes; nothing when there is no straggler."""
        if not times.stragglers:
            return []
        extremes = "; ".join(f"{name}: " + ", ".join(f"rank {rank} {seconds * 1e3:.1f} ms" for rank, seconds in ranks)
                             for name, ranks in (("slowest", times.slowest), ("fastest", times.fastest)) if ranks)
        return [*map(self._line, times.stragglers), *([f"straggler: {extremes}"] if extremes else [])]

    def _line(self, slow: Slow) -> str:
        others = "the other rank" if slow.peers == 1 else f"the median of the other {slow.peers} ranks"
        stage = f" of pipeline stage {slow.stage}" if len(set(self._stages)) > 1 else ""
        return (f"straggler: rank {slow.rank} ({self._hosts[slow.rank]}) takes {slow.ratio:.2f} times as long as {others}{stage}: "
                f"{slow.own_s * 1e3:.1f} ms of its own an iteration, not {slow.usual_s * 1e3:.1f}; it loses most in {slow.part} "
                f"({slow.excess_s * 1e3:+.1f} ms)")

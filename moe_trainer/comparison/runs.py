"""Runs to compare: their settings, grouped by what differs besides the seed, and figures at equal tokens or time.

Runs are those of metrics/run_data.py. A training loss at a number of tokens is the mean of the records of the last
twentieth before it, so that single batches do not decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_trainer.metrics.run_data import UNCOMPARED_SETTINGS, is_validation

_WINDOW = 0.05


@dataclass(frozen=True)
class Run:
    """A run; `page`: as RunData.as_page returns it."""

    page: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.page["name"]

    @property
    def settings(self) -> dict[str, object]:
        """Every setting but those of the seed and of files."""
        settings = self.page["head"].get("settings", {})
        return {name: value for name, value in settings.items() if name not in UNCOMPARED_SETTINGS}

    @property
    def seed(self) -> object:
        return self.page["head"].get("settings", {}).get("seed")

    @property
    def environment(self) -> dict[str, str]:
        """What the run ran on, and with which versions; what is unknown is missing."""
        head = self.page["head"]
        mapping, hardware, versions = (_mapping(head.get(name)) for name in ("mapping", "hardware", "versions"))
        found = {"device": hardware.get("device"), "ranks": mapping.get("world_size"), "nodes": mapping.get("nodes")}
        found |= {f"{str(name).replace('_', '-')} version": version for name, version in versions.items()}
        return {name: str(value) for name, value in found.items() if value is not None}

    def axis(self, name: str) -> Sequence[float]:
        """Return the values of "tokens" or "wall_s" of all records; empty if they are unknown."""
        return self.page["records"].get(name, ())

    @property
    def losses(self) -> Sequence[float | None]:
        """Training losses of all records; None where they are NaN or missing."""
        records = self.page["records"]
        return records["series"].get("lm loss") or [None] * len(records["iteration"])

    def loss_at(self, axis: str, end: float) -> float | None:
        """Return the training loss at a number of tokens or seconds."""
        places = self.axis(axis)
        last = [at for at, place in enumerate(places) if place <= end and self.losses[at] is not None]
        if not last:
            return None
        begin = places[last[-1]] - _WINDOW * end
        found = [self.losses[at] for at in last if places[at] > begin] or [self.losses[last[-1]]]
        return sum(value for value in found if value is not None) / len(found)

    @property
    def validation_loss(self) -> float | None:
        """The newest validation loss, of the last set if there are several."""
        newest = self.page["newest_validation"]
        return None if newest is None else newest.get("lm loss")

    @property
    def validations(self) -> dict[str, list[tuple[int, float | None]]]:
        """(iteration, loss) of all validations, by the names of their sets, without tests; a NaN loss is None."""
        found: dict[str, list[tuple[int, float | None]]] = {}
        for each in self.page["validations"]:
            if is_validation(each["set"]):
                found.setdefault(each["set"], []).append((each["iteration"], each.get("lm loss")))
        return found

    def newest_validation(self, name: str) -> float | None:
        """Return the newest loss of a validation set."""
        curve = self.validations.get(name)
        return curve[-1][1] if curve else None

    @property
    def throughput(self) -> float | None:
        """Tokens per second, the median without the first records."""
        return self.page["throughput"]

    @property
    def memory_gib(self) -> float | None:
        """Peak memory of the fullest rank that is known."""
        ranks = self.page.get("ranks", {}).get("memory_mb")
        values = [value for row in ranks or () for value in row if value is not None] + self._values("max_memory_mb")
        return max(values) / 1024 if values else None

    def _values(self, name: str) -> list[float]:
        """Return the known values of a metric, one if it never changed."""
        records = self.page["records"]
        values = records["series"].get(name, [records["constants"].get(name)])
        return [each for each in values if each is not None]

    def routing(self, name: str, worst: Callable[[Sequence[float]], float]) -> float | None:
        """Return the worst layer's newest value of a routing metric."""
        rows = self.page.get("routing", {}).get("metrics", {}).get(name)
        values = [value for value in rows[-1] if value is not None] if rows else []
        return worst(values) if values else None


@dataclass(frozen=True)
class RunGroup:
    """Runs with equal settings, but for the seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> tuple[object, ...]:
        return tuple(run.seed for run in self.runs)

    def values(self, get: Callable[[Run], float | None]) -> list[float]:
        """Return a figure of all runs that have it."""
        return [value for run in self.runs if (value := get(run)) is not None]


def make_groups(pages: Sequence[Mapping[str, Any]]) -> list[RunGroup]:
    """Group runs by their settings, in the order of their first runs; runs without settings are on their own."""
    groups: list[list[Run]] = []
    for page in pages:
        run = Run(page)
        same = [runs for runs in groups if run.settings and runs[0].settings == run.settings and _can_join(run, runs)]
        if same:
            same[0].append(run)
        else:
            groups.append([run])
    return [RunGroup(runs[0].name, tuple(sorted(runs, key=lambda run: str(run.seed)))) for runs in groups]


def _can_join(run: Run, runs: Sequence[Run]) -> bool:
    """Return whether it has another seed; a repeated run is no further sample."""
    return run.seed is not None and run.seed not in [each.seed for each in runs]


def settings_that_differ(groups: Sequence[RunGroup]) -> list[tuple[str, list[object]]]:
    """Return (setting, its value in every group) of settings that differ; None where a group does not know it."""
    names = dict.fromkeys(name for group in groups for name in group.runs[0].settings)
    rows = [(name, [group.runs[0].settings.get(name) for group in groups]) for name in names]
    return sorted((name, values) for name, values in rows if any(value != values[0] for value in values))


def environment_that_differs(groups: Sequence[RunGroup]) -> list[tuple[str, list[object]]]:
    """Return (name, its values in every group) of what differs between runs; None where a group does not know it."""
    rows: list[tuple[str, list[object]]] = []
    for name in dict.fromkeys(name for group in groups for run in group.runs for name in run.environment):
        values = [list(dict.fromkeys(run.environment.get(name, "-") for run in group.runs)) for group in groups]
        if any(each != values[0] or len(each) > 1 for each in values):
            rows.append((name, [None if each == ["-"] else ", ".join(each) for each in values]))
    return rows


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def common_end(groups: Sequence[RunGroup], axis: str) -> float | None:
    """Return the tokens or seconds that all runs have reached; None if one does not know."""
    ends = [run.axis(axis)[-1] if len(run.axis(axis)) else None for group in groups for run in group.runs]
    return None if None in ends else min(end for end in ends if end is not None)

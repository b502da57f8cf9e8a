"""The records of a run as the dashboard's page reads them: bounded, by column.

`RunData` collects records of metrics.jsonl; of a long run it keeps evenly spaced ones, the newest, and all events.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from arguments.container import OPTIONS, flags_of
from moe_trainer.metrics.record_checks import checked_record, is_number
from moe_trainer.metrics.run_findings import RunSizes, find_problems, unusual_learning_rate, worst_layers
from moe_trainer.metrics.run_state import WITHOUT_END, RunEnd, RunState, clock, state_of_run

MAX_RECORDS = 2000
MAX_EVENTS = 500
MAX_LAYER_VALUES = 200_000
MAX_LOADS = 300_000
MAX_RANK_VALUES = 100_000
_WARMUP = 0.1  # share of the records that throughput leaves out
_MAX_TIME_S = 2e11  # since the epoch; later times have no date

_NOT_SERIES = frozenset(("iteration", "time", "interval_s", "resumed_from", "consumed_samples"))

UNCOMPARED_SETTINGS = (
    flags_of("exit", "output")
    | frozenset(dest for dest, option in OPTIONS.items() if option.path == "cache")
    | frozenset(("seed", "load", "ckpt_step"))  # as in runs that are repeated or resumed
)
"""Settings that do not make another experiment."""


class DownsampledList:
    """A list that keeps at most `limit` items, evenly spaced over all that were added, and the last one."""

    def __init__(self, limit: int):
        self._limit, self._stride, self._count = max(2, limit), 1, 0
        self._sampled: list[Any] = []
        self._last: Any = None

    def add(self, item: Any) -> None:
        if self._count % self._stride == 0:
            self._sampled.append(item)
            if len(self._sampled) > self._limit:
                self._sampled, self._stride = self._sampled[::2], self._stride * 2
        self._count, self._last = self._count + 1, item

    def items(self) -> list[Any]:
        """Return the items that were kept, in order."""
        return self._sampled if not self._sampled or self._sampled[-1] is self._last else [*self._sampled, self._last]


class RunData:
    """Records of a run.

    Args:
        name: of the run.
        path: of its metrics file.
        num_runs: that share a page, and its size.
    """

    def __init__(self, name: str, path: str, num_runs: int = 1):
        self.name, self.path = name, path
        self._num_runs = num_runs
        self._records, self._validations, self._events, self._samples, self._tasks = (
            DownsampledList(limit // num_runs) for limit in (MAX_RECORDS, MAX_RECORDS, MAX_EVENTS, 100, MAX_RECORDS)
        )
        self._routing: DownsampledList | None = None
        self._loads: DownsampledList | None = None
        self._between_ranks: DownsampledList | None = None
        self._ranks: DownsampledList | None = None
        self._starts: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {}
        self._newest: dict[str, Any] = {}
        self._end: RunEnd | None = None
        self._productive_s = 0.0
        self._slow: list[int] = []
        self._saved = -1

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a record; what cannot be drawn is left out."""
        checked = checked_record(record)
        if checked is None:
            return
        for name, target in (("validation", self._validations), ("task", self._tasks), ("sample", self._samples)):
            if name in checked:
                target.add(checked)
                return
        self._take_start(checked)
        if "ended" in checked:
            self._take_end(checked)
            return
        if self._end is not None and checked["iteration"] > self._end.iteration:
            self._end = None  # resumed; a last record may come after the end that another rank has recorded
        self._productive_s += checked.get("interval_s") or 0.0
        self._take_routing(checked)
        self._take_ranks(checked)
        self._take_events(checked)
        self._newest = checked
        nested = {"routing", "run", "rejected"}
        self._records.add({name: value for name, value in checked.items() if name not in nested})

    def take_save(self, iteration: int, moment: float | None) -> None:
        """Add the save of a checkpoint, once."""
        if iteration > self._saved:
            self._saved = iteration
            self._add_event("save", iteration, moment, f"saved a checkpoint at iteration {iteration}")

    def _add_event(self, kind: str, iteration: int, moment: float | None, text: str) -> None:
        self._events.add({"kind": kind, "iteration": iteration, "time": moment, "text": text})

    def _take_start(self, record: Mapping[str, Any]) -> None:
        run = record.get("run")
        if isinstance(run, Mapping):
            self._head = {**self._head, **run}
            started = run.get("started")
            if is_number(started) and started is not None and 0 <= started < _MAX_TIME_S:
                self._starts.append({"iteration": record["iteration"], "time": run["started"]})

    def _take_end(self, record: Mapping[str, Any]) -> None:
        """Take the end of a start; a finished run that is started again ends in the same way."""
        end = RunEnd.of_record(record)
        if end != self._end:
            self._end = end
            self._add_event("end", end.iteration, record.get("time"), str(end))

    def _take_routing(self, record: Mapping[str, Any]) -> None:
        routing = record.get("routing")
        if not routing:
            return
        loads = routing["tokens_per_expert"]
        if self._routing is None or self._loads is None:
            self._routing = DownsampledList(MAX_LAYER_VALUES // (8 * len(loads) * self._num_runs))
            self._loads = DownsampledList(MAX_LOADS // (len(loads) * len(loads[0]) * self._num_runs))
        self._routing.add({"iteration": record["iteration"], **routing})
        self._loads.add((record["iteration"], loads))
        if between := routing.get("between_ranks"):
            if self._between_ranks is None:
                self._between_ranks = DownsampledList(MAX_RANK_VALUES // (len(between["tokens"]) ** 2 * self._num_runs))
            self._between_ranks.add({"iteration": record["iteration"], **between})

    def _take_ranks(self, record: Mapping[str, Any]) -> None:
        times = record.get("own_time_ms")
        if not times or "ranks" not in times:
            return
        if self._ranks is None:
            self._ranks = DownsampledList(MAX_RANK_VALUES // (2 * len(times["ranks"]) * self._num_runs))
        self._ranks.add({"iteration": record["iteration"], **times})

    def _take_events(self, record: Mapping[str, Any]) -> None:
        """Keep what is rare: records are downsampled, and events must not be lost."""
        iteration, moment = record["iteration"], record.get("time")

        def add(kind: str, at: int, text: str) -> None:
            self._add_event(kind, at, moment, text)

        for saved in record.get("saved", ()):
            self.take_save(saved, moment)
        if record.get("resumed_from") is not None:
            add("resume", int(record["resumed_from"]), f"resumed after iteration {record['resumed_from']:g}")
        for entry in record.get("rejected", ()):
            add("skip", entry["iteration"], f"iteration {entry['iteration']} skipped: {entry['because']}")
        if record.get("nan_iterations"):
            add("nan", iteration, f"{record['nan_iterations']:g} iterations with NaN or infinite losses")
        if record.get("repeated_iterations"):
            add("rerun", iteration, f"{record['repeated_iterations']:g} iterations ran again: a buffer was too small")
        slow = record.get("own_time_ms", {}).get("stragglers", self._slow)
        for rank in slow:
            if rank not in self._slow:
                add("slow_rank", iteration, f"rank {rank} is slower than its peers")
        self._slow = slow

    def as_page(self, updated: float | None = None, is_alive: bool | None = None) -> dict[str, Any]:
        """Return the run as the page reads it.

        Args:
            updated: when the file was written, in seconds since the epoch.
            is_alive: whether the run's process runs; None if unknown.
        """
        records, state, validations = self._records.items(), self._state(updated, is_alive), self._page_validations()
        begin = self._starts[0]["time"] if self._starts else None
        if begin is None and records and records[0].get("time") is not None:
            begin = records[0]["time"] - (records[0].get("elapsed_ms") or 0.0) / 1e3

        def wall(record: Mapping[str, Any]) -> float | None:
            moment = record.get("time")
            return None if begin is None or moment is None else round(moment - begin, 3)

        seq_length = self._seq_length
        events = [
            {"kind": each["kind"], "iteration": each["iteration"], "wall_s": wall(each), "text": each["text"]}
            for each in self._events.items()
        ]
        page: dict[str, Any] = {
            "name": self.name,
            "path": self.path,
            "status": state.name,
            "state": state.words,
            "silent_at": state.silent_at,
            "updated": None if updated is None else clock(updated),
            "head": self._page_head(),
            "progress": self._progress(records, wall, seq_length, state.name == "running"),
            "records": self._columns(records, wall, seq_length),
            "validations": validations,
            "newest_validation": next((each for each in reversed(validations) if is_validation(each["set"])), None),
            "throughput": _throughput(records),
            "events": events,
            "samples": [
                {"iteration": each["iteration"], "prompt": each["sample"], "text": each.get("text", "")}
                for each in self._samples.items()
            ],
            "tasks": [_without(each, ("time",)) for each in self._tasks.items()],
        }
        routing = [] if self._routing is None else self._routing.items()
        if routing and self._loads is not None:
            page["routing"] = _routing_columns(routing, self._loads.items())
            if self._between_ranks is not None:
                page["routing"]["between_ranks"] = _between_ranks_columns(self._between_ranks.items())
        ranks = [] if self._ranks is None else self._ranks.items()
        if ranks:
            page["ranks"] = _rank_columns(ranks)
        sizes = RunSizes(
            num_experts=self._count("model", "num_experts", 0),
            world_size=self._count("mapping", "world_size", 1),
            expert_ranks=self._count("mapping", "ep", 1),
            vocab_size=self._head.get("padded_vocab_size"),
        )
        rate = unusual_learning_rate(self._settings("all_settings"), self._count("model", "active_parameters", 0))
        texts = (rate, *self._head.get("warnings", ()))
        warnings = [text for text in texts if isinstance(text, str)]
        page["findings"] = find_problems(records, routing, ranks, sizes, self._end_finding(state), warnings)
        return page

    def _count(self, part: str, name: str, default: int) -> int:
        """Return a count of the run's description, which any program may have written."""
        described = self._head.get(part)
        value = described.get(name) if isinstance(described, Mapping) else None
        return value if isinstance(value, int) and value > 0 else default

    def _settings(self, name: str = "settings") -> Mapping[str, Any]:
        """Return the settings that are not at their defaults, or `all_settings`."""
        settings = self._head.get(name)
        return settings if isinstance(settings, Mapping) else {}

    @property
    def _seq_length(self) -> int | None:
        """Tokens of a sample; None if they differ, or are unknown."""
        settings = self._settings()
        if settings.get("use_varlen_dataset") or settings.get("sft"):
            return None
        return self._count("model", "seq_length", 0) or None

    def _state(self, updated: float | None, is_alive: bool | None) -> RunState:
        heard = self._newest.get("time") if updated is None else updated
        return state_of_run(self._end, heard, self._newest.get("interval_s") or 0.0, time.time(), is_alive)

    def _end_finding(self, state: RunState) -> dict[str, Any] | None:
        """Return what the page says first of a run that ended badly; None of another one."""
        if state.name == "failed":
            return {"severity": "bad", "card": "events", "text": f"the run {self._end}"}
        if state.name not in WITHOUT_END:
            return None
        train_iters = self._head.get("train_iters")
        is_complete = isinstance(train_iters, int) and self._newest.get("iteration", 0) >= train_iters
        text = f"{state.words}, {state.cause}" + ("; all iterations are done" if is_complete else "")
        return {"severity": "warn" if is_complete else "bad", "card": "events", "text": text}

    def _page_validations(self) -> list[dict[str, Any]]:
        """Return one validation of each set and iteration: that after the last iteration replaces one that was due."""
        found = {(each["validation"], each["iteration"]): each for each in self._validations.items()}
        return [{"set": each["validation"], **_without(each, ("validation",))} for each in found.values()]

    def _page_head(self) -> dict[str, Any]:
        head = {
            name: value for name, value in self._head.items() if name not in ("started", "settings", "all_settings")
        }
        changed = self._head.get("settings")
        everything = self._head.get("all_settings", changed)
        if isinstance(everything, Mapping):
            head["settings"] = dict(everything)
        if isinstance(changed, Mapping):
            head["changed"] = list(changed)
        head["starts"] = [{**start, "time": clock(start["time"])} for start in self._starts]
        return head

    def _progress(
        self, records: Sequence[Mapping[str, Any]], wall: Any, seq_length: int | None, is_running: bool
    ) -> dict[str, Any]:
        if not self._newest:
            return {"train_iters": self._head.get("train_iters")}
        iteration, train_iters = self._newest["iteration"], self._head.get("train_iters")
        progress: dict[str, Any] = {"iteration": iteration, "train_iters": train_iters, "wall_s": wall(self._newest)}
        if seq_length and self._newest.get("consumed_samples") is not None:
            progress["tokens"] = self._newest["consumed_samples"] * seq_length
        recent = [each["elapsed_ms"] for each in records[-50:] if each.get("elapsed_ms")]
        if is_running and recent and isinstance(train_iters, int):
            progress["eta_s"] = max(0, train_iters - iteration) * median(recent) / 1e3
        if self._productive_s and progress["wall_s"]:
            progress["goodput"] = min(1.0, self._productive_s / progress["wall_s"])
        return progress

    def _columns(self, records: Sequence[Mapping[str, Any]], wall: Any, seq_length: int | None) -> dict[str, Any]:
        names = dict.fromkeys(name for record in records for name, value in record.items() if _is_series(name, value))
        columns = {name: [record.get(name) for record in records] for name in names}
        packing = dict.fromkeys(name for record in records for name in record.get("packing", ()))
        columns |= {f"packing {name}": [record.get("packing", {}).get(name) for record in records] for name in packing}
        constants = {
            name: values[0]
            for name, values in columns.items()
            if len(values) > 1 and name != "lm loss" and all(value == values[0] for value in values)
        }
        found: dict[str, Any] = {
            "iteration": [record["iteration"] for record in records],
            "series": {
                name: [_short(value, 8 if name.endswith("loss") else 5) for value in values]
                for name, values in columns.items()
                if name not in constants
            },
            "constants": constants,
        }
        walls = [wall(record) for record in records]
        if walls and None not in walls:
            found["wall_s"] = walls
        if seq_length and all(record.get("consumed_samples") is not None for record in records):
            found["tokens"] = [record["consumed_samples"] * seq_length for record in records]
        parts = dict.fromkeys(name for record in records for name in record.get("own_time_ms", {}).get("parts", ()))
        if parts:
            of_records = [record.get("own_time_ms", {}).get("parts", {}) for record in records]
            found["step_time_ms"] = {name: [_short(each.get(name)) for each in of_records] for name in parts}
        return found


def _without(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


def _short(value: Any, digits: int = 5) -> Any:
    """Round a float to significant digits, so that a page stays small."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) and math.isfinite(value) else value


def is_validation(name: str) -> bool:
    """Return whether a set that was evaluated is a validation set; others are tests."""
    return name.partition("-")[0] == "validation"


def _throughput(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the tokens per second, the median without the first records; None if they are unknown."""
    values = [each["tokens_per_s"] for each in records if each.get("tokens_per_s") is not None]
    return median(values[int(_WARMUP * len(values)) :]) if values else None


def _is_series(name: str, value: Any) -> bool:
    return name not in _NOT_SERIES and isinstance(value, int | float)


def _routing_columns(routing: Sequence[Mapping[str, Any]], loads: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    layers = routing[-1]["layers"]
    routing = [each for each in routing if len(each["layers"]) == len(layers)]
    shape = len(loads[-1][1]), len(loads[-1][1][0])
    loads = [each for each in loads if (len(each[1]), len(each[1][0])) == shape]
    others = ("iteration", "layers", "straggler_cost", "tokens_per_expert", "between_ranks")
    names = [name for name in routing[-1] if name not in others]
    metrics = {
        name: [[_short(value, 4) for value in each.get(name, [None] * len(layers))] for each in routing]
        for name in names
    }
    return {
        "iteration": [each["iteration"] for each in routing],
        "layers": layers,
        "metrics": metrics,
        "straggler_cost": [_short(each["straggler_cost"]) for each in routing],
        "loads": {"iteration": [each for each, _ in loads], "tokens_per_expert": [table for _, table in loads]},
        "findings": worst_layers(routing),
    }


def _between_ranks_columns(between: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tables that have the newest one's rows; a resumed run may have another expert-parallel size."""
    newest = between[-1]
    ranks_per_row, num_rows = newest["ranks_per_row"], len(newest["tokens"])
    found = [each for each in between if (each["ranks_per_row"], len(each["tokens"])) == (ranks_per_row, num_rows)]
    return {
        "iteration": [each["iteration"] for each in found],
        "ranks_per_row": ranks_per_row,
        "tokens": [each["tokens"] for each in found],
    }


def _rank_columns(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    count = len(ranks[-1]["ranks"])
    ranks = [each for each in ranks if len(each["ranks"]) == count]
    found: dict[str, Any] = {
        "iteration": [each["iteration"] for each in ranks],
        "ranks": list(range(count)),
        "time_ms": [[_short(value, 4) for value in each["ranks"]] for each in ranks],
    }
    if all("memory_mb" in each for each in ranks):
        found["memory_mb"] = [[_short(value, 4) for value in each["memory_mb"]] for each in ranks]
    return found

"""Fit the constants of the time model to the user's own runs: `plan.py calibrate --from metrics.jsonl ...`.

A metrics file of this program records what ran (the `run` of its first record) and how long every iteration took. A
run's time is the median of its iterations after the warm-up. The constants (`Constants`) of the named hardware are
fitted, in logarithms, by least squares with a prior at their present values, since a few runs cannot determine all of
them. Constants that no run depends on stay.

The result is a hardware file for --hardware. It holds the runs, each with the time that a fit to the other runs
predicts, from which uncertainty.py makes the error bars of plans for this hardware.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, TypeGuard

from arguments.container import from_values
from arguments.regular_file import regular_file
from moe_trainer.estimate.hardware import KNOWN_HARDWARE, CalibrationRun, Constants, Hardware, find_device
from moe_trainer.estimate.plan import Plan, PlanError, make_plan, retimed_step
from moe_trainer.estimate.uncertainty import features, get_mapping_sizes

WARM_UP, LEAST = 3, 5
"""Iterations after a start that are ignored, and iterations that are required after them."""
PRIOR = MappingProxyType(
    {
        "gemm_bf16": 0.7,
        "gemm_fp8": 0.7,
        "memory": 0.7,
        "launch": 0.7,
        "iteration": 1.0,
        "latency": 1.0,
        "links": 0.7,
        "update": 0.7,
    }
)
"""Standard deviations of the constants' logarithms before any measurement."""
NOISE = 0.03
"""Standard deviation of a measured time's logarithm."""
MAX_BYTES = 1 << 30
MIN_MS, MAX_MS = 1e-3, 1e9
"""Plausible limits of the time of an iteration."""
MAX_RANKS = MAX_VOCABULARY = 1 << 30
MAX_LISTED = MappingProxyType(
    {"num_layers": 1 << 12, "mtp_num_layers": 1 << 12, "pipeline_model_parallel_size": 1 << 12}
)
"""Maximum sizes of lists that a plan makes; no measured run has more."""


@dataclass(frozen=True)
class MeasuredRun:
    """A start of a run: seconds of an iteration, number of iterations after warm-up, and what ran."""

    name: str
    seconds: float
    iterations: int
    device: str
    threads: int | None
    plan: Plan


def read_device_name(path: str | Path) -> str:
    """Return the name of the hardware that a metrics file was written on.

    Raises:
        PlanError: if it is unknown.
    """
    runs = (record["run"] for record in _records(path) if isinstance(record.get("run"), dict))
    run: Mapping[str, Any] = next(runs, {})
    device = str(run.get("device", ""))
    found = find_device(device)
    if found is None:
        known = ", ".join(KNOWN_HARDWARE)
        raise PlanError(f"--from {path}: its device {device or '(none)'} is none of {known}: give --hardware")
    return found.name


def read_runs(path: str | Path, hardware: Hardware) -> list[MeasuredRun]:
    """Read every start of a run in a metrics file.

    Raises:
        PlanError: if the file cannot be read, is no metrics file, does not record what ran, or has too few iterations.
    """
    where = f"--from {path}"
    starts: list[tuple[Mapping[str, Any], list[float]]] = []
    for record in _records(path):
        if isinstance(record.get("run"), dict):
            starts.append((record["run"], []))
        elapsed: Any = record.get("elapsed_ms")
        is_timed = type(elapsed) in (int, float) and MIN_MS < elapsed < MAX_MS
        if starts and "validation" not in record and is_timed and not record.get("skipped_iterations"):
            starts[-1][1].append(elapsed / 1e3)
    if not starts:
        raise PlanError(f"{where}: no record says what ran (`run`, which files of older versions of this program lack)")
    found = [
        _measured_run(f"{path}" + (f" ({number})" if len(starts) > 1 else ""), run, seconds, hardware, where)
        for number, (run, seconds) in enumerate(starts, start=1)
        if len(seconds) >= WARM_UP + LEAST
    ]
    if not found:
        longest = max(len(seconds) for _, seconds in starts)
        raise PlanError(
            f"{where}: {longest} timed iterations; {WARM_UP + LEAST} are needed, of which the first {WARM_UP} "
            "are left out (--log-interval 1 times each)"
        )
    return found


def _records(path: str | Path) -> Iterator[Mapping[str, Any]]:
    """Read a metrics file line by line, up to an unfinished last line.

    Raises:
        PlanError: if it is not a metrics file.
    """
    where = f"--from {path}"
    try:
        if regular_file(path).stat().st_size > MAX_BYTES:
            raise PlanError(f"{where}: more than {MAX_BYTES >> 30} GiB, which no metrics file has")
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    return  # the run was killed while it wrote
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise PlanError(f"{where}: line {number} is no JSON") from None
                if not isinstance(record, dict):
                    raise PlanError(f"{where}: line {number} is no record")
                yield record
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{where}: the file cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _measured_run(
    name: str, run: Mapping[str, Any], seconds: Sequence[float], hardware: Hardware, where: str
) -> MeasuredRun:
    world_size, rows, settings = run.get("world_size"), run.get("padded_vocab_size"), run.get("settings")
    if not (_is_count(world_size, MAX_RANKS) and _is_count(rows, MAX_VOCABULARY) and isinstance(settings, dict)):
        raise PlanError(f"{where}: `run` lacks world_size, padded_vocab_size or settings")
    try:
        for flag, most in MAX_LISTED.items():
            if isinstance(settings.get(flag), int) and settings[flag] > most:
                raise PlanError(f"{flag}: {settings[flag]} is more than {most}, which no measured run has")
        args = from_values(settings | {"padded_vocab_size": rows}, world_size)
        plan = make_plan(args, world_size, hardware)
    except (TypeError, ValueError, ArithmeticError, AssertionError, AttributeError, LookupError) as error:
        raise PlanError(f"{where}: its settings cannot be planned ({error})") from None
    timed, threads = seconds[WARM_UP:], run.get("threads")
    threads = threads if isinstance(threads, int) else None
    return MeasuredRun(name, median(timed), len(timed), str(run.get("device")), threads, plan)


def _is_count(value: object, limit: int) -> TypeGuard[int]:
    return type(value) is int and 0 < value < limit


def predicted_seconds(run: MeasuredRun, hardware: Hardware) -> float:
    """Return the time of a run's iteration with the constants of `hardware`, without corrections by published runs."""
    return retimed_step(run.plan, hardware).step


def fit_constants(runs: Sequence[MeasuredRun], hardware: Hardware, rounds: int = 12) -> Constants:
    """Return the most likely constants: Gauss-Newton steps in logarithms, halved while they do not help."""
    names = [name for name in PRIOR if getattr(hardware.constants, name) > 0]
    start = [math.log(getattr(hardware.constants, name)) for name in names]
    now = start

    def constants(point: Sequence[float]) -> Constants:
        return replace(hardware.constants, **{name: math.exp(value) for name, value in zip(names, point)})

    def misfits(point: Sequence[float]) -> list[float]:
        own = replace(hardware, constants=constants(point))
        return [math.log(predicted_seconds(run, own) / run.seconds) / NOISE for run in runs]

    def cost(point: Sequence[float], errors: Sequence[float]) -> float:
        return sum(error**2 for error in errors) + sum(
            ((value - first) / PRIOR[name]) ** 2 for name, value, first in zip(names, point, start)
        )

    errors = misfits(now)
    for _ in range(rounds):
        step, indices = 0.02, range(len(names))
        slopes, matrix, right = [], [], []
        for index in indices:
            moved = [value + step * (other == index) for other, value in enumerate(now)]
            slopes.append([(after - before) / step for after, before in zip(misfits(moved), errors)])
        for row in indices:
            weight = 1 / PRIOR[names[row]] ** 2
            matrix.append([_dot(slopes[row], slopes[column]) + (row == column) * weight for column in indices])
            right.append(-_dot(slopes[row], errors) - (now[row] - start[row]) * weight)
        move, share = _solve(matrix, right), 1.0
        while share > 0.01:
            trial = [value + share * part for value, part in zip(now, move)]
            tried = misfits(trial)
            if cost(trial, tried) < cost(now, errors):
                break
            share /= 2
        else:
            break
        now, errors = trial, tried
    return constants(now)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second))


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve a positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for index, pivot in enumerate(rows):
        for other in rows[index + 1 :]:
            factor = other[index] / pivot[index]
            for column in range(index, len(pivot)):
                other[column] -= factor * pivot[column]
    found: list[float] = []
    for index in range(len(rows) - 1, -1, -1):
        row = rows[index]
        found.insert(0, (row[-1] - _dot(row[index + 1 :], found)) / row[index])
    return found


def calibrate(runs: Sequence[MeasuredRun], hardware: Hardware, name: str) -> Hardware:
    """Return the hardware with constants fitted to these runs, and the runs with their leave-one-out predictions.

    Raises:
        PlanError: if the runs are of different devices.
    """
    kinds = {(run.device, run.threads) for run in runs}
    if len(kinds) > 1:
        texts = (f"{device} with {threads} threads a rank" if threads else device for device, threads in kinds)
        raise PlanError(f"the runs are of different devices ({', '.join(sorted(texts))}): calibrate each on its own")
    fitted = replace(hardware, name=name, constants=fit_constants(runs, hardware))
    own = []
    for run in runs:
        others = [other for other in runs if other is not run]
        left_out = None
        if others:
            left_out = predicted_seconds(run, replace(hardware, constants=fit_constants(others, hardware)))
        own.append(
            CalibrationRun(
                *(run.name, run.seconds, predicted_seconds(run, fitted), left_out, run.plan.world_size),
                features=tuple(sorted(features(replace(run.plan, hardware=fitted)))),
                parameters=run.plan.counts.total + run.plan.counts.mtp,
                sizes=tuple(get_mapping_sizes(run.plan).items()),
            )
        )
    return replace(fitted, calibration=tuple(own))


def hardware_yaml(hardware: Hardware, like: str) -> str:
    import yaml

    base = KNOWN_HARDWARE.get(like)
    table: dict[str, object] = {"like": like} if base is not None else {}
    for each in fields(Hardware):
        value = getattr(hardware, each.name)
        is_written_below = each.name in ("constants", "calibration", "name", "source")
        if not is_written_below and (base is None or getattr(base, each.name) != value):
            table[each.name] = value
    table["source"] = hardware.source
    table["constants"] = {name: float(f"{value:.4g}") for name, value in asdict(hardware.constants).items()}
    table["calibration"] = [
        {
            **asdict(run),
            "features": list(run.features),
            "sizes": dict(run.sizes),
            "seconds": round(run.seconds, 6),
            "predicted": round(run.predicted, 6),
            "left_out": None if run.left_out is None else round(run.left_out, 6),
        }
        for run in hardware.calibration
    ]
    return "# Constants fitted to own runs by `scripts/plan.py calibrate --from`; for --hardware\n" + yaml.safe_dump(
        table, sort_keys=False, width=150
    )


def calibration_table(hardware: Hardware, before: Hardware) -> list[str]:
    """Return runs and constants as lines for a terminal."""
    runs = hardware.calibration
    others = "fitted to the others   error" if len(runs) > 1 else ""
    lines = [f"{'run':40s}   measured     fitted   error   {others}"]
    for run in runs:
        left_out = ""
        if run.left_out is not None:
            left_out = f"{run.left_out:18.3f} s {100 * (run.left_out / run.seconds - 1):+6.1f} %"
        lines.append(
            f"{run.name[-40:]:40s} {run.seconds:8.3f} s {run.predicted:8.3f} s "
            f"{100 * (run.predicted / run.seconds - 1):+6.1f} % {left_out}"
        )
    pairs = [(name, old, getattr(hardware.constants, name)) for name, old in vars(before.constants).items()]
    changed = [f"{name} {old:.3g} -> {new:.3g}" for name, old, new in pairs if not math.isclose(old, new, rel_tol=0.01)]
    return [*lines, "constants: " + (", ".join(changed) or "as they were")]

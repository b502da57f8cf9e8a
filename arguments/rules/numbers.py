"""Ranges of single flags: what no value of another flag can make right.

Rules between flags leave values out of range alone, so that each mistake is reported once, here.
"""

import math
from collections.abc import Iterator

from arguments.container import OPTIONS
from arguments.flag_properties import Bounds
from arguments.mechanisms.optimizers import get_element_rule
from arguments.rules.derived_sizes import DerivedSizes, as_list
from arguments.settings import Settings, Violation

MAX_SEED = 2**32 - 1
ZERO_IN_FP32 = 2.0**-150
"""The largest number that fp32 rounds to 0."""


def _with_bounds(*bounds: Bounds) -> tuple[str, ...]:
    return tuple(dest for dest, option in OPTIONS.items() if option.bounds in bounds)


def _numbers(s: Settings, dest: str) -> list:
    """The values of a flag that can be compared; NaN is reported by `check_finite`."""
    return [v for v in as_list(getattr(s, dest)) if isinstance(v, int | float) and not math.isnan(v)]


def check_positive(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in _with_bounds(">0", "(0,1]"):
        least = min(_numbers(s, dest), default=math.inf)
        if least <= ZERO_IN_FP32:
            yield s.violation(f"{{}} must be above 0{' in fp32, so at least 1.4e-45' if least > 0 else ''}.", dest)


def check_not_negative(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in _with_bounds(">=0", "[0,1]"):
        if any(value < 0 for value in _numbers(s, dest)):
            yield s.violation("{} must not be negative.", dest)


def check_adam_eps(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Gradients that are zero in all iterations so far would be divided by zero; a run without updates divides none."""
    updates = not (s.skip_train or s.freeze_all_layers)
    divides = get_element_rule(s).epsilon == "adam_eps"
    if divides and updates and any(0 <= value <= ZERO_IN_FP32 for value in _numbers(s, "adam_eps")):
        yield s.violation("{adam_eps} must be above 0 in fp32, so at least 1.4e-45: Adam divides by it.")


def check_fractions(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in _with_bounds("[0,1)"):
        if not all(0 <= value < 1 for value in _numbers(s, dest)):
            yield s.violation("{} must be at least 0 and below 1.", dest)
    for dest in _with_bounds("[0,1]", "(0,1]"):
        if any(value > 1 for value in _numbers(s, dest)):
            yield s.violation("{} must be at most 1.", dest)


def check_finite(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest, value in s.values.items():
        if isinstance(value, float | list | tuple) and any(
            isinstance(item, float) and not math.isfinite(item) for item in as_list(value)
        ):
            yield s.violation("{} must be a finite number.", dest)


def check_largest(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest, option in OPTIONS.items():
        most = option.most
        if most is not None and any(value > most for value in _numbers(s, dest)):
            yield s.violation("{} must be at most {most}.", dest, most=f"{most:g}" if isinstance(most, float) else most)


def check_seed(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if any(value > MAX_SEED for value in _numbers(s, "seed")):
        yield s.violation("{seed} must be at most {most}: the shuffle of the data takes 32 bits.", most=MAX_SEED)


def check_dump_step(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.dump_step is not None and not (s.dump_step[0].isdigit() and int(s.dump_step[0]) > 0):
        yield s.violation("{dump_step}: the first value is the number of an iteration, from 1 on.")


def check_record_step(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.record_step is None:
        return
    if s.record_step < 1:
        yield s.violation("{record_step}: the number of an iteration, from 1 on.")
    if s.save is None:
        yield s.violation(
            "{record_step} needs --save DIR: the record is written to DIR/recorded_step_{record_step:value}."
        )


def check_exit_signal(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.exit_signal_handler and s.exit_signal in ("SIGKILL", "SIGSTOP"):
        yield s.violation("{exit_signal}: no program can catch this signal; use SIGTERM or SIGUSR1.")

"""Fit the constants of layer_time.py and the factors of corrections.py to published runs, and cross-validate.

The constants are cross-validated by run and by model family.

The error of a run is predicted / published - 1 of TFLOP/s per GPU. The fit takes the constants with the smallest mean
absolute logarithm of that ratio, so that large errors of odd runs do not dominate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from types import MappingProxyType

from arguments import parse_args
from moe_trainer.estimate.corrections import Bias, strengths
from moe_trainer.estimate.hardware import Constants, find_hardware
from moe_trainer.estimate.plan import Plan, make_plan, retimed_step
from moe_trainer.estimate.published_runs import PUBLISHED_RUNS, PublishedRun

GEMM_FRACTIONS = MappingProxyType(
    {
        "gemm_bf16": tuple(step / 100 for step in range(60, 81, 2)),
        "gemm_fp8": tuple(step / 100 for step in range(40, 67, 2)),
    }
)
"""Values to try, around the fractions of their peaks that large GEMMs of cuBLAS and block-scaled kernels reach."""
FILLS, ITERATIONS = (0.0, 256.0, 512.0, 768.0), (0.02, 0.05, 0.1, 0.2, 0.3)
"""Values to try.

Besides its microbatches an iteration has the collectives of norm and loss, logging, and the next batch.
"""


@dataclass(frozen=True)
class PredictionError:
    """A run, its predicted TFLOP/s, and the constants of the prediction."""

    run: PublishedRun
    tflops: float
    constants: Constants

    @property
    def relative(self) -> float:
        return self.tflops / self.run.tflops - 1


def plan_published_run(run: PublishedRun, constants: Constants | None = None) -> Plan:
    hardware = find_hardware(run.hardware)
    if constants is not None:
        hardware = replace(hardware, constants=constants)
    return make_plan(parse_args(run.argv(), run.gpus), run.gpus, hardware)


class Calibration:
    """Published runs, planned once, whose times can be computed with other constants."""

    def __init__(self, rows: Iterable[PublishedRun] = PUBLISHED_RUNS):
        self.plans = {run.name: plan_published_run(run) for run in rows}
        self.rows = {run.name: run for run in rows}
        self._found: dict[tuple[str, Constants], float] = {}

    def tflops(self, name: str, constants: Constants) -> float:
        """Return the predicted TFLOP/s of a run, without corrections, which are fitted with these constants."""
        plan = self.plans[name]
        # the iteration is added below; each format has its own fraction, head and router of an fp8 run the default one
        field = "gemm_bf16" if plan.width == "bf16" else "gemm_fp8"
        timed = Constants(**{field: getattr(constants, field)}, fill=constants.fill, iteration=0.0)
        key = name, timed
        if key not in self._found:
            self._found[key] = retimed_step(plan, replace(plan.hardware, constants=timed)).step
        step = self._found[key] + constants.iteration
        return plan.flops / step / plan.world_size / 1e12

    def fit(self, names: Sequence[str]) -> Constants:
        """Return the constants that predict these runs best."""
        found = []
        for fill, iteration in product(FILLS, ITERATIONS):
            constants, total = Constants(fill=fill, iteration=iteration), 0.0
            for field, values in GEMM_FRACTIONS.items():  # runs in one format do not depend on the other
                own = [name for name in names if field.endswith(self.rows[name].width)]
                misfits = [(self._misfit(own, replace(constants, **{field: value})), value) for value in values]
                misfit, value = min(misfits)
                constants, total = replace(constants, **{field: value}), total + misfit
            found.append((total, constants))
        return min(found, key=lambda each: each[0])[1]

    def _misfit(self, names: Sequence[str], constants: Constants) -> float:
        return sum(abs(math.log(self.tflops(name, constants) / self.rows[name].tflops)) for name in names)

    def fitted(self) -> tuple[str, ...]:
        """Names of the runs that constants are fitted to."""
        return tuple(name for name, run in self.rows.items() if run.is_fitted)

    def leave_one_out(self) -> list[PredictionError]:
        """Predict every run with constants fitted to the others."""
        return self._without(lambda run: run.name)

    def leave_family_out(self) -> list[PredictionError]:
        """Predict every run with constants fitted to the runs of other models."""
        return self._without(lambda run: run.model)

    def _without(self, label: Callable[[PublishedRun], str]) -> list[PredictionError]:
        names, found, fitted = self.fitted(), [], {}
        for name in names:
            left_out = label(self.rows[name])
            if left_out not in fitted:
                fitted[left_out] = self.fit([other for other in names if label(self.rows[other]) != left_out])
            found.append(PredictionError(self.rows[name], self.tflops(name, fitted[left_out]), fitted[left_out]))
        return found


def find_biases(plans: Mapping[PublishedRun, Plan]) -> dict[PublishedRun, Bias]:
    """Return what published runs say about the factors of corrections.py."""
    return {
        run: Bias("; ".join(run.series), _needed_factor(run, plan), strengths(plan.args, plan.hardware), run.weight)
        for run, plan in plans.items()
    }


def _needed_factor(run: PublishedRun, plan: Plan) -> float:
    """Return the logarithm of the factor of the time of all passes with which a run is predicted exactly."""
    bare, slower = (retimed_step(plan, plan.hardware, factor).step for factor in (1.0, 1.1))
    passes = (slower - bare) / 0.1
    seconds = plan.flops / (run.tflops * 1e12 * plan.world_size)
    return math.log((seconds - (bare - passes)) / passes)


def median_error(errors: Sequence[PredictionError]) -> float:
    return median(abs(error.relative) for error in errors)

"""Scaling laws fitted to runs: loss against compute, parameters, tokens and granularity.

Losses are fitted in logarithms with a Huber loss, which single bad runs move little, from many starting points; the
uncertainty is that of fits to runs drawn with replacement. Forms, all with an irreducible loss E:

* compute: L = E + A / C^a
* tokens: L = E + A / N^a + B / D^b (Hoffmann et al. 2022)
* granularity: L = E + (A + G0 / G^g) / N^a + B / D^b (Ludziejewski et al. 2024, fine-grained mixtures of experts)

N are the parameters that a token uses, D tokens, C = 6 N D, and G the width of a dense layer over that of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_trainer.comparison.runs import Run
from moe_trainer.metrics.run_files import find_metrics_files, read_run

_DELTA = 1e-3  # of the Huber loss, as Hoffmann et al.
_STARTS = 24
_STEPS, _SAMPLE_STEPS = 300, 100  # of LBFGS, from a random start and from the fit to all runs
_SAMPLES = 100
_LEVEL = (2.5, 97.5)

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "compute": ("E", "A", "a"),
        "tokens": ("E", "A", "a", "B", "b"),
        "granularity": ("E", "A", "a", "B", "b", "G0", "g"),
    }
)
"""Constants of the forms; capital ones are positive and fitted as logarithms."""
_AXES = MappingProxyType({"compute": ("compute",), "tokens": ("N", "D"), "granularity": ("N", "D", "G")})


@dataclass(frozen=True)
class Point:
    """A run: parameters that a token uses, tokens, granularity (1 for a dense model), and its loss."""

    parameters: float
    tokens: float
    granularity: float
    loss: float

    @property
    def compute(self) -> float:
        return 6 * self.parameters * self.tokens


def read_points(folder: Path) -> tuple[list[Point], list[Path]]:
    """Return the points of the runs below a folder, and the folders of runs whose records do not determine one.

    Raises:
        ValueError: if the records of a run cannot be read.
    """
    points, skipped = [], []
    for path in sorted(find_metrics_files(folder)):
        try:
            data = read_run(path)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
        if data is None:  # no regular file
            continue
        if (point := _point(data.as_page())) is None:
            skipped.append(path.parent)
        else:
            points.append(point)
    return points, skipped


def _point(page: Mapping[str, Any]) -> Point | None:
    """Return the point of a run as RunData.as_page returns it."""
    model, tokens, run = page["head"].get("model", {}), page["progress"].get("tokens"), Run(page)
    parameters, loss = model.get("active_parameters"), run.validation_loss or (tokens and run.loss_at("tokens", tokens))
    if not loss or not all(value and value > 0 for value in (parameters, tokens, loss)):
        return None
    wide, narrow = (run.settings.get(name) for name in ("ffn_hidden_size", "moe_ffn_hidden_size"))
    granularity = 1.0
    if model.get("num_experts") and isinstance(wide, int) and isinstance(narrow, int) and wide > 0 and narrow > 0:
        granularity = wide / narrow
    return Point(parameters, tokens, granularity, loss)


@dataclass(frozen=True)
class Fit:
    """A fitted form.

    Attributes:
        form: a key of NAMES.
        constants: by name.
        samples: the constants of fits to runs drawn with replacement.
        error: root mean square of the residuals of log L.
    """

    form: str
    constants: Mapping[str, float]
    samples: tuple[Mapping[str, float], ...]
    error: float

    def interval(self, name: str) -> tuple[float, float]:
        """Return the interval that holds a constant in 95 % of the samples."""
        low, high = np.percentile([sample[name] for sample in self.samples], _LEVEL)
        return float(low), float(high)

    def predict(self, parameters: float, tokens: float, granularity: float = 1.0) -> tuple[float, float, float]:
        """Return the loss of a model, and the interval of the samples."""
        point = Point(parameters, tokens, granularity, 1.0)
        values = [_evaluate(self.form, each, point) for each in (self.constants, *self.samples)]
        low, high = np.percentile(values[1:], _LEVEL)
        return values[0], float(low), float(high)


def check_points(form: str, points: Sequence[Point]) -> str | None:
    """Return why the runs do not determine the constants; None if they may."""
    needed = len(NAMES[form]) + 2
    if len(points) < needed:
        return f"{form}: needs {needed} runs or more for {len(NAMES[form])} constants, there are {len(points)}"
    values = {
        "compute": {each.compute for each in points},
        "N": {each.parameters for each in points},
        "D": {each.tokens for each in points},
        "G": {each.granularity for each in points},
    }
    few = [name for name in _AXES[form] if len(values[name]) < 3]
    return f"{form}: needs three values or more of {', '.join(few)}" if few else None


def fit(form: str, points: Sequence[Point], seed: int = 0, num_samples: int = _SAMPLES) -> Fit:
    """Fit a form to runs.

    Args:
        form: a key of NAMES.
        points: the runs.
        seed: of starting points and samples.
        num_samples: fits to runs drawn with replacement.

    Raises:
        ValueError: if the runs do not determine its constants.
    """
    if (reason := check_points(form, points)) is not None:
        raise ValueError(reason)
    rng = np.random.default_rng(seed)
    table = torch.tensor([[p.parameters, p.tokens, p.granularity, p.loss] for p in points], dtype=torch.float64).log()
    best, _ = _minimize(form, table, _starts(form, table, rng, _STARTS))
    residuals = _log_loss(form, best, table) - table[:, 3]
    samples = []
    for _ in range(num_samples):
        drawn = table[torch.from_numpy(rng.integers(0, len(points), len(points)))]
        samples.append(_constants(form, _minimize(form, drawn, best.unsqueeze(0), _SAMPLE_STEPS)[0]))
    return Fit(form, _constants(form, best), tuple(samples), float(residuals.square().mean().sqrt()))


def _log_loss(form: str, theta: Tensor, table: Tensor) -> Tensor:
    """Return log L of every row (log N, log D, log G); theta: constants, capital ones as logarithms."""
    n, d, g = table[:, 0], table[:, 1], table[:, 2]
    one = torch.ones_like(n)
    if form == "compute":
        terms = [theta[0] * one, theta[1] - theta[2] * (math.log(6) + n + d)]
    else:
        terms = [theta[0] * one, theta[1] - theta[2] * n, theta[3] - theta[4] * d]
        if form == "granularity":
            terms.append(theta[5] - theta[6] * g - theta[2] * n)
    return torch.stack(terms).logsumexp(0)


def _starts(form: str, table: Tensor, rng: np.random.Generator, count: int) -> Tensor:
    """Draw starting points: exponents, and the share of the loss that each term has at the mean run."""
    means = table.mean(0)
    starts = []
    for _ in range(count):
        shares = rng.dirichlet(np.ones(sum(name[0].isupper() for name in NAMES[form])))
        logs = iter(float(means[3]) + np.log(shares + 1e-6))
        exponents = {name: rng.uniform(0.05, 0.8) for name in NAMES[form] if name.islower()}
        value = {name: next(logs) for name in NAMES[form] if name[0].isupper()}
        if form == "compute":
            value["A"] += exponents["a"] * float(math.log(6) + means[0] + means[1])
        else:
            value["A"] += exponents["a"] * float(means[0])
            value["B"] += exponents["b"] * float(means[1])
            if form == "granularity":
                value["G0"] += exponents["a"] * float(means[0]) + exponents["g"] * float(means[2])
        starts.append([{**value, **exponents}[name] for name in NAMES[form]])
    return torch.tensor(starts, dtype=torch.float64)


def _minimize(form: str, table: Tensor, starts: Tensor, num_steps: int = _STEPS) -> tuple[Tensor, float]:
    """Return the constants with the least loss that any start leads to, and that loss."""
    best, least = starts[0], math.inf
    for start in starts:
        theta = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [theta], max_iter=num_steps, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
        )

        def loss(theta: Tensor = theta) -> Tensor:
            difference = _log_loss(form, theta, table) - table[:, 3]
            return torch.nn.functional.huber_loss(difference, torch.zeros_like(difference), delta=_DELTA)

        def closure(optimizer: torch.optim.Optimizer = optimizer, loss=loss) -> Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)
        value = float(loss().detach())
        if math.isfinite(value) and value < least:
            best, least = theta.detach(), value
    return best, least


def _constants(form: str, theta: Tensor) -> dict[str, float]:
    values = theta.tolist()
    return {
        name: math.exp(min(value, 700.0)) if name[0].isupper() else value for name, value in zip(NAMES[form], values)
    }


def _evaluate(form: str, constants: Mapping[str, float], point: Point) -> float:
    row = torch.tensor([[point.parameters, point.tokens, point.granularity]], dtype=torch.float64).log()
    theta = torch.tensor(
        [math.log(constants[name]) if name[0].isupper() else constants[name] for name in NAMES[form]],
        dtype=torch.float64,
    )
    return float(_log_loss(form, theta, row).exp())

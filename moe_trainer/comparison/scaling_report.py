"""Tables and the picture of fitted scaling laws."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trainer.comparison.scaling import Fit, Point
from moe_trainer.drawing.line_chart import LineChart
from moe_trainer.drawing.markdown import markdown_table
from moe_trainer.drawing.svg import BLUE, INK

_TITLES = (
    ("compute", "L = E + A / C^a"),
    ("tokens", "L = E + A / N^a + B / D^b"),
    ("granularity", "L = E + (A + G0 / G^g) / N^a + B / D^b"),
)
_NUM_STEPS = 80


def fit_lines(fit: Fit, predictions: Sequence[float] = ()) -> list[str]:
    """Return a section of Markdown: constants with intervals, and the losses predicted at some compute."""
    constants = []
    for name, value in fit.constants.items():
        low, high = fit.interval(name)
        constants.append((name, f"{value:.4g}", f"{low:.4g} to {high:.4g}"))
    losses = []
    for flops in predictions:
        value, low, high = _at_compute(fit, flops)
        losses.append((f"{flops:.3g}", f"{value:.4f}", f"{low:.4f} to {high:.4f}"))
    interval = "95 % of the samples"
    return [
        *("", f"## {dict(_TITLES)[fit.form]}", "", *markdown_table(("constant", "value", interval), constants)),
        *("", f"Root mean square of the residuals: {100 * fit.error:.2f} % of the loss."),
        *(["", *markdown_table(("FLOPs", "loss", interval), losses)] if losses else []),
    ]


def _at_compute(fit: Fit, flops: float) -> tuple[float, float, float]:
    return fit.predict(flops / 6, 1.0)


def compute_picture(fit: Fit, points: Sequence[Point], predictions: Sequence[float] = ()) -> str:
    """Draw loss against compute: runs, the fit and its interval, on a logarithmic axis of compute."""
    computes = [*(point.compute for point in points), *predictions]
    first, last = min(computes), max(computes)
    steps = [first * (last / first) ** (number / _NUM_STEPS) for number in range(_NUM_STEPS + 1)]
    curve = [(flops, *_at_compute(fit, flops)) for flops in steps]
    losses = [*(point.loss for point in points), *(value for _, value, _, _ in curve)]
    title, names = "Loss against compute", ("FLOPs: 6 x active parameters x tokens", "nats per token")
    chart = LineChart(title, title, (first, last), losses, names, is_log=True)
    chart.area([(flops, low) for flops, _, low, _ in curve], [(flops, high) for flops, _, _, high in curve], BLUE)
    chart.line([(flops, value) for flops, value, _, _ in curve], BLUE)
    for point in points:
        tip = f"{point.parameters:.3g} parameters, {point.tokens:.3g} tokens: {point.loss:.4f}"
        chart.picture.circle(*chart.at(point.compute, point.loss), 4, INK, tip)
    return chart.svg()

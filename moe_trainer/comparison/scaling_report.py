"""Tables and the picture of fitted scaling laws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from moe_trainer.comparison.scaling import Fit, Point
from moe_trainer.drawing.axes import Scale, draw_y_axis
from moe_trainer.drawing.svg import BLUE, FAINT, INK, Picture

_TITLES = (
    ("compute", "L = E + A / C^a"),
    ("tokens", "L = E + A / N^a + B / D^b"),
    ("granularity", "L = E + (A + G0 / G^g) / N^a + B / D^b"),
)
_NUM_STEPS = 80


def fit_lines(fit: Fit, predictions: Sequence[float] = ()) -> list[str]:
    """Return a section of Markdown: constants with intervals, and the losses predicted at some compute."""
    lines = ["", f"## {dict(_TITLES)[fit.form]}", "", "| constant | value | 95 % of the samples |", "|---|---|---|"]
    for name, value in fit.constants.items():
        low, high = fit.interval(name)
        lines.append(f"| {name} | {value:.4g} | {low:.4g} to {high:.4g} |")
    lines += ["", f"Root mean square of the residuals: {100 * fit.error:.2f} % of the loss."]
    if predictions:
        lines += ["", "| FLOPs | loss | 95 % of the samples |", "|---|---|---|"]
    for flops in predictions:
        value, low, high = _at_compute(fit, flops)
        lines.append(f"| {flops:.3g} | {value:.4f} | {low:.4f} to {high:.4f} |")
    return lines


def _at_compute(fit: Fit, flops: float) -> tuple[float, float, float]:
    return fit.predict(flops / 6, 1.0)


def compute_picture(fit: Fit, points: Sequence[Point], predictions: Sequence[float] = ()) -> str:
    """Draw loss against compute: runs, the fit and its interval, on a logarithmic axis of compute."""
    computes = [point.compute for point in points]
    first, last = math.log10(min(computes)), math.log10(max([*computes, *predictions]))
    steps = [10 ** (first + (last - first) * at / _NUM_STEPS) for at in range(_NUM_STEPS + 1)]
    curve = [(flops, *_at_compute(fit, flops)) for flops in steps]
    values = [*(point.loss for point in points), *(value for _, value, _, _ in curve)]
    left, right, top, bottom = 76, 900, 62, 360
    margin = 0.08 * ((max(values) - min(values)) or 1.0)
    x, y = Scale(first, last, left, right), Scale(min(values) - margin, max(values) + margin, bottom, top)
    picture = Picture(930, bottom + 60, "Loss against compute", "Loss against compute")
    for power in _powers(first, last):
        picture.line(x.at(power), top, x.at(power), bottom, FAINT)
        picture.text(x.at(power), bottom + 15, f"1e{power}", "middle", 11)
    picture.text((left + right) / 2, bottom + 32, "FLOPs: 6 x active parameters x tokens", "middle")
    draw_y_axis(picture, y, left, right, "nats per token")

    def place(flops: float, value: float) -> str:
        return f"{x.at(math.log10(flops)):.6g} {min(max(y.at(value), top), bottom):.6g}"

    edge = [place(flops, high) for flops, _, _, high in curve] + [place(flops, low) for flops, _, low, _ in curve[::-1]]
    picture.path("M" + "L".join(edge) + "Z", BLUE, fill_opacity=0.18)
    picture.path(
        "M" + "L".join(place(flops, value) for flops, value, _, _ in curve), "none", stroke=BLUE, stroke_width=2
    )
    for point in points:
        tip = f"{point.parameters:.3g} parameters, {point.tokens:.3g} tokens: {point.loss:.4f}"
        picture.circle(x.at(math.log10(point.compute)), y.at(point.loss), 4, INK, tip)
    return picture.svg()


def _powers(first: float, last: float) -> Iterator[int]:
    yield from range(math.ceil(first), math.floor(last) + 1)

"""Pictures of comparisons: what a proof covered, and where in the model the first difference is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moe_trainer.drawing.model_column import Layer, Part, State, model_column
from moe_trainer.drawing.pair_matrix import pair_matrix
from moe_trainer.drawing.report_page import Figure
from moe_trainer.verification.comparison import ComparisonRow, execution_order
from moe_trainer.verification.mapping import NAMES

if TYPE_CHECKING:
    from moe_trainer.verification.parity import ParityResult
    from moe_trainer.verification.shrink import ShrinkResult

_HALVES = ("outputs, in the order of computation", "gradients and weights, computed from the bottom up")
_LAYER = re.compile(r"(?:decoder|mtp)\.layers\.\d+\.(?:(?:mtp_model_layer|transformer_layer)\.(?:layers\.\d+\.)?)?")
_LOSSES = (9, 0)
"""Position of losses and norms, below the model."""


def proof_figures(results: Sequence[ParityResult], shrunk: ShrinkResult | None) -> Iterator[Figure]:
    """Yield the pictures of a proof: the pairs of dimensions, and the model of each case that differs."""
    covered = [result.case.mapping.active for result in results]
    needed = frozenset().union(*covered) if shrunk is None else shrunk.original.active
    cases = list(zip(covered, (result.is_equal for result in results)))
    heading = "Pairs of parallel dimensions: cases in which both are above 1"
    svg = pair_matrix("Pairs of dimensions that were checked", heading, NAMES, needed, cases)
    yield Figure("Coverage", svg, "Each case is compared with one process. The diagonal has the single dimensions.")
    for result in results:
        if result.differences:
            title = f"First difference of {result.case.mapping}"
            num_layers = _num_layers(result)
            yield Figure(
                title,
                comparison_picture(result.differences, num_layers),
                "Parts without color are equal, or not compared.",
            )


def _num_layers(result: ParityResult) -> int:
    words = result.case.argv
    return int(words[words.index("--num-layers") + 1]) if "--num-layers" in words else 0


def comparison_figure(rows: Sequence[ComparisonRow]) -> Figure:
    """Draw a comparison of two records."""
    caption = "What is computed after the first difference mostly follows from it. Point at a part for its numbers."
    return Figure("Comparison in the model", comparison_picture(rows), caption)


def comparison_picture(rows: Sequence[ComparisonRow], num_layers: int = 0) -> str:
    """Draw the compared quantities in the model, the first difference marked.

    Args:
        rows: in the order of computation.
        num_layers: layers of the decoder to draw at least, for rows that are differences only.
    """
    first = next((row for row in rows if row.exceeds_tolerance), None)
    by_part: dict[tuple[tuple[int, int], int], dict[str, list[ComparisonRow]]] = {}
    for row in rows:
        position, half, part = _locate(row)
        by_part.setdefault((position, half), {}).setdefault(part, []).append(row)
    positions = sorted({position for position, _ in by_part} | {(1, layer) for layer in range(num_layers)})
    layers = []
    for position in positions:
        halves = tuple(
            tuple(_part(name, found, first) for name, found in by_part.get((position, half), {}).items())
            or (Part("", "unknown", f"{_position_name(position)}: nothing compared, or no difference"),)
            for half in range(len(_HALVES))
        )
        layers.append(Layer(_position_name(position), tuple(map(_in_order, halves))))
    if first is None:
        heading, text = f"Equal: {len(rows)} quantities within their tolerances", ""
    else:
        count = sum(row.exceeds_tolerance for row in rows)
        heading = f"{count} of {len(rows)} quantities differ" if count < len(rows) else f"{count} quantities differ"
        text = f"{first.label}, by {first.difference:.3g} (allowed {first.allowed:.0e})"
    return model_column("Comparison in the model", heading, _HALVES, layers, text)


def _locate(row: ComparisonRow) -> tuple[tuple[int, int], int, str]:
    """Return the layer of a quantity as a position, its half, and its part of the layer."""
    half = int(row.quantity.startswith(("gradient", "weight")))
    name = row.name
    layer = _LAYER.search(name)
    if layer is not None:
        rest = name[layer.end() :]
        if "router" in rest:
            part = "router"
        elif rest.startswith(("mlp", "pre_mlp_layernorm", "post_mlp_layernorm")):
            part = "experts or MLP"
        else:
            mixers = ("self_attention", "input_layernorm", "post_self_attn_layernorm", "mixer", "norm")
            part = "attention" if rest.startswith(mixers) else rest.partition(".")[0]
        return execution_order(name)[:2], half, part
    if name.startswith(("embedding", "decoder.", "output_layer", "mtp.")):
        inner = name.removesuffix(".weight").split(".")
        return execution_order(name)[:2], half, inner[min(1, len(inner) - 1)]
    return _LOSSES, half, row.quantity.partition(" (")[0]


def _position_name(position: tuple[int, int]) -> str:
    kind, number = position
    names = {0: "embedding", 1: f"layer {number}", 2: "final norm", 3: f"MTP layer {number}", 4: "output layer"}
    return names.get(kind, "losses, norms")


def _part(name: str, rows: Sequence[ComparisonRow], first: ComparisonRow | None) -> Part:
    state: State = "equal"
    different = [row for row in rows if row.exceeds_tolerance]
    if any(row is first for row in rows):
        state = "first"
    elif different:
        state = "differs"
    elif any(row.num_near_ties for row in rows):
        state = "tie"
    worst = max(rows, key=lambda row: row.difference if row.difference == row.difference else float("inf"))
    text = f"{len(rows)} compared, {len(different)} differ; largest: {worst.label}, {worst.difference:.3g}"
    return Part(name, state, text)


def _in_order(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    order = ("attention", "router", "experts or MLP")
    return tuple(sorted(parts, key=lambda part: order.index(part.name) if part.name in order else len(order)))

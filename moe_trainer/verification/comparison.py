"""Comparison of named quantities of two runs, in the order in which they are computed.

compare_runs.py compares the traces of two short trainings, compare_records.py two records of one iteration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

_LAYER = re.compile(r"(?:^|\.)(decoder|mtp)\.layers\.(\d+)(?:\.|$)")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_IN_DEPTH = re.compile(r"(?:^|\.)mtp\.layers\.\d+\.(?:mtp_model_layer\.)?layers\.(\d+)\.")
_ORDER_IN_LAYER = tuple(
    """
    embedding enorm hnorm eh_proj input_layernorm linear_q_down linear_q_up linear_q_proj linear_kv_down linear_kv_up
    layernorm_qkv linear_qkv q_layernorm k_layernorm linear_proj self_attention post_self_attn_layernorm
    pre_mlp_layernorm router.logits router mlp post_mlp_layernorm
    """.split()
)


@dataclass(frozen=True)
class Tolerances:
    """Largest accepted differences of two runs. The defaults are for a short training in fp32.

    Attributes:
        loss: relative.
        norm: of the gradient norm, relative.
        grad: norm of the difference, relative to the norm of the gradient.
        weight: absolute, about a thousandth of what three steps change.
        shaken: part of the change that a perturbation of the reference causes in a weight, accepted if it is larger
            than `weight`. Adam divides by the gradient, so rounding moves a weight that is hardly used.
        copies: of fingerprints of one shard on several ranks, relative to its norm.
        tiny: part of the norm of all gradients that is added to the tolerance of each. Some gradients are zero except
            for rounding, such as that of the bias of keys without positions.
        output: of a layer's output, relative to its norm.
    """

    loss: float = 2e-6
    norm: float = 2e-6
    grad: float = 1e-5
    weight: float = 5e-6
    shaken: float = 0.1
    copies: float = 1e-6
    tiny: float = 3e-8
    output: float = 1e-5


@dataclass(frozen=True)
class ComparisonRow:
    """One compared quantity.

    Attributes:
        quantity: what is compared, such as "gradient".
        name: tensor, loss or layer; empty where the quantity has only one value.
        difference: distance between the two values, in the unit of its tolerance `allowed`.
        detail: both values, or where the difference is.
        num_near_ties: of routing choices, the tokens for which rounding chose other experts.
    """

    quantity: str
    name: str
    difference: float
    allowed: float
    detail: str = ""
    num_near_ties: int = 0

    @property
    def exceeds_tolerance(self) -> bool:
        """Whether the difference is larger than allowed, or NaN."""
        return not self.difference <= self.allowed

    @property
    def label(self) -> str:
        return f"{self.quantity} of {self.name}" if self.name else self.quantity

    def __str__(self) -> str:
        text = f"{self.label}: differs by {self.difference:.3g} (allowed {self.allowed:.3g})"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(frozen=True)
class NumberComparison:
    """Comparison of numbers of two runs, which messages call by these names.

    Attributes:
        absolute: difference of two numbers that is accepted in addition to a relative one.
        equal_nan: NaN equals NaN.
    """

    reference: str
    actual: str
    absolute: float = 0.0
    equal_nan: bool = False

    def relative_difference(self, expected: float, value: float) -> float:
        """Return the relative difference; infinite if a value is NaN."""
        if math.isnan(expected) or math.isnan(value):
            return 0.0 if self.equal_nan and math.isnan(expected) and math.isnan(value) else math.inf
        if expected == value:
            return 0.0
        return max(abs(value - expected) - self.absolute, 0.0) / max(abs(expected), 1e-30)

    def compare(
        self, quantity: str, name: str, expected: float | None, value: float | None, allowed: float
    ) -> ComparisonRow:
        """Compare two numbers, either of which may be absent."""
        if expected is None or value is None:
            difference = 0.0 if expected is value else math.inf
        else:
            difference = self.relative_difference(expected, value)
        values = ["absent" if each is None else f"{each:.9g}" for each in (expected, value)]
        return ComparisonRow(quantity, name, difference, allowed, self.describe(*values))

    def compare_counts(self, quantity: str, expected: int | None, value: int | None) -> ComparisonRow:
        """Compare two counts, which must be equal."""
        difference = abs((value or 0) - (expected or 0))
        return ComparisonRow(quantity, "", difference, 0.0, self.describe(expected, value))

    def describe(self, expected: object, value: object) -> str:
        """Return both values with the names of the runs."""
        return f"{self.reference} {expected}, {self.actual} {value}"


def compare_by_name(
    quantity: str,
    sources: Sequence[object],
    names: Sequence[Collection[str]],
    compare: Callable[[str], Iterator[ComparisonRow]],
) -> Iterator[ComparisonRow]:
    """Compare the tensors of two sources by name, from the last layer to the first, and report missing ones."""
    for name in sorted({*names[0], *names[1]}, key=execution_order, reverse=True):
        if name in names[0] and name in names[1]:
            yield from compare(name)
        else:
            yield ComparisonRow(quantity, name, math.inf, 0.0, f"only in {sources[name in names[1]]}")


def execution_order(name: str) -> tuple:
    """Sort key of a parameter or output name: its position in the forward pass."""
    layer = _LAYER.search(name)
    if name.startswith("embedding"):
        position = (0, 0)
    elif layer is not None:
        position = (1 if layer.group(1) == "decoder" else 3, int(layer.group(2)))
    else:
        position = (2, 0) if name.startswith("decoder") else (4, 0)
    inside = next((index for index, part in enumerate(_ORDER_IN_LAYER) if part in name), len(_ORDER_IN_LAYER))
    # the projection of a depth, its layers (a list in hybrid models), and its final norm
    in_depth = _IN_DEPTH.search(name)
    step = (1, int(in_depth[1])) if in_depth else (2 * (inside == len(_ORDER_IN_LAYER)), 0)
    expert = _EXPERT.search(name)
    return (*position, *step, inside, name.endswith("fc2.weight"), int(expert.group(1)) if expert else -1, name)

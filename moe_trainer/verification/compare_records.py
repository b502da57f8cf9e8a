"""Comparison of two records of one iteration: every traced quantity, in the order in which it is computed.

Order: outputs of the layers in the forward pass (with the routers' logits, choices and probabilities), token losses,
logged losses, gradients from the last layer to the first, gradient norm. The first row beyond its tolerance is where to
look; most rows after it follow from it.

Distances are relative. For the output of a token: the norm of the difference, estimated from its projections
(debug/step_record.py), over the norm of the output. For a gradient: the norm of the difference over its norm. For
choices: the share of tokens with other experts, which must be 0 apart from near ties (see _find_near_ties).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from arguments.mechanisms.formats import list_widths
from moe_trainer.debug.step_record import CHOICE, GRADIENTS, MARGIN, SIGNS, TRACE, Record
from moe_trainer.verification.comparison import (
    ComparisonRow,
    NumberComparison,
    Tolerances,
    compare_by_name,
    execution_order,
)

_MIN_RELATIVE_NORM = 0.1
"""An output smaller than this times the root mean square of all norms is measured by the latter."""
_NEAR_TIE_DEVIATIONS = 6.0
"""A margin is a near tie up to so many times the difference of the logits."""
_NUMBERS = NumberComparison("recorded", "replayed", equal_nan=True)


QUANTIZED = list_widths("or")
TOLERANCES = MappingProxyType({
    "fp64": Tolerances(output=1e-10, loss=1e-12, norm=1e-12, grad=1e-10, tiny=1e-14),
    "fp32": Tolerances(output=2e-5, loss=2e-6, norm=2e-6, grad=2e-5, tiny=1e-7),
    "fp16": Tolerances(output=1e-2, loss=1e-3, norm=1e-3, grad=2e-2, tiny=1e-3),
    "bf16": Tolerances(output=5e-2, loss=5e-3, norm=5e-3, grad=1e-1, tiny=5e-3),
    QUANTIZED: Tolerances(output=3e-1, loss=2e-2, norm=2e-2, grad=5e-1, tiny=3e-2),
})  # fmt: skip
"""By precision, from high to low: about twenty times its rounding error."""


def get_precision(head: Mapping[str, Any]) -> str:
    """Return the name of a record's precision in TOLERANCES."""
    return QUANTIZED if head["quantized"] else head["dtype"]


def lower_precision(reference: Mapping[str, Any], actual: Mapping[str, Any]) -> str:
    """Return the lower precision of two records, which determines the tolerances."""
    names = list(TOLERANCES)
    return names[max(names.index(get_precision(head)) for head in (reference, actual))]


def compare_records(reference: Record, actual: Record) -> list[ComparisonRow]:
    """Compare two records of the same samples, in execution order.

    Raises:
        ValueError: if the records are not of the same samples, or incomplete.
    """
    expected, sizes = ((record.head["samples"], record.head["seq_length"]) for record in (reference, actual))
    if sizes != expected:
        raise ValueError(
            f"{actual.folder} has {sizes[0]} samples of {sizes[1]} tokens, "
            f"{reference.folder} has {expected[0]} of {expected[1]}"
        )
    if not torch.equal(reference.batch()["tokens_BS"], actual.batch()["tokens_BS"]):
        raise ValueError(f"the tokens of {actual.folder} differ from those of {reference.folder}")
    allowed = TOLERANCES[lower_precision(reference.head, actual.head)]
    return [
        *_compare_forward(reference, actual, allowed),
        *_compare_losses(reference, actual, allowed),
        *_compare_gradients(reference, actual, allowed),
    ]


def _compare_forward(reference: Record, actual: Record, allowed: Tolerances) -> Iterator[ComparisonRow]:
    reference_names, actual_names = ({*record.names(TRACE)} for record in (reference, actual))
    choices = {*reference.names(CHOICE)} & {*actual.names(CHOICE)}
    logits: dict[str, Tensor] = {}
    after_tie = torch.zeros(reference.head["samples"], reference.head["seq_length"], dtype=torch.bool)
    layer = None
    for name in sorted(reference_names | actual_names | choices, key=execution_order):
        if layer != (layer := execution_order(name)[:2]):
            after_tie = after_tie.long().cummax(1)[0].bool()  # later tokens attend to those
        if name in choices:
            near_ties = _find_near_ties(reference, actual, name, logits.pop(name, None), allowed)
            yield _compare_choices(reference, actual, name, near_ties, after_tie)
            after_tie |= near_ties
            continue
        quantity = "token losses" if name == "loss" else "output"
        if name not in reference_names & actual_names:
            folder = (reference if name in reference_names else actual).folder
            yield ComparisonRow(quantity, name, math.inf, allowed.output, f"only in {folder}")
            continue
        distances = token_distances(reference.joined(f"{TRACE}{name}"), actual.joined(f"{TRACE}{name}"))
        num_excluded = int((after_tie & (distances > allowed.output)).sum())
        distances = distances.masked_fill(after_tie, 0.0)
        if name.endswith(".router.logits"):
            logits[name.removesuffix(".logits")] = distances
        detail = _describe_tokens(reference, distances > allowed.output)
        if num_excluded:
            detail += f"{'; ' if detail else ''}excluded because they follow near ties: {num_excluded} tokens"
        yield ComparisonRow(quantity, name, distances.max().item(), allowed.output, detail)


def token_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the relative distance of each token between two traces. NaN equals NaN only.

    Shapes: a, b [samples, S, K]; result [samples, S] fp64.
    """
    a, b = a.double(), b.double()
    if a.shape[-1] > 1:
        norm = a[..., -1]
        distance = torch.maximum((a - b)[..., :-1].norm(dim=-1) / math.sqrt(SIGNS), (a - b)[..., -1].abs())
    else:
        norm, distance = a[..., 0].abs(), (a - b)[..., 0].abs()
    scale = torch.maximum(norm, _MIN_RELATIVE_NORM * norm.nan_to_num(0.0, 0.0).square().mean().sqrt())
    distance = torch.where(distance == 0, 0.0, distance / scale.clamp(min=1e-30))
    equal = ((a == b) | (a.isnan() & b.isnan())).all(-1)
    return torch.where(equal, 0.0, distance.nan_to_num(nan=math.inf))


def _choices_differ(reference: Record, actual: Record, name: str) -> Tensor:
    """Return the tokens [samples, S] for which a router chose other experts."""
    return (reference.joined(f"{CHOICE}{name}") != actual.joined(f"{CHOICE}{name}")).any(-1)


def _find_near_ties(reference: Record, actual: Record, name: str, logits: Tensor | None, allowed: Tolerances) -> Tensor:
    """Return the tokens for which rounding chose other experts.

    Their logits agree within the tolerance and the margin of the chosen experts is not larger than that difference can
    turn. Their outputs in this layer, and in later layers those of all tokens that may attend to them, are counted
    instead of compared. Losses and gradients include all tokens. Records without margins (older ones, choices
    that no order of scores decides) have no near ties. `logits` is the distance of the router's logits by token.
    """
    differ = _choices_differ(reference, actual, name)
    records = (record for record in (reference, actual) if name in record.names(MARGIN))
    margins = [record.joined(f"{MARGIN}{name}")[..., 0].double() for record in records]
    if logits is None or not margins or not bool(differ.any()):
        return torch.zeros_like(differ)
    margin = torch.stack(margins).amin(0)
    turned = margin <= _NEAR_TIE_DEVIATIONS * logits + torch.finfo(torch.float32).eps
    return differ & (logits <= allowed.output) & turned


def _compare_choices(
    reference: Record, actual: Record, name: str, near_ties: Tensor, after_tie: Tensor
) -> ComparisonRow:
    """Compare the experts that a router chose. Tokens in `after_tie` follow a near tie of an earlier layer."""
    differ = _choices_differ(reference, actual, name) & ~after_tie
    num_near_ties, mismatches = int((differ & near_ties).sum()), differ & ~near_ties
    detail = _describe_tokens(reference, mismatches)
    if bool(mismatches.any()) and (reference.head["dropped_tokens"] or actual.head["dropped_tokens"]):
        detail += "; other tokens dropped, or a fault"
    if num_near_ties:
        detail += f"{'; ' if detail else ''}near ties: {num_near_ties} of {differ.numel()} tokens"
    return ComparisonRow("chosen experts", name, mismatches.double().mean().item(), 0.0, detail, num_near_ties)


def _describe_tokens(record: Record, mask: Tensor) -> str:
    """Describe the first of some tokens by its position in the recorded run, and count them."""
    count = int(mask.sum())
    if not count:
        return ""
    index, token = (mask.nonzero()[0]).tolist()
    head = record.head
    microbatch, rest = divmod(index, head["micro_batch_size"] * head["mapping"]["dp"])
    numbers = head["sample_numbers"]
    sample = f"sample {numbers[index]}" if numbers else f"sequence {index} of the global batch"
    rank = f", data rank {rest // head['micro_batch_size']}" if head["mapping"]["dp"] > 1 else ""
    return f"first in microbatch {microbatch + 1}{rank}, {sample}, token {token}; {count} of {mask.numel()} tokens"


def _compare_losses(reference: Record, actual: Record, allowed: Tolerances) -> Iterator[ComparisonRow]:
    expected, losses = reference.head["losses"], actual.head["losses"]
    names = list(dict.fromkeys([*expected, *losses]))
    if reference.head["skipped"] or actual.head["skipped"]:  # a skipped iteration has its loss only
        names = [name for name in names if name in expected and name in losses]
    for name in names:
        yield _NUMBERS.compare("loss", name, expected.get(name), losses.get(name), allowed.loss)
    recorded, replayed = (record.head["dropped_tokens"] for record in (reference, actual))
    if recorded or replayed:
        yield _NUMBERS.compare_counts("dropped tokens", recorded, replayed)


def _compare_gradients(reference: Record, actual: Record, allowed: Tolerances) -> Iterator[ComparisonRow]:
    """Compare every gradient, from the last layer to the first, and the norm of all."""
    with (
        safe_open(reference.folder / GRADIENTS, "pt") as recorded,
        safe_open(actual.folder / GRADIENTS, "pt") as replayed,
    ):
        names = (set(recorded.keys()), set(replayed.keys()))
        norms = {name: recorded.get_tensor(name).double().norm().item() for name in names[0]}
        total = math.sqrt(sum(norm * norm for norm in norms.values() if math.isfinite(norm)))

        def compare_one(name: str) -> Iterator[ComparisonRow]:
            a, b = recorded.get_tensor(name).double(), replayed.get_tensor(name).double()
            error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm().item()
            norm = norms[name] if math.isfinite(norms[name]) else 0.0
            # a gradient that is zero except for rounding is measured by the norm of all
            scale = max(norm, allowed.tiny / allowed.grad * total, 1e-30)
            yield ComparisonRow("gradient", name, error / scale if math.isfinite(error) else math.inf, allowed.grad)

        yield from compare_by_name("gradient", (reference.folder, actual.folder), names, compare_one)
    if not (reference.head["skipped"] or actual.head["skipped"]):
        yield _NUMBERS.compare("gradient norm", "", reference.head["grad_norm"], actual.head["grad_norm"], allowed.norm)

"""Comparison of two training traces: every quantity that differs, in the order in which it is computed.

Order: losses and dropped tokens of the first step, its gradients from the last layer to the first, the gradient norm;
losses, drops and norms of the later steps; weights and expert bias at the end; the loss of a validation; copies of one
shard on several ranks. The first difference is where to look; most later ones follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from moe_trainer.verification.comparison import (
    ComparisonRow,
    NumberComparison,
    Tolerances,
    compare_by_name,
    execution_order,
)
from moe_trainer.verification.training_trace import TracedShard, TrainingTrace

_FINGERPRINTS = ("gradient (step 1)", "weight at the end")
"""Quantities of the fingerprints of a shard."""
_NUMBERS = NumberComparison("one process", "ranks", absolute=1e-12)
FP32 = Tolerances()


def compare(reference: TrainingTrace, actual: TrainingTrace, tolerances: Tolerances = FP32) -> list[ComparisonRow]:
    """List the differences between one process and many ranks, in execution order.

    Raises:
        ValueError: if a trace has no steps, gradients, weights or shards to compare.
    """
    missing = [name for name in ("losses", "grad_norms", "grads", "weights") if not getattr(reference, name)]
    if missing or not actual.shards:
        raise ValueError(f"nothing to compare: the trace has no {', '.join(missing or ['shards'])}")
    grad_floor = tolerances.tiny * _total_norm(reference.grads)

    def measure_grad(name: str, error: Tensor) -> tuple[float, float, bool]:
        norm, size = reference.grads[name].double().norm().item(), error.norm().item()
        return size / max(norm, 1e-30), tolerances.grad, size <= tolerances.grad * norm + grad_floor

    def measure_weight(name: str, error: Tensor) -> tuple[float, float, bool]:
        difference = error.abs().max().item() if error.numel() else 0.0
        allowed = max(tolerances.weight, tolerances.shaken * reference.perturbed_change.get(name, 0.0))
        return difference, allowed, difference <= allowed

    num_steps, shards = len(reference.losses), actual.shards
    first_step = [
        *_compare_step(reference, actual, 0, tolerances),
        *_compare_tensors("gradient (step 1)", reference.grads, actual.grads, shards, measure_grad),
    ]
    rows = [row for row in first_step if row.exceeds_tolerance]
    if rows:
        rows = [*_first_different_output(reference, actual, tolerances), *rows]
    later = [_compare_norms(reference, actual, 0, tolerances)]
    for step in range(1, num_steps):
        later += _compare_step(reference, actual, step, tolerances)
        later.append(_compare_norms(reference, actual, step, tolerances))
    quantity = f"weight (after step {num_steps})"
    later += _compare_tensors(quantity, reference.weights, actual.weights, shards, measure_weight)
    evaluations = (reference.evaluation, actual.evaluation)
    later.append(_NUMBERS.compare("validation loss", "", *evaluations, tolerances.loss))
    later += _compare_copies(actual, tolerances)
    return rows + [row for row in later if row.exceeds_tolerance]


def describe_agreement(reference: TrainingTrace, actual: TrainingTrace) -> str:
    """Describe in a line what was compared, with the largest differences of losses, gradients and weights.

    A gradient is measured by its own norm, or by a thousandth of the norm of all if that is larger.
    """
    pairs = list(zip(reference.grad_norms, actual.grad_norms))
    for expected, losses in zip(reference.losses, actual.losses):
        pairs += zip(expected.values(), losses.values())
    loss = max(_NUMBERS.relative_difference(a, b) for a, b in pairs)
    total = _total_norm(reference.grads)
    grad = max(
        (actual.grads[name] - grad).norm().item() / max(grad.norm().item(), 1e-3 * total, 1e-30)
        for name, grad in reference.grads.items()
    )
    weight = max((actual.weights[name] - value).abs().max().item() for name, value in reference.weights.items())
    return (
        f"{len(reference.losses)} steps of {', '.join(reference.losses[0])} and the gradient norm within {loss:.1e}; "
        f"{len(reference.grads)} gradients within {grad:.1e} of their norm; {len(reference.weights)} weights and "
        f"buffers within {weight:.1e}; {max(reference.dropped)} tokens dropped on both"
    )


def _total_norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def _compare_norms(reference: TrainingTrace, actual: TrainingTrace, step: int, tolerances: Tolerances) -> ComparisonRow:
    norms = (reference.grad_norms[step], actual.grad_norms[step])
    return _NUMBERS.compare(f"gradient norm (step {step + 1})", "", *norms, tolerances.norm)


def _compare_step(
    reference: TrainingTrace, actual: TrainingTrace, step: int, tolerances: Tolerances
) -> Iterator[ComparisonRow]:
    expected, losses, suffix = reference.losses[step], actual.losses[step], f"(step {step + 1})"
    yield _NUMBERS.compare_counts(f"dropped tokens {suffix}", reference.dropped[step], actual.dropped[step])
    for name in dict.fromkeys([*expected, *losses]):
        layer = _first_different_layer(reference, actual, step, name, tolerances)
        yield _NUMBERS.compare(f"{name} {suffix}", layer, expected.get(name), losses.get(name), tolerances.loss)


def _first_different_output(
    reference: TrainingTrace, actual: TrainingTrace, tolerances: Tolerances
) -> list[ComparisonRow]:
    """Return the first output of an attention or MLP that differs, with the ranks that computed it."""
    expected = {coordinates: sums for rank in reference.forward for coordinates, sums in rank.items()}
    different = []
    for rank, by_coordinates in enumerate(actual.forward):
        for coordinates, sums in by_coordinates.items():
            for name in sums.keys() & expected.get(coordinates, {}).keys():
                (total, squares), (expected_total, expected_squares) = sums[name], expected[coordinates][name]
                scale = expected_squares.sum().sqrt().item() + 1e-12
                difference = max(
                    (total - expected_total).norm().item() / scale,
                    (squares - expected_squares).norm().item() / scale**2,
                )
                if not difference <= tolerances.output:
                    different.append((execution_order(name), rank, name, difference))
    if not different:
        return []
    order, _, name, difference = min(different)
    ranks = ", ".join(str(rank) for other, rank, _, _ in sorted(different) if other == order)
    return [ComparisonRow("output (step 1)", name, difference, tolerances.output, f"computed by rank {ranks}")]


def _first_different_layer(
    reference: TrainingTrace, actual: TrainingTrace, step: int, name: str, tolerances: Tolerances
) -> str:
    """Return the first layer whose share of a loss differs, or an empty string."""
    if not reference.per_layer or name not in reference.per_layer[step] or name not in actual.per_layer[step]:
        return ""
    for layer, (a, b) in enumerate(zip(reference.per_layer[step][name], actual.per_layer[step][name])):
        if _NUMBERS.relative_difference(a, b) > tolerances.loss:
            return f"layer {layer}"
    return ""


def _compare_tensors(
    quantity: str,
    expected: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    shards: list[list[TracedShard]],
    measure: Callable[[str, Tensor], tuple[float, float, bool]],
) -> Iterator[ComparisonRow]:
    """Yield the tensors that differ. `measure` returns difference, tolerance and equality for the error of a tensor."""

    def compare_one(name: str) -> Iterator[ComparisonRow]:
        a, b = expected[name].double(), tensors[name].double()
        if a.shape != b.shape:
            detail = f"shapes: {_NUMBERS.describe(list(a.shape), list(b.shape))}"
            yield ComparisonRow(quantity, name, math.inf, 0.0, detail)
            return
        difference, allowed, is_equal = measure(name, b - a)
        if not is_equal:
            norms = f"norm {a.norm().item():.3g} in one process, {b.norm().item():.3g} on the ranks"
            detail = "; ".join(filter(None, [norms, _describe_holders(name, b - a, shards)]))
            yield ComparisonRow(quantity, name, difference, allowed, detail)

    return compare_by_name(quantity, ("one process", "ranks"), (expected, tensors), compare_one)


def _describe_holders(name: str, error: Tensor, shards: list[list[TracedShard]]) -> str:
    """Name the ranks that hold the shard with the largest error."""
    holders = [(rank, shard) for rank, by_rank in enumerate(shards) for shard in by_rank if shard.name == name]
    if not holders:
        return ""
    errors = {(shard.dim, shard.index): _take_shard(error, shard).norm().item() for _, shard in holders}
    worst = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
    ranks = ", ".join(str(rank) for rank, shard in holders if (shard.dim, shard.index) == worst)
    count = holders[0][1].count
    return f"held by rank {ranks}" if count == 1 else f"largest in shard {worst[1]} of {count}, held by rank {ranks}"


def _take_shard(tensor: Tensor, shard: TracedShard) -> Tensor:
    if shard.dim is None:
        return tensor
    lengths = [share * tensor.shape[shard.dim] // sum(shard.sections) for share in shard.sections]
    sections = tensor.split(lengths, shard.dim)
    return torch.cat([section.chunk(shard.count, shard.dim)[shard.index] for section in sections], shard.dim)


def _compare_copies(trace: TrainingTrace, tolerances: Tolerances) -> Iterator[ComparisonRow]:
    """List the shards that several ranks hold with different values; one row for each tensor and rank."""
    first: dict[tuple, tuple[int, TracedShard]] = {}
    for rank, shards in enumerate(trace.shards):
        for shard in shards:
            first_rank, expected = first.setdefault((shard.name, shard.index), (rank, shard))
            for quantity, a, b in zip(_FINGERPRINTS, expected.fingerprints, shard.fingerprints, strict=True):
                scale = max(abs(a[0]), 1e-4)
                difference = max(_absolute_difference(x, y) for x, y in zip(a, b)) / scale
                if not difference <= tolerances.copies:
                    detail = f"on rank {first_rank} and rank {rank}"
                    yield ComparisonRow(f"copies of the {quantity}", shard.name, difference, tolerances.copies, detail)


def _absolute_difference(a: float, b: float) -> float:
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b)

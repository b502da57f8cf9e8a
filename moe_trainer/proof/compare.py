"""Where two trainings part: every quantity that differs, in the order in which it is computed.

Order: losses and dropped tokens of the first step (forward), its gradients from the last layer to the first (backward), the gradient
norm, then losses, drops and norms of the later steps, the weights and the expert bias at the end, the loss of a validation, and last
the copies of one piece on several ranks. The first difference is the one to look at; those behind it usually follow from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from moe_trainer.proof.observe import Outcome, Piece

_FORWARD = 1e-5
"""From where on the sums of an output differ, relative to its norm."""
_COPIES = ("gradient (step 1)", "weight at the end")
"""What the fingerprints of a piece are of."""
_LAYER = re.compile(r"(?:^|\.)(decoder|mtp)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Tolerances:
    """How far two trainings may be apart in fp32.

    loss, norm: relative. grad: norm of the difference relative to the norm of the gradient, plus `tiny` times the norm of all gradients
    (some are zero but for rounding, such as that of a bias of keys without positions). weight: absolute, some thousandths of what three
    steps move it, or `shaken` times what a disturbance of the reference moves it (Adam divides by the gradient, so a weight that is hardly
    used is moved by rounding too). copies: fingerprints of one piece on several ranks, relative to its norm.
    """

    loss: float = 2e-6
    norm: float = 2e-6
    grad: float = 1e-5
    weight: float = 5e-6
    shaken: float = 0.1
    copies: float = 1e-6
    tiny: float = 3e-8


FP32 = Tolerances()


@dataclass(frozen=True)
class Difference:
    """One quantity that parts: what, where, how far (`size`, in the terms of its tolerance `allowed`), and on which rank."""

    quantity: str
    where: str
    size: float
    allowed: float
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.quantity} of {self.where}" if self.where else self.quantity
        return f"{text}: apart by {self.size:.3g} (allowed {self.allowed:.3g})" + (f"; {self.detail}" if self.detail else "")


def compare(one: Outcome, many: Outcome, tolerances: Tolerances = FP32) -> list[Difference]:
    """List what differs between one process and many ranks, in order of execution; empty: equal.

    Raises: ValueError when there is nothing to compare: no steps, gradients, weights or pieces of the ranks.
    """
    lacking = [name for name in ("losses", "grad_norms", "grads", "weights") if not getattr(one, name)]
    if lacking or not many.pieces:
        raise ValueError(f"nothing can be proven without {', '.join(lacking or ['pieces'])}")
    found = list(_step(one, many, 0, tolerances))
    found += _tensors("gradient (step 1)", one.grads, many, many.grads, tolerances)
    if found:
        found = [*_forward(one, many), *found]
    found += _number("gradient norm (step 1)", one.grad_norms[0], many.grad_norms[0], tolerances.norm)
    for step in range(1, len(one.losses)):
        found += _step(one, many, step, tolerances)
        found += _number(f"gradient norm (step {step + 1})", one.grad_norms[step], many.grad_norms[step], tolerances.norm)
    found += _tensors(f"weight (after step {len(one.losses)})", one.weights, many, many.weights, tolerances, one.shaken)
    found += _number("loss of a validation", one.evaluation, many.evaluation, tolerances.loss)
    return found + list(_copies(many, tolerances))


def closeness(one: Outcome, many: Outcome) -> str:
    """What was compared and how close it is, in a line: the largest deviations of losses, gradients and weights.

    A gradient is measured by its own norm, one that is all but zero by a thousandth of the norm of all.
    """
    pairs = [(a, b) for theirs, ours in zip(one.losses, many.losses) for a, b in zip(theirs.values(), ours.values())]
    loss = max(_apart(a, b) for a, b in [*pairs, *zip(one.grad_norms, many.grad_norms)])
    total = math.sqrt(sum(grad.double().square().sum().item() for grad in one.grads.values()))
    grad = max((many.grads[name] - grad).norm().item() / max(grad.norm().item(), 1e-3 * total, 1e-30) for name, grad in one.grads.items())
    weight = max((many.weights[name] - value).abs().max().item() for name, value in one.weights.items())
    names = ", ".join(one.losses[0])
    return (
        f"{len(one.losses)} steps of {names} and the gradient norm within {loss:.1e}; {len(one.grads)} gradients within {grad:.1e} of "
        f"their norm; {len(one.weights)} weights and buffers within {weight:.1e}; {max(one.dropped)} tokens dropped on both"
    )


def _step(one: Outcome, many: Outcome, step: int, tolerances: Tolerances) -> Iterator[Difference]:
    ours, theirs, number = many.losses[step], one.losses[step], f"(step {step + 1})"
    if one.dropped[step] != many.dropped[step]:
        detail = f"one process {one.dropped[step]}, here {many.dropped[step]}"
        yield Difference(f"dropped tokens {number}", "", abs(one.dropped[step] - many.dropped[step]), 0.0, detail)
    for name in dict.fromkeys([*theirs, *ours]):
        where = _layer_that_parts(one, many, step, name, tolerances)
        yield from _number(f"{name} {number}", theirs.get(name), ours.get(name), tolerances.loss, where)


def _forward(one: Outcome, many: Outcome) -> list[Difference]:
    """The first output of an attention or feed-forward part that differs, and the rank that computed it."""
    whole = {place: sums for rank in one.forward for place, sums in rank.items()}
    apart = []
    for rank, mine in enumerate(many.forward):
        for place, sums in mine.items():
            for name in sums.keys() & whole.get(place, {}).keys():
                (total, squares), (theirs, their_squares) = sums[name], whole[place][name]
                scale = their_squares.sum().sqrt().item() + 1e-12
                size = max((total - theirs).norm().item() / scale, (squares - their_squares).norm().item() / scale**2)
                if not size <= _FORWARD:
                    apart.append((execution_order(f"{name}."), rank, name, size))
    if not apart:
        return []
    first = min(apart)[0]
    ranks = [rank for order, rank, _, _ in sorted(apart) if order == first]
    _, _, name, size = min(apart)
    return [Difference("output (step 1)", name, size, _FORWARD, f"computed by rank {', '.join(map(str, ranks))}")]


def _layer_that_parts(one: Outcome, many: Outcome, step: int, name: str, tolerances: Tolerances) -> str:
    """The first layer whose share of a loss differs."""
    if not one.per_layer or name not in one.per_layer[step] or name not in many.per_layer[step]:
        return ""
    for layer, (theirs, ours) in enumerate(zip(one.per_layer[step][name], many.per_layer[step][name])):
        if _apart(theirs, ours) > tolerances.loss:
            return f"layer {layer}"
    return ""


def _number(quantity: str, theirs: float | None, ours: float | None, allowed: float, where: str = "") -> Iterator[Difference]:
    if theirs is None and ours is None:
        return
    size = math.inf if theirs is None or ours is None else _apart(theirs, ours)
    if not size <= allowed:
        yield Difference(quantity, where, size, allowed, f"one process {_shown(theirs)}, here {_shown(ours)}")


def _apart(theirs: float, ours: float) -> float:
    """Relative distance; nan is infinitely far from everything."""
    if math.isnan(theirs) or math.isnan(ours):
        return math.inf
    return 0.0 if theirs == ours else max(abs(ours - theirs) - 1e-12, 0.0) / max(abs(theirs), 1e-30)


def _shown(value: float | None) -> str:
    return "absent" if value is None else f"{value:.9g}"


def _tensors(
    what: str, one: dict[str, Tensor], many: Outcome, ours: dict[str, Tensor], tolerances: Tolerances, shaken: Mapping[str, float] = MappingProxyType({})
) -> list[Difference]:
    """Tensors that differ, from the last layer to the first. shaken: see Outcome."""
    found = []
    floor = tolerances.tiny * math.sqrt(sum(tensor.double().square().sum().item() for tensor in one.values()))
    for name in sorted(one.keys() | ours.keys(), key=execution_order, reverse=True):
        if name not in one or name not in ours:
            detail = "one process does not have it" if name in ours else "it is missing here"
            found.append(Difference(what, name, math.inf, 0.0, detail))
        elif one[name].shape != ours[name].shape:
            detail = f"one process {list(one[name].shape)}, here {list(ours[name].shape)}"
            found.append(Difference(what, name, math.inf, 0.0, f"shapes: {detail}"))
        else:
            room = replace(tolerances, weight=max(tolerances.weight, tolerances.shaken * shaken.get(name, 0.0)))
            found += _tensor(what, name, one[name], ours[name], many.pieces, room, floor)
    return found


def _tensor(
    what: str, name: str, one: Tensor, ours: Tensor, pieces: list[list[Piece]], tolerances: Tolerances, floor: float
) -> Iterator[Difference]:
    apart = ours.double() - one.double()
    if what.startswith("gradient"):
        norm = one.double().norm().item()
        size = apart.norm().item() / max(norm, 1e-30)
        allowed, unequal = tolerances.grad, not apart.norm().item() <= tolerances.grad * norm + floor
    else:
        size = apart.abs().max().item() if apart.numel() else 0.0
        allowed, unequal = tolerances.weight, not size <= tolerances.weight
    if unequal:
        scale = f"norm {one.double().norm().item():.3g} in one process, {ours.double().norm().item():.3g} here"
        yield Difference(what, name, size, allowed, "; ".join(filter(None, [scale, _holder(name, apart, pieces)])))


def _holder(name: str, apart: Tensor, pieces: list[list[Piece]]) -> str:
    """Which ranks hold the piece that differs most."""
    held = [(rank, piece) for rank, mine in enumerate(pieces) for piece in mine if piece.name == name]
    if not held:
        return ""
    sizes = {(piece.dim, piece.index): _cut(apart, piece).norm().item() for _, piece in held}
    worst = max(sizes, key=lambda key: math.inf if math.isnan(sizes[key]) else sizes[key])
    ranks = ", ".join(str(rank) for rank, piece in held if (piece.dim, piece.index) == worst)
    count = held[0][1].count
    return f"held by rank {ranks}" if count == 1 else f"most in piece {worst[1]} of {count}, held by rank {ranks}"


def _cut(tensor: Tensor, piece: Piece) -> Tensor:
    if piece.dim is None:
        return tensor
    parts = tensor.split([share * tensor.shape[piece.dim] // sum(piece.parts) for share in piece.parts], piece.dim)
    return torch.cat([part.chunk(piece.count, piece.dim)[piece.index] for part in parts], piece.dim)


def _copies(many: Outcome, tolerances: Tolerances) -> Iterator[Difference]:
    """Pieces that several ranks hold and that are not the same there; one line for each tensor."""
    first: dict[tuple, tuple[int, Piece]] = {}
    for rank, mine in enumerate(many.pieces):
        for piece in mine:
            holder, kept = first.setdefault((piece.name, piece.index), (rank, piece))
            for what, theirs, ours in zip(_COPIES, kept.fingerprints, piece.fingerprints, strict=True):
                scale = max(abs(theirs[0]), 1e-4)
                size = max(_distance(a, b) for a, b in zip(theirs, ours)) / scale
                if not size <= tolerances.copies:
                    yield Difference(f"copies of the {what}", piece.name, size, tolerances.copies, f"on rank {holder} and rank {rank}")


def _distance(a: float, b: float) -> float:
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b)


def execution_order(name: str) -> tuple:
    """Sort key of a tensor's name: its place in the forward pass."""
    layer = _LAYER.search(name)
    if name.startswith("embedding"):
        place = (0, 0)
    elif layer is not None:
        place = (1 if layer.group(1) == "decoder" else 3, int(layer.group(2)))
    else:
        place = (2, 0) if name.startswith("decoder") else (4, 0)
    inside = next((rank for rank, word in enumerate(_INSIDE) if word in name), len(_INSIDE))
    expert = _EXPERT.search(name)
    return (*place, inside, name.endswith("fc2.weight"), int(expert.group(1)) if expert else -1, name)


_INSIDE = (
    "enorm", "hnorm", "eh_proj", "input_layernorm", "linear_q_down", "linear_q_up", "linear_q_proj", "linear_kv_down", "linear_kv_up", "layernorm_qkv",
    "linear_qkv", "q_layernorm", "k_layernorm", "linear_proj", "self_attention", "pre_mlp_layernorm", "router", "mlp",
)

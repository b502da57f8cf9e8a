"""Where two records of one iteration part: every traced quantity, in the order in which it is computed.

Order: the layers' outputs forward (with the routers' logits, choices and weights), the token losses, the losses that the log names, the
gradients from the last layer to the first, the gradient norm. The first one beyond its tolerance is where to look; most of what
follows usually follows from it.

Distances are relative. Of a token's output: the norm of the difference, estimated from its projections (guard/record.py), over the norm of
the output, or a tenth of the mean norm where the output is small. Of a gradient: norm of the difference over its norm. Of choices: the
share of tokens whose experts differ, which may be none.

Near ties are no parting. A token whose experts differ had one if its logits agree within the tolerance and the chosen led by no more than
rounding of that size can turn (`_TURNS` deviations of a logit's difference): then rounding decided. What that token puts out in this layer,
and in later ones all that may attend to it, is not judged but counted. Losses and gradients are of all tokens: if they part behind near ties, that is said. Records without
margins (older ones, Sinkhorn's and FineRMoE's choices) know no near ties.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moe_trainer.guard.record import CHOICE, GRADIENTS, MARGIN, SIGNS, TRACE, Record
from moe_trainer.proof.compare import execution_order

_SMALL = 0.1
_TURNS = 6.0
_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)(?:\.(.*))?$")
_INSIDE = ("embedding", "self_attention", "mlp.router.logits", "mlp.router", "mlp.router.probs", "mlp")


@dataclass(frozen=True)
class Tolerances:
    """How far two runs of an iteration may be apart in one arithmetic: outputs of a token, losses and the gradient norm, gradients (plus
    `tiny` times the norm of all of them, since some are zero but for rounding). All relative."""

    output: float
    loss: float
    gradient: float
    tiny: float


TOLERANCES = MappingProxyType({
    "fp64": Tolerances(1e-10, 1e-12, 1e-10, 1e-14),
    "fp32": Tolerances(2e-5, 2e-6, 2e-5, 1e-7),
    "fp16": Tolerances(1e-2, 1e-3, 2e-2, 1e-3),
    "bf16": Tolerances(5e-2, 5e-3, 1e-1, 5e-3),
    "8 or 4 bits": Tolerances(3e-1, 2e-2, 5e-1, 3e-2),
})  # fmt: skip
"""By arithmetic, from fine to coarse: some twenty roundings of it."""


def arithmetic_of(head: Mapping[str, Any]) -> str:
    """The name of a record's arithmetic in TOLERANCES."""
    return "8 or 4 bits" if head["quantized"] else head["dtype"]


def coarser(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Of two records' arithmetics the coarser one, which decides."""
    names = list(TOLERANCES)
    return names[max(names.index(arithmetic_of(head)) for head in (one, other))]


@dataclass(frozen=True)
class Part:
    """One quantity of both records: how far it is apart (`size`), what is allowed, and where: first, and how many are.

    ties: of choices, the tokens for which rounding chose.
    """

    kind: str
    name: str
    size: float
    allowed: float
    where: str = ""
    ties: int = 0

    @property
    def parts(self) -> bool:
        """Is it beyond its tolerance?"""
        return not self.size <= self.allowed


def compare_records(one: Record, other: Record) -> list[Part]:
    """Compare two records of the same samples, quantity by quantity, in order of computation.

    Raises: ValueError when they are not of the same samples, or incomplete.
    """
    if (one.head["samples"], one.head["seq_length"]) != (other.head["samples"], other.head["seq_length"]):
        raise ValueError(f"{other.folder}: {other.head['samples']} samples of {other.head['seq_length']} tokens, in {one.folder} "
                         f"{one.head['samples']} of {one.head['seq_length']}")
    if not torch.equal(one.batch()["tokens_BS"], other.batch()["tokens_BS"]):
        raise ValueError(f"{other.folder} holds other tokens than {one.folder}")
    allowed = TOLERANCES[coarser(one.head, other.head)]
    return [*_forward(one, other, allowed), *_losses(one, other, allowed), *_gradients(one, other, allowed)]


def _forward(one: Record, other: Record, allowed: Tolerances) -> Iterator[Part]:
    """Outputs and choices."""
    mine, theirs = ({*record.names(TRACE)} for record in (one, other))
    chosen = {*one.names(CHOICE)} & {*other.names(CHOICE)}
    logits: dict[str, Tensor] = {}
    tied = torch.zeros(one.head["samples"], one.head["seq_length"], dtype=torch.bool)
    layer = None
    for name in sorted(mine | theirs | chosen, key=place_of):
        if layer != (layer := place_of(name)[:2]):
            tied = tied.long().cummax(1)[0].bool()  # those behind it attend to it
        if name in chosen:
            near = _near_ties(one, other, name, logits.pop(name, None), allowed)
            yield _choices(one, other, name, near, tied)
            tied |= near
            continue
        kind = "token losses" if name == "loss" else "output"
        if name not in mine & theirs:
            yield Part(kind, name, math.inf, allowed.output, f"only in {(one if name in mine else other).folder}")
            continue
        apart = distances(one.joined(f"{TRACE}{name}"), other.joined(f"{TRACE}{name}"))
        behind = int((tied & (apart > allowed.output)).sum())
        apart = apart.masked_fill(tied, 0.0)
        if name.endswith(".router.logits"):
            logits[name.removesuffix(".logits")] = apart
        where = _tokens(one, apart > allowed.output)
        if behind:
            where += f"{'; ' if where else ''}not judged, behind near ties: {behind} tokens"
        yield Part(kind, name, apart.max().item(), allowed.output, where)


def place_of(name: str) -> tuple:
    """Sort key of a traced output: its place in the forward pass."""
    found = _LAYER.match(name)
    if found is not None:
        inside = next((place for place, part in enumerate(_INSIDE) if part == found.group(3)), len(_INSIDE))
        return (1 if found.group(1) == "decoder" else 3, int(found.group(2)), inside)
    return ({"embedding": 0, "loss": 4}.get(name, 2), 0, 0)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Of every token, how far two traces [samples, S, K] are apart, relative to its norm: [samples, S] fp64. nan equals nan only."""
    a, b = a.double(), b.double()
    if a.shape[-1] > 1:
        size = a[..., -1]
        apart = torch.maximum((a - b)[..., :-1].norm(dim=-1) / math.sqrt(SIGNS), (a - b)[..., -1].abs())
    else:
        size, apart = a[..., 0].abs(), (a - b)[..., 0].abs()
    scale = torch.maximum(size, _SMALL * size.nan_to_num(0.0, 0.0).square().mean().sqrt())
    apart = torch.where(apart == 0, 0.0, apart / scale.clamp(min=1e-30))
    same = ((a == b) | (a.isnan() & b.isnan())).all(-1)
    return torch.where(same, 0.0, apart.nan_to_num(nan=math.inf))


def _differ(one: Record, other: Record, name: str) -> Tensor:
    """Tokens [samples, S] for which a router has chosen other experts."""
    return (one.joined(f"{CHOICE}{name}") != other.joined(f"{CHOICE}{name}")).any(-1)


def _near_ties(one: Record, other: Record, name: str, logits: Tensor | None, allowed: Tolerances) -> Tensor:
    """Of those, the ones for which rounding chose. logits: how far the router's are apart."""
    differ = _differ(one, other, name)
    margins = [record.joined(f"{MARGIN}{name}")[..., 0].double() for record in (one, other) if name in record.names(MARGIN)]
    if logits is None or not margins or not bool(differ.any()):
        return torch.zeros_like(differ)
    margin = torch.stack(margins).amin(0)
    return differ & (logits <= allowed.output) & (margin <= _TURNS * logits + torch.finfo(torch.float32).eps)


def _choices(one: Record, other: Record, name: str, near: Tensor, tied: Tensor) -> Part:
    """Tokens for which a router has chosen other experts. near: near ties; tied: tokens that had some before."""
    differ = _differ(one, other, name) & ~tied
    ties, others = int((differ & near).sum()), differ & ~near
    where = _tokens(one, others)
    if bool(others.any()) and (one.head["dropped_tokens"] or other.head["dropped_tokens"]):
        where += "; dropped otherwise, or a fault"
    if ties:
        where += f"{'; ' if where else ''}near ties: {ties} of {differ.numel()} tokens"
    return Part("chosen experts", name, others.double().mean().item(), 0.0, where, ties)


def _tokens(record: Record, which: Tensor) -> str:
    """Which tokens those are: the first of them, in the words of the recorded run, and how many."""
    count = int(which.sum())
    if not count:
        return ""
    place, token = (which.nonzero()[0]).tolist()
    head = record.head
    microbatch, rest = divmod(place, head["micro_batch_size"] * head["mapping"]["dp"])
    numbers = head["sample_numbers"]
    sample = f"sample {numbers[place]}" if numbers else f"sequence {place} of the global batch"
    rank = f", data rank {rest // head['micro_batch_size']}" if head["mapping"]["dp"] > 1 else ""
    return f"first in microbatch {microbatch + 1}{rank}, {sample}, token {token}; {count} of {which.numel()} tokens"


def _losses(one: Record, other: Record, allowed: Tolerances) -> Iterator[Part]:
    mine, theirs = one.head["losses"], other.head["losses"]
    skipped = one.head["skipped"] or other.head["skipped"]  # all but the loss of such an iteration is unknown
    for name in (name for name in dict.fromkeys([*mine, *theirs]) if not skipped or (name in mine and name in theirs)):
        yield _number("loss", name, mine.get(name), theirs.get(name), allowed.loss)
    if one.head["dropped_tokens"] or other.head["dropped_tokens"]:
        dropped = [record.head["dropped_tokens"] for record in (one, other)]
        yield Part("dropped tokens", "", abs((dropped[1] or 0) - (dropped[0] or 0)), 0.0, f"recorded {dropped[0]}, here {dropped[1]}")


def _number(kind: str, name: str, mine: float | None, theirs: float | None, allowed: float) -> Part:
    if mine is None or theirs is None:
        size = 0.0 if mine is theirs else math.inf
    elif math.isnan(mine) or math.isnan(theirs):
        size = 0.0 if math.isnan(mine) and math.isnan(theirs) else math.inf
    else:
        size = 0.0 if mine == theirs else abs(mine - theirs) / max(abs(mine), 1e-30)
    return Part(kind, name, size, allowed, f"recorded {_shown(mine)}, here {_shown(theirs)}")


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _gradients(one: Record, other: Record, allowed: Tolerances) -> Iterator[Part]:
    """Every gradient, from the last layer to the first, and the norm of all."""
    with safe_open(one.folder / GRADIENTS, "pt") as mine, safe_open(other.folder / GRADIENTS, "pt") as theirs:
        here, there = set(mine.keys()), set(theirs.keys())
        norms = {name: mine.get_tensor(name).double().norm().item() for name in here}
        total = math.sqrt(sum(norm * norm for norm in norms.values() if math.isfinite(norm)))
        for name in sorted(here | there, key=execution_order, reverse=True):
            if name not in here & there:
                yield Part("gradient", name, math.inf, allowed.gradient, f"only in {(one if name in here else other).folder}")
                continue
            a, b = mine.get_tensor(name).double(), theirs.get_tensor(name).double()
            apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).norm().item()
            # what is zero but for rounding is measured by what is allowed of it
            scale = max(norms[name] if math.isfinite(norms[name]) else 0.0, allowed.tiny / allowed.gradient * total, 1e-30)
            yield Part("gradient", name, apart / scale if math.isfinite(apart) else math.inf, allowed.gradient)
    if not (one.head["skipped"] or other.head["skipped"]):
        yield _number("gradient norm", "", one.head["grad_norm"], other.head["grad_norm"], allowed.loss)

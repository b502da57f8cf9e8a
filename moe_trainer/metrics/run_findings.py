"""What is wrong with a run, in sentences: collapsed routing, slow ranks, a loss that rises or is NaN.

Arithmetic over records of metrics.jsonl. A finding has the severity "bad", "warn" or "ok", the card of the dashboard
that shows it, and a text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Finding = dict[str, Any]

_BAD_DEAD_SHARE = 0.1  # of a layer's experts
_BAD_LOAD, _HIGH_LOAD = 8.0, 3.0  # of the busiest expert over the mean
_LOW_ENTROPY = 0.8
_SLOW_RATIO = 1.2  # of a rank's compute time to the median of the others
_RANK_WINDOW = 10  # records
_RISE = 0.1  # of the loss above its lowest level, in nats
_WINDOW = 20
_ORDER = ("bad", "warn", "ok")


def find_problems(
    records: Sequence[Mapping[str, Any]], routing: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Return the findings of a run, the worst first; one that says so if there is none.

    Args:
        records: of iterations, in order.
        routing: their routing health, with `iteration`.
        ranks: their compute times (`own_time_ms`), with `iteration`.
    """
    found = [
        *({**each, "card": "routing"} for each in worst_layers(routing)),
        *_slow_ranks(ranks),
        *_loss_problems(records),
    ]
    found = [{name: each[name] for name in ("severity", "card", "text")} for each in found]
    if not found:
        known = ["loss", *(["routing"] if routing else []), *(["compute times of the ranks"] if ranks else [])]
        text = "nothing unusual in the " + (" and ".join([", ".join(known[:-1]), known[-1]]) if known[1:] else known[0])
        return [{"severity": "ok", "card": "loss", "text": text}] if records else []
    return sorted(found, key=lambda each: _ORDER.index(each["severity"]))


def worst_layers(routing: Sequence[Mapping[str, Any]], count: int = 3) -> list[Finding]:
    """Return the layers with the least balanced routing now, the worst first, and what is wrong with each."""
    if not routing:
        return []
    newest = routing[-1]
    ranked = []
    for row, layer in enumerate(newest["layers"]):
        experts = len(newest["tokens_per_expert"][row])
        dead, load = newest["dead_experts"][row] or 0, newest["load_max_over_mean"][row] or 1.0
        entropy, drops = newest["load_entropy"][row], (newest.get("drop_rate") or [0.0] * (row + 1))[row] or 0.0
        reasons = []
        if dead:
            since = _since(routing, row)
            verb = "has" if dead == 1 else "have"
            reasons.append(f"{dead:g} of {experts} experts {verb} received no token since iteration {since}")
        if load > _HIGH_LOAD:
            reasons.append(f"the busiest expert has {load:.1f} times the mean load")
        if entropy is not None and entropy < _LOW_ENTROPY:
            reasons.append(f"the normalized load entropy is {entropy:.2f}")
        if drops > 0.01:
            reasons.append(f"{100 * drops:.0f} % of the chosen tokens are dropped")
        if reasons:
            is_bad = dead >= _BAD_DEAD_SHARE * experts or load > _BAD_LOAD
            score = dead / experts + math.log2(max(load, 1.0)) / 8
            text = f"layer {layer}: " + "; ".join(reasons)
            ranked.append((score, {"severity": "bad" if is_bad else "warn", "layer": layer, "text": text}))
    ranked.sort(key=lambda each: -each[0])
    return [finding for _, finding in ranked[:count]]


def _since(routing: Sequence[Mapping[str, Any]], row: int) -> int:
    """Return the first iteration from which on the layer has dead experts in every record."""
    first = routing[-1]["iteration"]
    for each in reversed(routing):
        if row >= len(each["dead_experts"]) or not each["dead_experts"][row]:
            break
        first = each["iteration"]
    return first


def _slow_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the ranks that compute longer than the median of the others, on average over the newest records."""
    recent = [each["ranks"] for each in ranks[-_RANK_WINDOW:] if len(each["ranks"]) == len(ranks[-1]["ranks"])]
    if len(recent) < 2 or len(recent[-1]) < 2:
        return []
    means = [sum(times[rank] for times in recent) / len(recent) for rank in range(len(recent[-1]))]
    found = []
    for rank, mean in enumerate(means):
        others = median(means[:rank] + means[rank + 1 :])
        if others > 0 and mean > _SLOW_RATIO * others:
            text = f"rank {rank} computes {mean / others:.1f} times as long as the others, which wait for it"
            found.append((mean / others, {"severity": "bad", "card": "ranks", "text": text}))
    found.sort(key=lambda each: -each[0])
    return [finding for _, finding in found[:3]]


def _loss_problems(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    found = []
    recent = records[-_WINDOW:]
    broken = sum(each.get("nan_iterations") or 0 for each in recent)
    if broken:
        found.append({"severity": "bad", "card": "loss", "text": f"{broken:g} of the newest iterations had a NaN loss"})
    losses = [(each["iteration"], each["lm loss"]) for each in records if isinstance(each.get("lm loss"), int | float)]
    if len(losses) >= 3 * _WINDOW:
        levels = [
            (losses[start][0], median(loss for _, loss in losses[start : start + _WINDOW]))
            for start in range(0, len(losses) - _WINDOW + 1, _WINDOW // 2)
        ]
        lowest_at, lowest = min(levels, key=lambda level: level[1])
        now = median(loss for _, loss in losses[-_WINDOW:])
        if now > lowest + _RISE:
            text = f"the training loss is {now - lowest:.2f} above its lowest level, near iteration {lowest_at}"
            found.append({"severity": "warn", "card": "loss", "text": text})
    return found

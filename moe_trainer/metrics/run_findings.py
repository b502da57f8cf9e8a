"""What is wrong with a run, in sentences: a bad end, collapsed routing, slow ranks, a loss that diverges or is NaN.

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
_MAX_NAMED = 8  # experts
_SLOW_RATIO = 1.2  # of a rank's compute time to the median of the others
_RANK_WINDOW = 10  # records
_RISE = 0.1  # of the loss above its lowest level, in nats
_WINDOW = 20
_FEW = 3  # records that can show a divergence
_ABOVE_GUESS = 0.1  # of the loss above that of a uniform guess, in nats; 1 for few records
_LOSS_FACTOR, _NORM_FACTOR = 2.0, 100.0  # over those of earlier iterations
_HIGH_RATE, _LOW_RATE = 10.0, 1000.0  # over and below the usual learning rate
_ORDER = ("bad", "warn", "ok")


def find_problems(
    records: Sequence[Mapping[str, Any]],
    routing: Sequence[Mapping[str, Any]],
    ranks: Sequence[Mapping[str, Any]],
    num_experts: int = 0,
    world_size: int = 1,
    expert_ranks: int = 1,
    vocab_size: int | None = None,
    learning_rate: float | None = None,
    parameters: int = 0,
    ended: Finding | None = None,
) -> list[Finding]:
    """Return the findings of a run, the worst first; one that says so if there is none.

    Args:
        records: of iterations, in order.
        routing: their routing health, with `iteration`.
        ranks: their compute times (`own_time_ms`), with `iteration`.
        num_experts: of a layer, 0 without experts.
        world_size: ranks of the run.
        expert_ranks: size of expert parallelism.
        vocab_size: padded; None if unknown.
        learning_rate: of a model that is pretrained with Adam; None if it is another, or unknown.
        parameters: active ones; 0 if unknown.
        ended: how the run ended, if badly.
    """
    found = [
        *([] if ended is None else [ended]),
        *({**each, "card": "routing"} for each in worst_layers(routing)),
        *_slow_ranks(ranks, _busiest_expert_rank(routing, expert_ranks)),
        *_loss_problems(records, vocab_size),
        *_divergence(records),
        *_unusual_learning_rate(learning_rate, parameters),
    ]
    found = [{name: each[name] for name in ("severity", "card", "text", "metric") if name in each} for each in found]
    if not found:
        text = _all_is_well(routing, ranks, num_experts, world_size)
        return [{"severity": "ok", "card": "loss", "text": text}] if records else []
    return sorted(found, key=lambda each: _ORDER.index(each["severity"]))


def _all_is_well(
    routing: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]], num_experts: int, world_size: int
) -> str:
    """Return what was found in order, and what the run did not record, with the flag that records it."""
    known = ["loss", *(["routing"] if routing else []), *(["compute times of the ranks"] if ranks else [])]
    text = "nothing unusual in the " + (" and ".join([", ".join(known[:-1]), known[-1]]) if known[1:] else known[0])
    unknown = ["routing (--moe-per-layer-logging)"] if num_experts and not routing else []
    unknown += ["compute times of the ranks (--log-straggler)"] if world_size > 1 and not ranks else []
    return text + ("; not recorded: " + " and ".join(unknown) if unknown else "")


def worst_layers(routing: Sequence[Mapping[str, Any]], count: int = 3) -> list[Finding]:
    """Return the layers with the least balanced routing now, the worst first, and what is wrong with each."""
    if not routing:
        return []
    newest = routing[-1]
    ranked = []
    for row, layer in enumerate(newest["layers"]):
        tokens = [count or 0 for count in newest["tokens_per_expert"][row]]
        experts = len(tokens)
        dead, load = newest["dead_experts"][row] or 0, newest["load_max_over_mean"][row] or 1.0
        entropy, drops = newest["load_entropy"][row], (newest.get("drop_rate") or [0.0] * (row + 1))[row] or 0.0
        reasons = {}  # by the metric that shows it
        if dead:
            since = _since(routing, row)
            verb = "has" if dead == 1 else "have"
            named = f"{dead:g} of {experts} experts{_names_of_dead(tokens)}"
            reasons["dead_experts"] = f"{named} {verb} received no token since iteration {since}"
        if load > _HIGH_LOAD:
            busiest = tokens.index(max(tokens))
            reasons["load_max_over_mean"] = f"the busiest expert ({busiest}) has {load:.1f} times the mean load"
        if entropy is not None and entropy < _LOW_ENTROPY:
            reasons["load_entropy"] = f"the normalized load entropy is {entropy:.2f}"
        if drops > 0.01:
            reasons["drop_rate"] = f"{100 * drops:.0f} % of the chosen tokens are dropped"
        if reasons:
            is_bad = dead >= _BAD_DEAD_SHARE * experts or load > _BAD_LOAD
            score = dead / experts + math.log2(max(load, 1.0)) / 8
            finding = {
                "severity": "bad" if is_bad else "warn",
                "layer": layer,
                "metric": next(iter(reasons)),
                "text": f"layer {layer}: " + "; ".join(reasons.values()),
            }
            ranked.append((score, finding))
    ranked.sort(key=lambda each: -each[0])
    return [finding for _, finding in ranked[:count]]


def _names_of_dead(tokens: Sequence[float]) -> str:
    """Return the numbers of the experts without tokens, if they are few."""
    dead = [str(expert) for expert, count in enumerate(tokens) if not count]
    return f" ({', '.join(dead)})" if 0 < len(dead) <= _MAX_NAMED else ""


def _since(routing: Sequence[Mapping[str, Any]], row: int) -> int:
    """Return the first iteration from which on the layer has dead experts in every record."""
    first = routing[-1]["iteration"]
    for each in reversed(routing):
        if row >= len(each["dead_experts"]) or not each["dead_experts"][row]:
            break
        first = each["iteration"]
    return first


def _busiest_expert_rank(routing: Sequence[Mapping[str, Any]], expert_ranks: int) -> float | None:
    """Return the newest tokens of the busiest expert-parallel rank, of all layers, over the mean; None if unknown."""
    loads = [layer for each in routing[-_RANK_WINDOW:] for layer in each["tokens_per_expert"]]
    if expert_ranks < 2 or not loads or len(loads[-1]) % expert_ranks:
        return None
    share = len(loads[-1]) // expert_ranks
    sums = [
        sum(load or 0 for layer in loads for load in layer[rank * share : (rank + 1) * share])
        for rank in range(expert_ranks)
    ]
    return max(sums) * expert_ranks / sum(sums) if any(sums) else None


def _slow_ranks(ranks: Sequence[Mapping[str, Any]], busiest_expert_rank: float | None) -> list[Finding]:
    """Return the ranks that compute longer than the median of the others, on average over the newest records."""
    ranks = [each for each in ranks if len(each["ranks"]) == len(ranks[-1]["ranks"])]
    recent = [each["ranks"] for each in ranks[-_RANK_WINDOW:]]
    if len(recent) < 2 or len(recent[-1]) < 2:
        return []
    means = [sum(times[rank] for times in recent) / len(recent) for rank in range(len(recent[-1]))]
    found = []
    for rank in sorted(range(len(means)), key=means.__getitem__, reverse=True)[:3]:
        ratio = _ratio(means, rank)
        if ratio > _SLOW_RATIO:
            since = _slow_since(ranks, rank)
            text = f"rank {rank} computes {ratio:.1f} times as long as the others"
            text += ("" if since is None else f" since iteration {since}") + "; they wait for it"
            if busiest_expert_rank is not None:
                share = f"the busiest expert-parallel rank receives {busiest_expert_rank:.1f} times the mean tokens"
                explains = busiest_expert_rank > _SLOW_RATIO
                text += f". Routing {'may explain' if explains else 'does not explain'} it: {share}"
            found.append({"severity": "bad", "card": "ranks", "text": text})
    return found


def _ratio(times: Sequence[float], rank: int) -> float:
    """Return the time of a rank over the median of the others."""
    others = median([*times[:rank], *times[rank + 1 :]])
    return times[rank] / others if others > 0 else 1.0


def _slow_since(ranks: Sequence[Mapping[str, Any]], rank: int) -> int | None:
    """Return the first iteration from which on the rank is slow; a single record in which it is not counts as noise."""
    first, others = None, 0
    for each in reversed(ranks):
        if _ratio(each["ranks"], rank) > _SLOW_RATIO:
            first, others = each["iteration"], 0
        else:
            others += 1
            if others == 2:
                break
    return first


def _loss_problems(records: Sequence[Mapping[str, Any]], vocab_size: int | None) -> list[Finding]:
    found = []
    recent = records[-_WINDOW:]
    broken = sum(each.get("nan_iterations") or 0 for each in recent)
    if broken:
        found.append(_loss_finding("bad", f"{broken:g} of the newest iterations had a NaN loss"))
    after = _values(records[_warmup_end(records) :], "lm loss")
    if isinstance(vocab_size, int) and vocab_size > 1 and len(after) >= _FEW:
        guess, now = math.log(vocab_size), median(after[-_WINDOW:])
        if now > guess + (_ABOVE_GUESS if len(after) >= _WINDOW else 1.0):
            text = f"the training loss is {now:.4g}: a uniform guess over {vocab_size:,} tokens has {guess:.2f}"
            found.append(_loss_finding("bad", text))
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
            found.append(_loss_finding("warn", text))
    return found


def _loss_finding(severity: str, text: str) -> Finding:
    return {"severity": severity, "card": "loss", "text": text}


def _values(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [each[name] for each in records if isinstance(each.get(name), int | float)]


def _warmup_end(records: Sequence[Mapping[str, Any]]) -> int:
    """Return the first record with the largest learning rate so far."""
    rates = [each.get("learning_rate") or 0.0 for each in records]
    return rates.index(max(rates)) if rates else 0


def _divergence(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return whether loss and gradient norm are now many times those of the first half of the run."""
    found = []
    quantities = (("lm loss", "training loss", _LOSS_FACTOR), ("grad_norm", "gradient norm", _NORM_FACTOR))
    for name, words, factor in quantities:
        values = _values(records, name)
        if len(values) < 2 * _FEW:
            continue
        count = min(_WINDOW, len(values) // 2)
        # of the first half: where a run diverges at once its first values are the only good ones
        earlier, now = min(median(values[:_FEW]), median(values[: len(values) // 2])), median(values[-count:])
        if earlier > 0 and now > factor * earlier and now - earlier > 1.0:
            times = f"{now / earlier:.0f}" if now < 1e4 * earlier else f"{now / earlier:.1e}"
            text = f"the {words} is {now:.4g}, {times} times that of earlier iterations ({earlier:.4g})"
            found.append(_loss_finding("bad", text))
    return found


def _unusual_learning_rate(rate: float | None, parameters: int) -> list[Finding]:
    """Return whether a learning rate is far from a power law through those of GPT-3 (arXiv 2005.14165, table 2.1)."""
    if rate is None or rate <= 0 or parameters <= 0:
        return []
    usual = 6e-4 * (parameters / 125e6) ** -0.3
    if usual / _LOW_RATE < rate < _HIGH_RATE * usual:
        return []
    times = f"{rate / usual:,.0f} times" if rate > usual else f"a {usual / rate:,.0f}th of"
    text = f"the learning rate {rate:g} is {times} what models of {parameters / 1e6:,.3g} million active parameters use"
    return [_loss_finding("warn", f"{text} with Adam (about {usual:.1g})")]

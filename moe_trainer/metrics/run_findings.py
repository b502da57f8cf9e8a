"""What is wrong with a run, in sentences: a bad end, a loss that diverges or is NaN, slow ranks, collapsed routing.

Arithmetic over records of metrics.jsonl. A finding has the severity "bad", "warn" or "ok", the card of the dashboard
that shows it, and a text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from moe_trainer.drawing.number_ranges import group_consecutive

Finding = dict[str, Any]

_BAD_IDLE_SHARE = 0.1  # of a layer's experts
_IDLE_RECORDS = 3  # without a token of an expert; in a single iteration many an expert has none by chance
_BAD_LOAD, _HIGH_LOAD = 8.0, 3.0  # of the busiest expert over the mean
_LOW_ENTROPY = 0.8
_MAX_NAMED = 8  # experts, or ranges of them
_SLOW_RATIO = 1.2  # of a rank's compute time to the median of the others
_RANK_WINDOW = 10  # records
_RISE = 0.1  # of the loss above its lowest level, in nats
_WINDOW = 20
_FEW = 3  # records whose median is no accident
_ABOVE_GUESS = 0.1  # of the loss above that of a uniform guess, in nats; 1 for few records, the guess itself for fewer
_LOSS_FACTOR, _NORM_FACTOR = 2.0, 100.0  # over those of earlier iterations
_HIGH_RATE, _LOW_RATE = 10.0, 1000.0  # over and below the usual learning rate
_ORDER = ("bad", "warn", "ok")


@dataclass(frozen=True)
class RunSizes:
    """Sizes of a run that its findings depend on.

    Attributes:
        num_experts: of a layer, 0 without experts.
        world_size: ranks of the run.
        expert_ranks: size of expert parallelism.
        vocab_size: padded; None if unknown.
    """

    num_experts: int = 0
    world_size: int = 1
    expert_ranks: int = 1
    vocab_size: int | None = None


UNKNOWN_SIZES = RunSizes()


def find_problems(
    records: Sequence[Mapping[str, Any]],
    routing: Sequence[Mapping[str, Any]],
    ranks: Sequence[Mapping[str, Any]],
    sizes: RunSizes = UNKNOWN_SIZES,
    ended: Finding | None = None,
    warnings: Sequence[str] = (),
) -> list[Finding]:
    """Return the findings of a run, the worst first; one that says so if there is none.

    Of equally bad ones the end of the run comes first, then a divergence.

    Args:
        records: of iterations, in order.
        routing: their routing health, with `iteration`.
        ranks: their compute times (`own_time_ms`), with `iteration`.
        sizes: of the run, as far as known.
        ended: how the run ended, if badly.
        warnings: of its start.
    """
    found = [
        *([] if ended is None else [ended]),
        *_loss_problems(records, sizes.vocab_size),
        *_divergence(records),
        *(_loss_finding("warn", text) for text in warnings),
        *_slow_ranks(ranks, _busiest_expert_rank(routing, sizes.expert_ranks)),
        *({**each, "card": "routing"} for each in worst_layers(routing)),
    ]
    found = [{name: each[name] for name in ("severity", "card", "text", "metric") if name in each} for each in found]
    if not found:
        text = _all_is_well(routing, ranks, sizes.num_experts, sizes.world_size)
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
        experts, load = len(tokens), newest["load_max_over_mean"][row] or 1.0
        entropy, drops = newest["load_entropy"][row], (newest.get("drop_rate") or [0.0] * (row + 1))[row] or 0.0
        idle, since = _idle_experts(routing, row)
        reasons = {}  # by the metric that shows it
        if idle:
            verb = "has" if len(idle) == 1 else "have"
            named = f"{len(idle)} of {experts} experts ({_name_numbers(idle)})"
            reasons["dead_experts"] = f"{named} {verb} received no token since iteration {since}"
        if load > _HIGH_LOAD:
            busiest = tokens.index(max(tokens))
            reasons["load_max_over_mean"] = f"the busiest expert ({busiest}) has {load:.1f} times the mean load"
        if entropy is not None and entropy < _LOW_ENTROPY:
            half = _experts_with_half(tokens)
            named = f" (half of the tokens go to {len(half)} of {experts} experts: {_name_numbers(half)})"
            reasons["load_entropy"] = f"the normalized load entropy is {entropy:.2f}" + (named if half else "")
        if drops > 0.01:
            reasons["drop_rate"] = f"{100 * drops:.0f} % of the chosen tokens are dropped"
        if reasons:
            is_bad = len(idle) >= _BAD_IDLE_SHARE * experts or load > _BAD_LOAD
            score = len(idle) / experts + math.log2(max(load, 1.0)) / 8
            finding = {
                "severity": "bad" if is_bad else "warn",
                "layer": layer,
                "metric": next(iter(reasons)),
                "text": f"layer {layer}: " + "; ".join(reasons.values()),
            }
            ranked.append((score, finding))
    ranked.sort(key=lambda each: -each[0])
    return [finding for _, finding in ranked[:count]]


def _idle_experts(routing: Sequence[Mapping[str, Any]], row: int) -> tuple[list[int], int]:
    """Return the experts of a layer without tokens in the newest records, and since which iteration none had one."""
    newest = routing[-1]["tokens_per_expert"][row]
    idle, since, records = {expert for expert, tokens in enumerate(newest) if not tokens}, 0, 0
    for each in reversed(routing):
        layers = each["tokens_per_expert"]
        if row >= len(layers) or len(layers[row]) != len(newest):
            break  # resumed with another model
        still = {expert for expert in idle if not layers[row][expert]}
        if records >= _IDLE_RECORDS and still != idle:
            break
        idle, since, records = still, each["iteration"], records + 1
    return (sorted(idle), since) if records >= _IDLE_RECORDS else ([], since)


def _experts_with_half(tokens: Sequence[float]) -> list[int]:
    """Return the fewest experts that receive half of the tokens; none if there are no tokens."""
    left, found = sum(tokens) / 2, []
    for expert in sorted(range(len(tokens)), key=lambda each: -tokens[each]):
        if left <= 0:
            break
        found.append(expert)
        left -= tokens[expert]
    return sorted(found)


def _name_numbers(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, three or more in a row as a range: 2, 8-15."""
    rows = group_consecutive(numbers)
    names = [f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    rest = sum(map(len, rows[_MAX_NAMED:]))
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest else "")


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
    if isinstance(vocab_size, int) and vocab_size > 1 and after:
        guess, now = math.log(vocab_size), median(after[-_WINDOW:]) if len(after) >= _FEW else after[-1]
        margin = _ABOVE_GUESS if len(after) >= _WINDOW else 1.0 if len(after) >= _FEW else guess
        if now > guess + margin:
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
        half = len(values) // 2
        if not half:
            continue
        # of the first half: where a run diverges at once its first values are the only good ones
        earlier = min(median(values[: min(_FEW, half)]), median(values[:half]))
        now = median(values[-min(_WINDOW, half) :])
        if earlier > 0 and now > factor * earlier and now - earlier > 1.0:
            times = f"{now / earlier:.0f}" if now < 1e4 * earlier else f"{now / earlier:.1e}"
            text = f"the {words} is {now:.4g}, {times} times that of earlier iterations ({earlier:.4g})"
            found.append(_loss_finding("bad", text))
    return found


def unusual_learning_rate(settings: Mapping[str, Any], parameters: int, only_high: bool = False) -> str | None:
    """Return how far a learning rate is from a power law through those of GPT-3 (arXiv 2005.14165, table 2.1).

    Args:
        settings: every flag, by name.
        parameters: active ones; 0 if unknown.
        only_high: a low rate is not mentioned.

    Returns:
        A text; None for a usual rate, and for models that Adam does not pretrain: they use other rates.
    """
    rate = settings.get("lr")
    others = ("use_mup", "finetune", "sft", "init_from", "lora_dim", "freeze_all_layers")
    if settings.get("optimizer") != "adam" or any(settings.get(name) for name in others):
        return None
    if not isinstance(rate, int | float) or rate <= 0 or parameters <= 0:
        return None
    usual = 6e-4 * (parameters / 125e6) ** -0.3
    if rate < _HIGH_RATE * usual and (only_high or rate > usual / _LOW_RATE):
        return None
    ratio = max(rate / usual, usual / rate)
    number = f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.0e}"
    times = f"{number} times" if rate > usual else f"a {number}th of"
    return (
        f"the learning rate {rate:g} is {times} what models of {parameters / 1e6:,.3g} million active parameters use "
        f"with Adam (about {usual:.1g})"
    )

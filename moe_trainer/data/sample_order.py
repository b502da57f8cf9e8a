"""The order of training samples in a resumed run: kept where it can be, otherwise what is read twice or never.

All epochs that a run reads are shuffled at its start (index_build.py), so their order depends on how many there are. As
in Megatron-LM, a run that is started with another length has another order from its first sample on; consumed samples
would then be skipped in an order in which they were not read. So a checkpoint records how many samples of each token
file its run asked for. A resumed run asks for the same, and if that does not suffice, further epochs follow that are
shuffled on their own. The shuffle of --dataloader-type cyclic depends on the data-parallel ranks and is kept likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_trainer.data.combined import BlendedDataset, ContinuedDataset, PhasedDataset
from moe_trainer.data.dataset import GPTDataset, SampleSource
from moe_trainer.data.loader import Cycle

Shuffled = GPTDataset | ContinuedDataset
Order = dict[str, str]
"""{first sample of a phase: a line for every token file: what its order depends on, and the samples asked for}."""
_CYCLE = "cycle"
"""Name of an entry with the numbers of a Cycle."""


def describe_order(dataset: SampleSource | PhasedDataset, cycle: Cycle | None) -> Order:
    """Return the order of the samples of a dataset.

    Args:
        dataset: of the training samples.
        cycle: how the loader shuffles; None if it does not.
    """
    order = {
        str(start): "\n".join(_describe(part) for part, _ in _parts(phase, 0)) for start, phase in _phases(dataset)
    }
    return order if cycle is None else {**order, _CYCLE: " ".join(map(str, cycle))}


def keep_cycle(saved: Mapping[str, str], cycle: Cycle) -> Cycle:
    """Return how the loader of the run of a checkpoint shuffled, if the dataset has as many samples; else `cycle`."""
    words = saved.get(_CYCLE, "").split()
    before = Cycle(*map(int, words)) if len(words) == len(cycle) and all(map(str.isdecimal, words)) else cycle
    return before if before.total == cycle.total and before.length else cycle


def _describe(part: Shuffled) -> str:
    return f"{part.order}: {' '.join(map(str, part.requests))}"


def keep_order(dataset: GPTDataset, line: str, make: Callable[[int, int], GPTDataset]) -> Shuffled:
    """Return a dataset in the order in which the run of a checkpoint read it, with at least as many samples.

    Args:
        dataset: as a run without a checkpoint reads it.
        line: of `describe_order`.
        make: makes a dataset of a number of samples; its second argument counts the datasets of a run.
    """
    order, _, requests = line.rpartition(": ")
    if dataset.requests[0] is None or order != dataset.order or not requests.replace(" ", "").isdecimal():
        return dataset
    parts = [make(int(text), number) for number, text in enumerate(requests.split())]
    missing = dataset.requests[0] - sum(map(len, parts))
    if missing > 0:
        parts.append(make(missing, len(parts)))
    if len(parts) > 1:
        return ContinuedDataset(parts)
    return dataset if parts[0].plan == dataset.plan else parts[0]


def compare_orders(
    saved: Mapping[str, str], dataset: SampleSource | PhasedDataset, consumed: int, cycle: Cycle | None
) -> str | None:
    """Return a warning if the samples after those consumed are in another order than they were; None if not.

    Args:
        saved: what `describe_order` returned for the run that consumed them; empty if it is not known.
        dataset: of the training samples.
        consumed: samples.
        cycle: see `describe_order`.
    """
    start, phase = max((each for each in _phases(dataset) if each[0] <= consumed), key=lambda each: each[0])
    if str(start) not in saved:
        return None
    order, length = describe_order(dataset, cycle), len(dataset) if cycle is None else cycle.length
    if saved.get(_CYCLE) != order.get(_CYCLE):
        changes = [(_describe_loader(saved), _describe_loader(order))]
        count = _expect_misread((consumed - start) % length, length)
    else:
        lines, parts = saved[str(start)].split("\n"), list(_parts(phase, consumed - start))
        if len(lines) != len(parts):
            return None  # other data
        others = [(line.rpartition(": ")[0], *each) for line, each in zip(lines, parts)]
        others = [each for each in others if each[0] != each[1].order]
        changes = [(was, part.order) for was, part, _ in others]
        count = sum(_count_misread(part, number) for _, part, number in others)
    if not count:
        return None
    was, is_now = changes[0]
    more = f", and {len(changes) - 1} other parts" if len(changes) > 1 else ""
    return (
        f"the order of the samples is not that of the checkpoint ({was}; now {is_now}{more}): about {count:,} samples "
        "that were read already are read again in this pass over the data, and as many are never read in it, as in "
        "Megatron-LM (docs/data.md)"
    )


def compare_flags(
    saved: Mapping[str, Any], current: Mapping[str, Any], dataset: SampleSource | PhasedDataset, consumed: int
) -> str | None:
    """Return a warning if a checkpoint without an order may be of a run that read in another one; None if not.

    Args:
        saved: flags of that run by destination, and data_parallel_size, as checkpoints have them.
        current: those of this run.
        dataset: of the training samples.
        consumed: samples.
    """
    start, phase = max((each for each in _phases(dataset) if each[0] <= consumed), key=lambda each: each[0])
    if consumed == start:
        return None
    orders = [_order_flags(flags) for flags in (saved, current)]
    requests = [_count_requested(flags) for flags in (saved, current)]
    if _depends_on_length(phase, max(requests) / max(requests[1], 1)):
        for order, count in zip(orders, requests):
            order["samples in all (--train-iters or --train-samples)"] = count
    names = [name for name in {**orders[0], **orders[1]} if orders[0].get(name) != orders[1].get(name)]
    if not names:
        return None
    was, is_now = ([f"{name} {order[name]}" for name in names if name in order] for order in orders)
    return (
        f"the checkpoint does not record the order of its samples, and this run may have another one (it was saved "
        f"with {', '.join(was)}; now {', '.join(is_now)}): samples that were read already may be read again, and as "
        "many never, as in Megatron-LM (docs/data.md)"
    )


def _order_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the order of the samples depends on besides their number, by name."""
    loader = flags.get("dataloader_type") or "single"
    order = {"--seed": flags.get("seed"), "--seq-length": flags.get("seq_length"), "--dataloader-type": loader}
    if loader == "cyclic":
        order["--micro-batch-size"] = flags.get("micro_batch_size")
        order["data-parallel ranks"] = flags.get("data_parallel_size")
    return order


def _count_requested(flags: Mapping[str, Any]) -> int:
    return flags.get("train_samples") or (flags.get("train_iters") or 0) * (flags.get("global_batch_size") or 0)


def _depends_on_length(phase: SampleSource, growth: float) -> bool:
    """Return whether one of the token files is read more than once by a run of `growth` times as many samples."""
    wholes = [
        whole
        for part, _ in _parts(phase, 0)
        for whole in (part.datasets if isinstance(part, ContinuedDataset) else (part,))
    ]
    return any((whole.requests[0] or 0) * growth > len(whole) / whole.plan.epochs for whole in wholes)


def _describe_loader(order: Mapping[str, str]) -> str:
    total, *_ = order.get(_CYCLE, "").split(" ")
    return f"--dataloader-type cyclic over {total} samples" if total else "no --dataloader-type cyclic"


def _phases(dataset: SampleSource | PhasedDataset) -> Iterator[tuple[int, SampleSource]]:
    return dataset.phases() if isinstance(dataset, PhasedDataset) else iter([(0, dataset)])


def _parts(dataset: SampleSource, consumed: int) -> Iterator[tuple[Shuffled, int]]:
    """Yield the datasets that are shuffled, and how many samples of each are among the consumed ones."""
    if isinstance(dataset, Shuffled):
        yield dataset, consumed
    elif isinstance(dataset, BlendedDataset):
        for number, part in enumerate(dataset.datasets):
            yield from _parts(part, int((dataset.index[0][:consumed] == number).sum()))


def _count_misread(part: Shuffled, consumed: int) -> int:
    begin, end = part.shuffled_with(consumed)
    return _expect_misread(consumed - begin, end - begin)


def _expect_misread(consumed: int, total: int) -> int:
    """Return the expected number of consumed samples that are not among as many first ones of another shuffle."""
    return round(consumed * (total - consumed) / total)

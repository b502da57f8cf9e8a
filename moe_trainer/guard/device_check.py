"""A short test of every rank's device, and of the links between them, while a run goes on (`--gpu-sniff-test-interval`).

One matrix product, repeated: its result must be the same to the bit each time, and the same on all devices of one name; its speed must not be
far below that of the others. Then every kind of collective once, each result compared, and the speed of an all-reduce (self_test.py).
It takes a tenth of a second and 100 MB on a GPU. What it finds is told in the log, with rank and host; the run goes on: whether a node is
to be left out is its owner's decision.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from moe_trainer.guard.self_test import try_collectives
from moe_trainer.guard.straggler import sticks_out
from moe_trainer.guard.weight_hash import weight_hash
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

RATIO = 1.1  # products of one kind of device differ less
_COMPARED = 3


@dataclass(frozen=True)
class Finding:
    """What a rank's device did. hashes: of one product, several times; wrong: collectives with a wrong result; gb_s: of an all-reduce."""

    host: str
    device: str
    seconds: float
    hashes: tuple[int, ...]
    wrong: tuple[str, ...]
    gb_s: float


def check_devices(ps: ParallelState, device: torch.device) -> list[str]:
    """Examine all ranks' devices. Collective over ps.world.

    Returns: on every rank the lines for the log, the first with what was measured, the others with what is wrong.
    """
    size, seconds, hashes = try_products(device)
    wrong: list[str] = []
    gb_s = try_collectives(ps.world, device, lambda what: None, wrong.append)[1]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = collectives.all_gather_object(Finding(socket.gethostname(), name, seconds, tuple(hashes), tuple(wrong), gb_s), ps.world)
    speed = 2 * size**3 / median(each.seconds for each in found) / 1e12
    head = f"device check: products at {speed:.3g} TFLOP/s (median of {len(found)} rank{'s' if len(found) > 1 else ''})"
    if ps.world.size > 1:
        head += f", an all-reduce of 8 MB over all at {median(each.gb_s for each in found):.3g} GB/s"
    return [head, *judge(found)]


def try_products(device: torch.device) -> tuple[int, float, list[int]]:
    """Side of the square matrices, seconds of one product, hashes of a few results."""
    cuda = device.type == "cuda"
    size, repeats, dtype = (4096, 50, torch.bfloat16) if cuda else (256, 10, torch.float32)
    # the same numbers on every rank: no generator is touched
    places = torch.arange(size * size, device=device).view(size, size)
    a, b = ((places * step % 1009 / 504.5 - 1.0).to(dtype) for step in (7919, 104729))
    hashes = [int(weight_hash(a @ b)) for _ in range(_COMPARED)]
    begin = time.perf_counter()
    for _ in range(repeats):
        product = a @ b
    if cuda:
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begin) / repeats
    del product
    return size, seconds, hashes


def judge(found: Sequence[Finding]) -> list[str]:
    """A line for everything that is wrong with a rank."""
    lines = []
    usual = {name: Counter(each.hashes[0] for each in found if each.device == name) for name in {each.device for each in found}}
    for rank, each in enumerate(found):
        where = f"device check: rank {rank} ({each.host}, {each.device})"
        (agreed, count), = usual[each.device].most_common(1)
        if len(set(each.hashes)) > 1:
            lines.append(f"{where} gives different results for one product")
        elif each.hashes[0] != agreed and 2 * count > usual[each.device].total():
            lines.append(f"{where} gives another result for a product than {count} other ranks with such a device")
        lines += [f"{where}: {name} gave a wrong result" for name in each.wrong]
        others = [other.seconds for place, other in enumerate(found) if place != rank and other.device == each.device]
        if others and sticks_out(each.seconds, others, RATIO):
            lines.append(f"{where} takes {each.seconds / median(others):.2f} times as long for a product as the others")
    return lines

"""A short test of every rank's device and of the links between them during a run (`--gpu-sniff-test-interval`).

It repeats one GEMM, whose result must be bitwise equal each time and on all devices of the same model, and whose
speed must not be far below the others. Then it runs every kind of collective once and measures the speed of an
all-reduce (self_test.py). On a GPU it takes a tenth of a second and 100 MB. Faults are logged with rank and host, and
the run continues: the user decides about the node.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.resilience.self_test import try_collectives
from moe_trainer.resilience.straggler import is_outlier
from moe_trainer.resilience.weight_hash import weight_hash

MAX_TIME_RATIO = 1.1  # GEMM times of one GPU model differ less than this
_NUM_COMPARED_RESULTS = 3


@dataclass(frozen=True)
class DeviceReport:
    """Results of a rank.

    Attributes:
        device: name of its device.
        seconds: time of one GEMM.
        hashes: of the results of one GEMM, several times.
        wrong: collectives with a wrong result.
        gb_s: speed of an all-reduce.
    """

    host: str
    device: str
    seconds: float
    hashes: tuple[int, ...]
    wrong: tuple[str, ...]
    gb_s: float


def check_devices(ps: ParallelState, device: torch.device) -> list[str]:
    """Test the devices of all ranks. Collective over ps.world.

    Returns:
        Log lines, equal on every rank: the measured speeds, then the faults.
    """
    size, seconds, hashes = run_gemm_check(device)
    wrong: list[str] = []
    gb_s = try_collectives(ps.world, device, lambda what: None, wrong.append)[1]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    reports = collectives.all_gather_object(
        DeviceReport(socket.gethostname(), name, seconds, tuple(hashes), tuple(wrong), gb_s), ps.world
    )
    speed = 2 * size**3 / median(each.seconds for each in reports) / 1e12
    head = (
        f"device check: GEMMs at {speed:.3g} TFLOP/s (median of {len(reports)} rank{'s' if len(reports) > 1 else ''})"
    )
    if ps.world.size > 1:
        head += f", an all-reduce of 8 MB over all ranks at {median(each.gb_s for each in reports):.3g} GB/s"
    return [head, *find_problems(reports)]


def run_gemm_check(device: torch.device) -> tuple[int, float, list[int]]:
    """Return the side of the square matrices, the seconds of one GEMM, and the hashes of a few results."""
    cuda = device.type == "cuda"
    size, repeats, dtype = (4096, 50, torch.bfloat16) if cuda else (256, 10, torch.float32)
    # equal numbers on every rank, without a random generator
    positions = torch.arange(size * size, device=device).view(size, size)
    a, b = ((positions * step % 1009 / 504.5 - 1.0).to(dtype) for step in (7919, 104729))
    hashes = [int(weight_hash(a @ b)) for _ in range(_NUM_COMPARED_RESULTS)]
    begin = time.perf_counter()
    for _ in range(repeats):
        result = a @ b
    if cuda:
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begin) / repeats
    del result
    return size, seconds, hashes


def find_problems(reports: Sequence[DeviceReport]) -> list[str]:
    lines = []
    for rank, each in enumerate(reports):
        peers = [other for other in reports if other.device == each.device]
        where = f"device check: rank {rank} ({each.host}, {each.device})"
        ((majority, count),) = Counter(peer.hashes[0] for peer in peers).most_common(1)
        if len(set(each.hashes)) > 1:
            lines.append(f"{where} gives different results for the same GEMM")
        elif each.hashes[0] != majority and 2 * count > len(peers):
            lines.append(f"{where}: GEMM result differs from that of {count} other ranks with the same device model")
        lines += [f"{where}: {name} gave a wrong result" for name in each.wrong]
        others = [peer.seconds for peer in peers if peer is not each]
        if others and is_outlier(each.seconds, others, MAX_TIME_RATIO):
            lines.append(f"{where}: GEMM takes {each.seconds / median(others):.2f} times as long as on the others")
    return lines

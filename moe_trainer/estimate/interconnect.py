"""How long communication takes: which link a group of ranks uses, and what an exchange of tokens sends over it. Seconds and bytes.

Ranks stand next to each other in the order of the grid (parallel/grid.py), so a group that varies along an axis lies `stride` ranks
apart and spans stride x size ranks. What fits into a domain of NVLink uses NVLink; else every member sends over its own network adapter,
and a ring over several members of one domain uses the adapters of all of them.

Exchange of tokens. An all-to-all sends a row once for every expert. DeepEP and HybridEP send it once to every domain that has one of its
experts, over the network, and spread it there over NVLink; with group-limited routing it reaches fewer domains. Domains are hit as if
experts were chosen evenly. The fractions of the links' peaks below follow from measured times of both (arXiv 2603.07685, table 7:
hidden 7168, 4096 tokens, 256 experts, on H100 and GB200, with 8 to 64 ranks); tests/estimate/test_interconnect.py holds the model against them, within 30 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.moe import MoEArgs
    from moe_trainer.estimate.hardware import Hardware

NETWORK = 0.87
"""Of the adapter's peak: all-to-all over 16 to 64 H100 moves 41 to 45 of 50 GB/s."""
NVLINK = 0.75
"""Of NVLink's peak, by kernels of DeepEP and HybridEP: 650 to 690 of 900 GB/s on GB200, 410 of 450 on H100; and by NCCL's rings."""
NVLINK_ALL_TO_ALL = 0.62
"""The same by NCCL's all-to-all: 500 to 560 of 900 GB/s, 325 of 450."""
DEEPEP_WIDE = 2.0
"""Times as long as HybridEP's takes DeepEP's exchange where NVLink joins more than the 8 ranks it was made for: of 256 GB200, DeepSeek-V3 went
from 830 to 944 TFLOP/s when one took the place of the other, 0.6 ms for each of 1,900 exchanges (Megatron-LM, branch dev, discussion)."""


@dataclass(frozen=True)
class Interconnect:
    """What ranks of one machine reach each other by."""

    hardware: Hardware

    def bandwidth(self, stride: int, size: int) -> float:
        """Bytes/s of each rank in a ring over `size` ranks that lie `stride` apart."""
        hardware, reached = self.hardware, self.hardware.constants.links
        nvlink = hardware.nvlink_gb_s * 1e9 * NVLINK * reached
        if stride * size <= hardware.domain:
            return nvlink
        together = max(1, min(size, hardware.domain // stride))
        return min(nvlink, hardware.network_gb_s * 1e9 * NETWORK * reached * together)

    def ring(self, num_bytes: float, stride: int, size: int) -> float:
        """Seconds of an all-gather or reduce-scatter of so many bytes in all."""
        return (
            0.0
            if size == 1
            else num_bytes * (size - 1) / size / self.bandwidth(stride, size) + self.hardware.constants.latency
        )

    def message(self, num_bytes: float, stride: int) -> float:
        """Seconds of one message to a rank `stride` further."""
        return num_bytes / self.bandwidth(stride, 2) + self.hardware.constants.latency


def expected_distinct(places: float, draws: float) -> float:
    """How many of so many places are hit by so many even draws, on average."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws) if places > 1 else 1.0


def expected_domains(domains: int, topk: float, groups: int | None, group_topk: int | None) -> float:
    """Domains among which a token's experts lie, on average; groups of experts stand in order over the domains."""
    if domains == 1:
        return 1.0
    if not groups or not group_topk or group_topk >= groups:
        return expected_distinct(domains, topk)
    if groups >= domains:
        per = groups // domains
        missed = (
            math.comb(groups - per, group_topk) / math.comb(groups, group_topk) if groups - per >= group_topk else 0.0
        )
        return domains * (1.0 - missed)
    return group_topk * expected_distinct(domains / groups, topk / group_topk)


def processed_load(moe: MoEArgs, load: float = 1.0) -> float:
    """Rows that an expert gets, as a multiple of an even share, when the routing sends it `load` times as many: tokens beyond its capacity
    are dropped, and it may be filled up to it."""
    capacity = moe.moe_expert_capacity_factor
    if capacity is None or capacity < 0:
        return load
    return capacity if moe.moe_pad_expert_input_to_capacity else min(load, capacity)


def dispatch_combine_seconds(args: Arguments, links: Interconnect, tokens: float, size: int) -> float:
    """There and back. Rows that come back by all-to-all are as wide as what an expert makes; other ways carry whole ones."""
    reads, makes = args.moe.expert_widths(args.model.hidden_size)
    back = makes if args.moe.moe_token_dispatcher_type == "alltoall" else reads
    return sum(exchange_seconds(args, links, tokens, size, width) for width in (reads, back))


def exchange_seconds(args: Arguments, links: Interconnect, tokens: float, size: int, width: int | None = None) -> float:
    """One way of the exchange of `tokens` rows of a rank among the expert ranks: dispatch or combine. size: bytes of an element; width: of a
    row, None for what an expert reads."""
    moe, hardware = args.moe, links.hardware
    ep, etp = args.parallel.expert_model_parallel_size, args.parallel.expert_tensor_parallel_size or 1
    row, topk = (
        (width or moe.expert_widths(args.model.hidden_size)[0]) * size,
        moe.moe_router_topk * processed_load(moe),
    )
    reached, latency = hardware.constants.links, hardware.constants.latency
    nvlink, network = hardware.nvlink_gb_s * 1e9 * reached, hardware.network_gb_s * 1e9 * NETWORK * reached
    seconds = 0.0
    if ep > 1:
        domains = max(1, ep * etp // hardware.domain)
        inside = (domains - 1) / domains
        if moe.moe_token_dispatcher_type == "allgather":
            return links.ring(tokens * row * ep * etp, 1, ep * etp)
        if moe.moe_token_dispatcher_type == "flex":
            hit = expected_domains(domains, topk, moe.moe_router_num_groups, moe.moe_router_group_topk)
            across = tokens * row * hit * inside / network
            spread = tokens * row * expected_distinct(ep, topk) * (1 - 1 / min(ep, hardware.domain)) / (nvlink * NVLINK)
            wide = moe.moe_flex_dispatcher_backend == "deepep" and min(ep, hardware.domain) > 8
            seconds = (DEEPEP_WIDE if wide else 1.0) * max(across, spread) + latency
        else:
            across = tokens * row * topk * inside / network
            within = (
                tokens * row * topk * (1 - inside) * (1 - 1 / min(ep, hardware.domain)) / (nvlink * NVLINK_ALL_TO_ALL)
            )
            seconds = max(across, within) + latency
    if etp > 1:
        seconds += links.ring(tokens * topk * row * etp, 1, etp)
    return seconds

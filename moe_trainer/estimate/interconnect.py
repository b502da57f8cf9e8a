"""Seconds of communication: which link a group of ranks uses, and what a token exchange sends over it.

Ranks are ordered by the grid (parallel/grid.py), so the ranks of a group that varies along an axis are `stride` apart
and span stride x size ranks. A group inside an NVLink domain uses NVLink; otherwise every member sends over its own
network adapter, and a ring over several members of one domain uses the adapters of all of them.

Token exchange: what a dispatcher sends over which link is in its declaration (arguments/mechanisms/traffic.py). Experts
are assumed to be chosen evenly; with group-limited routing a token reaches fewer domains. The fractions of the links'
peaks below follow from measured times of all-to-all and HybridEP (arXiv 2603.07685, table 7: hidden 7168, 4096 tokens,
256 experts, on H100 and GB200, with 8 to 64 ranks); tests/estimate/test_interconnect.py compares the model with them,
within 30 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.mechanisms.dispatchers import ALLTOALL, get_dispatcher
from arguments.mechanisms.formats import TRANSPORT
from arguments.mechanisms.traffic import ExchangedTokens, Traffic

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.moe import MoEArgs
    from moe_trainer.estimate.hardware import Hardware

NETWORK = 0.87
"""Fraction of the adapter's peak: all-to-all over 16 to 64 H100 moves 41 to 45 of 50 GB/s."""
NVLINK = 0.75
"""Fraction of NVLink's peak that kernels of DeepEP and HybridEP and NCCL's rings reach.

650 to 690 of 900 GB/s on GB200, 410 of 450 on H100.
"""
NVLINK_ALL_TO_ALL = 0.62
"""Fraction of NVLink's peak that NCCL's all-to-all reaches: 500 to 560 of 900 GB/s, 325 of 450."""


@dataclass(frozen=True)
class Interconnect:
    """The links of one machine."""

    hardware: Hardware

    def bandwidth(self, stride: int, size: int) -> float:
        """Return the bytes/s of each rank in a ring over `size` ranks that are `stride` apart."""
        hardware, reached = self.hardware, self.hardware.constants.links
        nvlink = hardware.nvlink_gb_s * 1e9 * NVLINK * reached
        if stride * size <= hardware.domain:
            return nvlink
        together = max(1, min(size, hardware.domain // stride))
        return min(nvlink, hardware.network_gb_s * 1e9 * NETWORK * reached * together)

    def ring(self, num_bytes: float, stride: int, size: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `num_bytes` in total."""
        if size == 1:
            return 0.0
        return num_bytes * (size - 1) / size / self.bandwidth(stride, size) + self.hardware.constants.latency

    def traffic_seconds(self, traffic: Traffic) -> float:
        """Return the seconds of an exchange without its rings."""
        hardware, reached = self.hardware, self.hardware.constants.links
        across = traffic.network / (hardware.network_gb_s * 1e9 * NETWORK * reached)
        nvlink = hardware.nvlink_gb_s * 1e9 * reached * (NVLINK_ALL_TO_ALL if traffic.by_nccl else NVLINK)
        inside, latency = traffic.nvlink / nvlink, hardware.constants.latency
        if traffic.is_sequential:
            return across + inside + 2 * latency
        return traffic.slowdown * max(across, inside) + latency

    def message(self, num_bytes: float, stride: int) -> float:
        """Return the seconds of a message to the rank at distance `stride`."""
        return num_bytes / self.bandwidth(stride, 2) + self.hardware.constants.latency


def expected_distinct(places: float, draws: float) -> float:
    """Return the mean number of distinct places that even draws hit."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws) if places > 1 else 1.0


def expected_domains(domains: int, topk: float, groups: int | None, group_topk: int | None) -> float:
    """Return the mean number of domains of a token's experts; groups of experts are ordered over the domains."""
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
    """Return the tokens that an expert processes if `load` are routed to it, as multiples of an even share.

    Tokens beyond its capacity are dropped, and it may be padded to its capacity.
    """
    capacity = moe.moe_expert_capacity_factor
    if capacity is None or capacity < 0:
        return load
    return capacity if moe.moe_pad_expert_input_to_capacity else min(load, capacity)


def dispatch_combine_seconds(
    args: Arguments, links: Interconnect, tokens: float, size: int, backward: bool = False
) -> float:
    """Return the seconds of dispatch and combine, or of their gradients.

    Dispatchers that send copies return rows as wide as the output of an expert; the others return full rows. What goes
    to the experts may be sent rounded.
    """
    moe = args.moe
    reads, makes = moe.expert_widths(args.model.hidden_size)
    back = makes if get_dispatcher(moe).sends_copies else reads
    there: float = size
    if (moe.moe_combine_bwd_dtype if backward else moe.moe_dispatch_fwd_dtype) == TRANSPORT.key:
        there = TRANSPORT.copy_bytes
    sizes = (size, there) if backward else (there, size)
    return sum(exchange_seconds(args, links, tokens, each, width) for each, width in zip(sizes, (reads, back)))


def exchange_seconds(
    args: Arguments, links: Interconnect, tokens: float, size: float, width: int | None = None
) -> float:
    """Return the seconds of the dispatch or combine of a rank's `tokens` among the expert ranks.

    `size`: bytes of an element. `width`: of a row, by default that of an expert's input.
    """
    moe, hardware = args.moe, links.hardware
    ep, etp = args.parallel.expert_model_parallel_size, args.parallel.expert_tensor_parallel_size or 1
    row = (width or moe.expert_widths(args.model.hidden_size)[0]) * size
    topk = moe.moe_router_topk * processed_load(moe)
    seconds, copies = 0.0, topk
    if ep > 1:
        dispatcher, domain = get_dispatcher(moe), hardware.domain
        if dispatcher.groups_by_domain:
            domain = moe.moe_hierarchical_domain_size or domain
        domains = max(1, ep * etp // domain)
        if dispatcher.groups_by_domain and domains == 1:
            dispatcher, domain = ALLTOALL, hardware.domain
        hit_domains = expected_domains(domains, topk, moe.moe_router_num_groups, moe.moe_router_group_topk)
        hit_ranks = expected_distinct(ep, topk)
        traffic = dispatcher.traffic(
            ExchangedTokens(tokens * row, topk, ep, etp, domain, domains, hit_ranks, hit_domains)
        )
        if traffic.gathered:
            return links.ring(traffic.gathered, 1, ep * etp)
        seconds, copies = links.traffic_seconds(traffic), traffic.copies
    if etp > 1:
        seconds += links.ring(tokens * copies * row * etp, 1, etp)
    return seconds

"""Seconds of communication: which link a group of ranks uses, and what a token exchange sends over it.

Ranks are ordered by the grid (parallel/grid.py), so the ranks of a group that varies along an axis are `stride` apart
and span stride x size ranks. A group inside an NVLink domain uses NVLink; otherwise every member sends over its own
network adapter, and a ring over several members of one domain uses the adapters of all of them.

Token exchange: an all-to-all sends a token once for every expert. DeepEP and HybridEP send it over the network once to
every domain that has one of its experts, and distribute it there over NVLink; with group-limited routing it reaches
fewer domains. Hierarchical dispatch sends as many rows by two all-to-alls, one after the other. Experts are assumed to
be chosen evenly. The fractions of the links' peaks below follow from measured times of all-to-all and HybridEP (arXiv
2603.07685, table 7: hidden 7168, 4096 tokens, 256 experts, on H100 and GB200, with 8 to 64 ranks);
tests/estimate/test_interconnect.py compares the model with them, within 30 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_trainer.estimate.state_bytes import ELEMENT_BYTES

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
DEEPEP_WIDE = 2.0
"""Time of DeepEP's exchange over HybridEP's, where NVLink connects more than the 8 ranks that DeepEP was made for.

On 256 GB200, DeepSeek-V3 went from 830 to 944 TFLOP/s when HybridEP replaced DeepEP, 0.6 ms for each of 1,900 exchanges
(Megatron-LM, branch dev, discussion).
"""


def dispatcher_name(moe: MoEArgs) -> str:
    """Return the token dispatcher, by its backend if it is flex."""
    return moe.moe_flex_dispatcher_backend if moe.moe_token_dispatcher_type == "flex" else moe.moe_token_dispatcher_type


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

    An all-to-all returns rows as wide as the output of an expert; the other dispatchers return full rows. What goes to
    the experts may be sent in MXFP8.
    """
    moe = args.moe
    reads, makes = moe.expert_widths(args.model.hidden_size)
    back = makes if moe.moe_token_dispatcher_type == "alltoall" else reads
    there: float = size
    if (moe.moe_combine_bwd_dtype if backward else moe.moe_dispatch_fwd_dtype) == "mxfp8":
        there = ELEMENT_BYTES["mxfp8"]
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
    reached, latency = hardware.constants.links, hardware.constants.latency
    nvlink, network = hardware.nvlink_gb_s * 1e9 * reached, hardware.network_gb_s * 1e9 * NETWORK * reached
    seconds, copies = 0.0, topk
    if ep > 1:
        hierarchical = moe.uses_hierarchical_dispatch
        per_domain = (moe.moe_hierarchical_domain_size if hierarchical else None) or hardware.domain
        domains = max(1, ep * etp // per_domain)
        outside = (domains - 1) / domains
        if moe.moe_token_dispatcher_type == "allgather":
            return links.ring(tokens * row * ep * etp, 1, ep * etp)
        if moe.moe_token_dispatcher_type == "flex" and not (hierarchical and domains == 1):
            hit = expected_domains(domains, topk, moe.moe_router_num_groups, moe.moe_router_group_topk)
            across = tokens * row * hit * outside / network
            spread = tokens * row * expected_distinct(ep, topk) * (1 - 1 / min(ep, per_domain)) / nvlink
            wide = moe.moe_flex_dispatcher_backend == "deepep" and min(ep, per_domain) > 8
            if hierarchical:
                seconds, copies = across + spread / NVLINK_ALL_TO_ALL + 2 * latency, expected_distinct(ep, topk)
            else:
                seconds = (DEEPEP_WIDE if wide else 1.0) * max(across, spread / NVLINK) + latency
        else:
            across = tokens * row * topk * outside / network
            within = (
                tokens * row * topk * (1 - outside) * (1 - 1 / min(ep, hardware.domain)) / (nvlink * NVLINK_ALL_TO_ALL)
            )
            seconds = max(across, within) + latency
    if etp > 1:
        seconds += links.ring(tokens * copies * row * etp, 1, etp)
    return seconds

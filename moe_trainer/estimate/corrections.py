"""What the time model gets wrong by kind of run: factors of the time of all passes, fitted to published runs.

layer_time.py counts GEMMs, traffic, launches and messages. What it leaves out biases all runs that have it in common:
experts that are quantized, multiplied and activated by one fused kernel, which software has since summer 2026; tensor
cores that keep a higher clock; the scaling of operands of narrow experts in 8 bits; a host that launches layers whose
exchange is overlapped. Each such kind has a strength for a command line (CORRECTIONS), and its factor is exp(strength *
FACTORS[kind]).

The factors are those with the smallest sum of absolute logarithms of published over predicted time, over the runs of
spring 2026 and the fitted ones of summer. Runs of one model, machine, format and software count as one, those of summer
as two (PublishedRun.weight). A kind whose runs weigh w is corrected by w / (w + 1) of what they say, since few runs say
little. `scripts/plan.py calibrate` repeats the fit and a test compares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from arguments.mechanisms.dispatchers import get_dispatcher

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware

NARROW = 2048
"""Channels of an expert below which 8 bits are worth less than the time model says."""
NARROWEST = 768
"""Channels of the narrowest experts in 8 bits that a fitted run has; the correction grows no more below them."""
MANY_EXPERTS = 64


def is_fused_iteration(args: Arguments) -> bool:
    """Whether experts are one fused kernel in a graph of the full iteration, as in software from summer 2026 on."""
    return args.model.use_transformer_engine_op_fuser and args.training.cuda_graph_impl == "full_iteration"


def exchanges_slowly(args: Arguments) -> bool:
    """Whether the tokens of many experts are exchanged by a dispatcher that these slow down: NCCL's all-to-all."""
    is_slow = get_dispatcher(args.moe).slows_with_experts and args.parallel.expert_model_parallel_size > 1
    return is_slow and args.moe.expert_count > MANY_EXPERTS


def launches_overlapped_attention(args: Arguments) -> bool:
    """Whether the host launches the attention of layers whose exchange is overlapped, in a pipeline."""
    is_captured = not {"attn", "layer", "iteration"}.isdisjoint(args.training.captured_modules)
    parallel = args.parallel
    return parallel.overlap_moe_expert_parallel_comm and parallel.pipeline_model_parallel_size > 1 and not is_captured


def has_narrower_experts(args: Arguments, hardware: Hardware, channels: int = NARROWEST) -> bool:
    """Whether experts whose GEMMs are in 8 bits have fewer channels on a rank, unless one kernel has it all."""
    if not args.moe.num_experts or hardware.gemm_width(args.precision) == "bf16" or is_fused_iteration(args):
        return False
    return _expert_channels(args) < channels


def _expert_channels(args: Arguments) -> float:
    return (args.moe.moe_ffn_hidden_size or args.model.ffn_hidden_size) / args.parallel.etp_size


def _narrowness(args: Arguments, hardware: Hardware) -> float:
    """Return how much narrower than NARROW the experts are, down to NARROWEST."""
    if not has_narrower_experts(args, hardware, NARROW):
        return 0.0
    return NARROW / max(NARROWEST, _expert_channels(args)) - 1


Strength = Callable[["Arguments", "Hardware"], float]

CORRECTIONS: Mapping[str, Strength] = MappingProxyType(
    {
        "fused experts in a graph of the full iteration": lambda args, hardware: is_fused_iteration(args),
        "Blackwell": lambda args, hardware: hardware.is_blackwell and not hardware.is_blackwell_ultra,
        "Blackwell Ultra": lambda args, hardware: hardware.is_blackwell_ultra,
        "narrow experts in 8 bits": _narrowness,
        "NCCL's all-to-all among more than 64 experts": lambda args, hardware: exchanges_slowly(args),
        "overlapped exchange of layers that the host launches": (
            lambda args, hardware: launches_overlapped_attention(args)
        ),
    }
)
"""Kind -> its strength."""
FACTORS = MappingProxyType(
    {
        "fused experts in a graph of the full iteration": -0.133,
        "Blackwell": 0.089,
        "Blackwell Ultra": -0.026,
        "narrow experts in 8 bits": 0.089,
        "NCCL's all-to-all among more than 64 experts": 0.138,
        "overlapped exchange of layers that the host launches": 0.179,
    }
)
"""Logarithms of the factors."""


@dataclass(frozen=True)
class Bias:
    """A published run: the logarithm of the factor that its passes need, and the strengths of its kinds.

    `series`: runs that count as one, `weight` of all of them.
    """

    series: str
    needed: float
    strengths: Mapping[str, float]
    weight: float = 1.0


def strengths(args: Arguments, hardware: Hardware) -> dict[str, float]:
    """Return the kinds of a command line that have any strength."""
    found = {name: float(strength(args, hardware)) for name, strength in CORRECTIONS.items()}
    return {name: value for name, value in found.items() if value}


def correction(args: Arguments, hardware: Hardware) -> float:
    """Return the factor of the time of all passes: 1 with constants of own runs, and on a CPU, which no run has."""
    if hardware.calibration or hardware.synchronous:
        return 1.0
    return math.exp(sum(FACTORS[name] * value for name, value in strengths(args, hardware).items()))


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the median of (value, weight) pairs."""
    ordered, half, seen = sorted(values), sum(weight for _, weight in values) / 2, 0.0
    for value, weight in ordered:
        seen += weight
        if seen >= half:
            return value
    return ordered[-1][0]


def fit_factors(runs: Sequence[Bias], sweeps: int = 200) -> dict[str, float]:
    """Return the logarithms of factors with the smallest sum of absolute errors, by coordinate descent, shrunk."""
    sizes = Counter(run.series for run in runs)
    factors = dict.fromkeys(CORRECTIONS, 0.0)
    for _ in range(sweeps):
        before = dict(factors)
        for name in factors:
            own = [
                (
                    (
                        run.needed
                        - sum(factors[other] * value for other, value in run.strengths.items() if other != name)
                    )
                    / run.strengths[name],
                    run.weight * run.strengths[name] / sizes[run.series],
                )
                for run in runs
                if name in run.strengths
            ]
            factors[name] = weighted_median(own) if own else 0.0
        if before == factors:
            break
    series = {name: {run.series: run.weight for run in runs if name in run.strengths} for name in factors}
    weights = {name: sum(each.values()) for name, each in series.items()}
    return {name: value * weights[name] / (weights[name] + 1) for name, value in factors.items()}

"""How far a mapping is from those of published runs: a time model is as good as what it was compared with.

A mapping is the sizes of the parallel dimensions, the dispatcher, whether its exchange is overlapped, and whether the
pipeline is interleaved. Only runs on machines of the same kind count: NVLink among 8 devices, or among a rack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.rules.layout_grammar import read_layout
from arguments.stage_layout import chunk_layouts
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.holdout_runs import HOLDOUT_RUNS
from moe_trainer.estimate.published_runs import PUBLISHED_RUNS, PublishedRun
from moe_trainer.estimate.recipe_runs import RECIPE_RUNS

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware


@dataclass(frozen=True)
class TriedMapping:
    """A mapping; `domain`: devices that NVLink joins."""

    domain: int
    sizes: tuple[int, ...]
    dispatcher: str
    is_overlapped: bool
    is_interleaved: bool

    def steps_from(self, other: TriedMapping) -> float:
        """Return the doublings of sizes that lead to another mapping of this kind of machine, one for each choice."""
        if self.domain != other.domain:
            return math.inf
        doublings = sum(abs(math.log2(mine / theirs)) for mine, theirs in zip(self.sizes, other.sizes))
        choices = (
            self.dispatcher != other.dispatcher,
            self.is_overlapped != other.is_overlapped,
            self.is_interleaved != other.is_interleaved,
        )
        return doublings + sum(choices)


def mapping_of(args: Arguments, hardware: Hardware) -> TriedMapping:
    """Return the mapping of a command line."""
    parallel = args.parallel
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.context_parallel_size,
        parallel.etp_size,
    )
    dispatcher = get_dispatcher(args.moe).key if parallel.expert_model_parallel_size > 1 else ""
    is_interleaved = len(chunk_layouts(args.model, parallel)[0]) > 1
    return TriedMapping(hardware.domain, sizes, dispatcher, parallel.overlap_moe_expert_parallel_comm, is_interleaved)


def _mapping_of_run(run: PublishedRun) -> TriedMapping:
    words = run.flags.split()
    is_interleaved = any("virtual" in word for word in words)
    if "--pipeline-model-parallel-layout" in words:
        layout = read_layout(words[words.index("--pipeline-model-parallel-layout") + 1])
        is_interleaved = (layout.virtual_stages(run.pp) or 1) > 1
    sizes = (run.tp, run.pp, run.ep, run.cp, run.etp)
    return TriedMapping(
        find_hardware(run.hardware).domain, sizes, run.dispatcher, "--overlap-moe-expert" in run.flags, is_interleaved
    )


TRIED_MAPPINGS = frozenset(map(_mapping_of_run, (*PUBLISHED_RUNS, *HOLDOUT_RUNS, *RECIPE_RUNS)))
"""The mappings of all published runs."""


def steps_from_tried(args: Arguments, hardware: Hardware) -> float:
    """Return the steps to the nearest mapping of a published run; infinite if no machine of this kind has one."""
    mapping = mapping_of(args, hardware)
    return min(mapping.steps_from(tried) for tried in TRIED_MAPPINGS)

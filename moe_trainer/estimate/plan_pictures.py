"""Pictures of a plan, from the numbers that its text prints: memory of stages, one step, the pipeline's timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from moe_trainer.drawing.pipeline_timeline import Span, Work, idle_share, pipeline_timeline
from moe_trainer.drawing.report_page import Figure
from moe_trainer.drawing.stacked_bars import Bar, Series, shares_bar, stacked_bars
from moe_trainer.drawing.svg import BLUE, BROWN, GRAY, GREEN, ORANGE, PURPLE, SLATE, TEAL, YELLOW
from moe_trainer.estimate.hardware import GIB, RESERVED_BYTES
from moe_trainer.estimate.memory import stage_orders, steady_state_microbatches
from moe_trainer.estimate.plan import Plan
from moe_trainer.estimate.step_time import PARTS, plan_actions
from moe_trainer.estimate.uncertainty import error_bar
from moe_trainer.pipeline.simulate import Action, ActionCosts, Order, simulate_schedule, step_actions

if TYPE_CHECKING:
    from arguments import Arguments

MEMORY = (
    Series("weights", BLUE),
    Series("gradients", TEAL),
    Series("optimizer", GREEN),
    Series("activations", ORANGE),
    Series("dispatch buffers", PURPLE),
    Series("working memory", GRAY),
)
STEP_COLORS = MappingProxyType(
    {
        "compute": BLUE,
        "exchange": PURPLE,
        "tensor": TEAL,
        "context": YELLOW,
        "pipeline": BROWN,
        "data": ORANGE,
        "bubble": GRAY,
        "optimizer": GREEN,
        "host": SLATE,
    }
)
MAX_MICROBATCHES, MAX_STEPS = 48, 3000
"""Microbatches, and forwards of all stages, that a timeline shows; the steady state repeats."""


def plan_figures(plan: Plan) -> Iterator[Figure]:
    """Yield the pictures of a plan."""
    yield Figure(
        "Memory", memory_picture(plan), "A rank of each pipeline stage at its peak. Point at a part for its size."
    )
    yield Figure("One iteration", step_picture(plan), "Seconds of the busiest pipeline stage by cause.")
    if plan.args.parallel.pipeline_model_parallel_size > 1:
        caption = "Numbers are microbatches. The times are those of the plan; in a pair both actions run at once."
        yield Figure("Pipeline", timeline_picture(plan), caption)


def memory_picture(plan: Plan, heading: str | None = None) -> str:
    """Draw what every pipeline stage holds at its peak, against what a device has."""
    usable = plan.hardware.usable_bytes / GIB
    bars = []
    for stage in plan.memory:
        parts = (stage.weights, stage.gradients, stage.optimizer, stage.kept, stage.dispatch, stage.working)
        bars.append(Bar(f"stage {stage.stage}", tuple(size / GIB for size in parts), f"{stage.total / GIB:.1f}"))
    fit = "fits" if plan.margin >= 0 else f"stage {plan.peak.stage} does not fit"
    return stacked_bars(
        "Memory of a plan by pipeline stage",
        heading or f"{plan.world_size:,} x {plan.hardware.name}: GiB of a rank at its peak ({fit})",
        MEMORY,
        bars,
        "GiB",
        usable + RESERVED_BYTES / GIB,
        [(usable, f"{usable:.1f} usable")],
    )


def step_picture(plan: Plan) -> str:
    """Draw the time of one iteration by cause."""
    parts = [
        (text, STEP_COLORS[name], getattr(plan.time, name)) for name, text in PARTS if getattr(plan.time, name) > 0
    ]
    seconds = f"{plan.time.step:.3f} s +- {error_bar(plan).percent}"
    heading = f"One iteration: {seconds}, {plan.tokens_per_second:,.0f} tokens/s/GPU"
    return shares_bar("Time of an iteration by cause", heading, parts, "s")


def timeline_picture(plan: Plan) -> str:
    """Draw the pipeline schedule with the plan's times, and what follows it."""
    args, length = plan.timed
    costs = plan_actions(args, plan.world_size, plan.vocab_rows, plan.hardware, length)
    count, num_chunks = plan.num_microbatches, len(costs.passes[0])
    shown = _shown_microbatches(args, count, len(costs.passes) * num_chunks)

    def exposed(rank: int, actions: tuple[Action, ...]) -> float:
        return costs.of(rank, actions) - costs.spent(rank, actions).compute

    def spans(num_microbatches: int) -> list[list[Span]]:
        return schedule_spans(stage_orders(args, num_microbatches), num_chunks, costs, exposed)

    some = "" if shown == count else f" (drawn: {shown} of {count} microbatches)"
    heading = f"Pipeline schedule: stages are idle {idle_share(spans(count)):.1%} of its time{some}"
    after = (("data", "gradients, parameters"), ("optimizer", "optimizer"), ("host", "between iterations"))
    tail = [(text, getattr(plan.time, name)) for name, text in after if getattr(plan.time, name) > 0]
    return pipeline_timeline("Timeline of the pipeline schedule", heading, spans(shown), tail, "s", 1180)


def _shown_microbatches(args: Arguments, count: int, num_stages: int) -> int:
    """Return how many microbatches to draw: all, else some that reach the steady state, else a group."""
    group = args.parallel.microbatch_group_size_per_vp_stage or args.parallel.pipeline_model_parallel_size
    choices = [count, steady_state_microbatches(args, count), 2 * group]
    return next(
        (each for each in choices if each <= MAX_MICROBATCHES and each * num_stages <= MAX_STEPS), min(count, group)
    )


def schedule_spans(
    orders: Sequence[Order],
    num_chunks: int,
    costs: ActionCosts,
    exposed: Callable[[int, tuple[Action, ...]], float] = lambda rank, actions: 0.0,
) -> list[list[Span]]:
    """Return the steps of every pipeline rank, with their times in `simulate_schedule`.

    Args:
        orders: of all ranks.
        num_chunks: of each rank.
        costs: of the actions.
        exposed: the part of the costs in which a rank only communicates.
    """
    stages = []
    for rank, (order, ends) in enumerate(zip(orders, simulate_schedule(orders, num_chunks, costs), strict=True)):
        spans = []
        for actions in map(step_actions, order):
            end = ends[actions[0]]
            works = tuple(Work(*action) for action in actions)
            spans.append(Span(works, end - costs.of(rank, actions), end, exposed(rank, actions)))
        stages.append(spans)
    return stages

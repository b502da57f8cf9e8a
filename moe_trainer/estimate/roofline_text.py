"""A roofline (roofline.py) as text and as JSON, with the plan of the same flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from moe_trainer.estimate.plan import Plan, closest_reference_run
from moe_trainer.estimate.plan_text import length_lines
from moe_trainer.estimate.roofline import LineCost, RankCosts, Roofline
from moe_trainer.estimate.step_time import PARTS
from moe_trainer.estimate.uncertainty import error_bar

if TYPE_CHECKING:
    from moe_trainer.estimate.step_time import StepTime

LINES = 10
LIMITS = MappingProxyType({"compute": "GEMMs", "memory": "memory", "launch": "launches"})
CLOSE = 0.05
"""Fraction of the plan's step below which differences of two parts are not explained."""


def tflops(plan: Plan, step: float) -> float:
    """Return the TFLOP/s of one GPU if an iteration takes `step` seconds."""
    return plan.flops / step / plan.world_size / 1e12


def roofline_lines(plan: Plan, roofline: Roofline) -> list[str]:
    """Return what scripts/roofline.py prints."""
    time, busiest, bar = roofline.time, roofline.busiest, error_bar(plan)
    lines = [
        "------------------------- roofline -------------------------",
        f"{plan.world_size} x {plan.hardware.name}; executed: pipeline stage{'s' * (len(roofline.stages) > 1)} "
        f"{' '.join(map(str, roofline.stages))} of {plan.args.parallel.pipeline_model_parallel_size}, of "
        f"{plan.num_microbatches} microbatches {roofline.executed}",
        *(f"  {note}" for note in roofline.notes),
        "",
        f"step: {time.step:.3f} s, {tflops(plan, time.step):.1f} TFLOP/s/GPU; the plan says {plan.time.step:.3f} "
        f"s +- {bar.percent}, {plan.tflops:.1f} TFLOP/s/GPU",
        f"  {'':36s} {'here':>9s}   {'plan':>9s}",
        *(
            f"  {text:36s} {getattr(time, name):9.3f} s {getattr(plan.time, name):9.3f} s"
            for name, text in PARTS
            if getattr(time, name) >= 5e-4 or getattr(plan.time, name) >= 5e-4
        ),
        *_published(plan, time),
        *_lengths(plan),
        "",
        f"operators of stage {roofline.stage}, all {plan.num_microbatches} microbatches: {busiest.kernels:,.0f} "
        f"kernels, {busiest.host_waits:,.0f} host synchronizations, {busiest.total:.3f} s",
        *(f"  {_seconds(busiest, limit):9.3f} s limited by {text}" for limit, text in LIMITS.items()),
        f"  they would take {busiest.bound:.3f} s at the peaks of the data sheet without launches",
        "",
        "why the two differ:",
        *(f"  {reason}" for reason in reasons(plan, roofline)),
        "",
        f"the {LINES} most expensive lines of stage {roofline.stage}",
        "    seconds   share  kernels  limited by        GB    TFLOP  line",
        *(_line(place, line, busiest) for place, line in most_expensive(busiest)),
        "------------------------------------------------------------",
    ]
    return lines


def _lengths(plan: Plan) -> list[str]:
    """Return the plan's lines on --length-histogram."""
    lines = length_lines(plan)
    if lines and plan.args.packed_capacity is None:
        lines.append("  the operators below and the step here are those of full sequences")
    return lines


def most_expensive(costs: RankCosts, count: int = LINES) -> list[tuple[str, LineCost]]:
    return sorted(costs.lines.items(), key=lambda item: -item[1].seconds.total())[:count]


def _seconds(costs: RankCosts, limit: str) -> float:
    return sum(line.seconds[limit] for line in costs.lines.values())


def _limit(line: LineCost) -> str:
    """Return what limits most of a line's time."""
    return LIMITS[max(line.seconds, key=line.seconds.__getitem__)]


def _line(place: str, line: LineCost, costs: RankCosts) -> str:
    seconds = line.seconds.total()
    return (
        f"  {seconds:9.3f} {100 * seconds / costs.total:6.1f}% {line.kernels.total():8,.0f}  {_limit(line):10s} "
        f"{line.bytes / 1e9:9,.0f} {line.flops / 1e12:8,.0f}  {place}"
    )


def _published(plan: Plan, time: StepTime) -> list[str]:
    found = closest_reference_run(plan)
    here = tflops(plan, time.step)
    return [
        f"nearest published run: {found.run.name}, {found.run.tflops:.1f} TFLOP/s/GPU ({found.run.source})",
        f"  these flags: planned {plan.tflops:.1f}, by the roofline {here:.1f} TFLOP/s/GPU",
        f"  this run: {'; '.join(found.differs) or 'the same mapping'}",
    ]


def reasons(plan: Plan, roofline: Roofline) -> Iterator[str]:
    """Yield the differences of the step from its plan, largest first."""
    time, costs, constants = roofline.time, roofline.busiest, plan.hardware.constants
    apart = {name: getattr(time, name) - getattr(plan.time, name) for name, _ in PARTS}
    texts = dict(PARTS)
    for name in sorted(apart, key=lambda each: -abs(apart[each])):
        if abs(apart[name]) < CLOSE * plan.time.step:
            break
        text = f"{texts[name]} {apart[name]:+.3f} s: "
        if name == "compute" and apart[name] < 0:
            text += (
                "the plan's rates are fitted to published runs, which reached less than the roofline's operators "
                "would here"
            )
        elif name == "compute":
            text += (
                f"{costs.idle:.3f} s idle until a launch, of {1e6 * constants.launch:.0f} us for a kernel "
                f"(the plan counts the kernels of a fused layer), {_seconds(costs, 'memory'):.3f} s are operators "
                "limited by "
                "memory (the plan counts what backward reads again, once)"
            )
        elif name == "bubble":
            text += "passes that take longer leave a longer bubble"
        elif name == "optimizer":
            text += "every operator of norm, update and copies is counted, in the plan the states alone"
        elif name == "host":
            text += (
                "counted are host synchronizations and small collectives; the plan's figure is fitted to published runs"
            )
        else:
            text += "what is executed starts and waits for it in other places than the plan takes for granted"
        yield text
    if time.step / plan.time.step < 1 + CLOSE and plan.time.step / time.step < 1 + CLOSE:
        yield f"by less than {100 * CLOSE:.0f} % in all"


def table_lines(rows: Sequence[tuple[str, Plan, Roofline]], commit: str) -> list[str]:
    """Return the models of the zoo as a Markdown page; `commit` of the executed program."""
    lines = [
        "# Steps of the zoo's models from the operators that they launch",
        "",
        f"`python scripts/roofline.py models --write`, commit {commit}. Executed on the emulated CUDA device; "
        "nothing here was measured on a GPU.",
        "[What the columns mean and why the two differ](../../docs/planning.md#a-roofline-from-what-runs). "
        "TFLOP/s are those of one GPU.",
        "",
        "| model | on | step | TFLOP/s | planned | published | kernels | launches | memory | GEMMs | at peaks |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, plan, found in rows:
        costs, near = found.busiest, closest_reference_run(plan)
        known = f"{near.run.tflops:.0f}" if not near.differs else ""
        parts = " | ".join(f"{_seconds(costs, limit):.3f}" for limit in ("launch", "memory", "compute"))
        lines.append(
            f"| {name} | {plan.world_size} {plan.hardware.name} {plan.width} | {found.time.step:.3f} | "
            f"{tflops(plan, found.time.step):.0f} | {plan.tflops:.0f} | {known} "
            f"| {costs.kernels:,.0f} | {parts} | {costs.bound:.3f} |"
        )
    lines += [
        "",
        "Seconds of an iteration; kernels and what limits them are those of the busiest pipeline stage. Planned "
        "and published: TFLOP/s of the same flags.",
        "",
    ]
    for name, plan, found in rows:
        lines += [
            f"## {name} on {plan.hardware.name}",
            "",
            "| seconds | kernels | limited by | line |",
            "|---|---|---|---|",
        ]
        for place, line in most_expensive(found.busiest):
            lines.append(f"| {line.seconds.total():.3f} | {line.kernels.total():,.0f} | {_limit(line)} | `{place}` |")
        lines += ["", *(f"- {reason}" for reason in (*found.notes, *reasons(plan, found))), ""]
    return lines[:-1]


def roofline_json(plan: Plan, roofline: Roofline) -> dict[str, object]:
    """Return the content of --report FILE."""
    time = roofline.time
    return {
        "world_size": plan.world_size,
        "hardware": plan.hardware.name,
        "notes": list(roofline.notes),
        "microbatches": plan.num_microbatches,
        "step_s": time.step,
        "tflops_per_gpu": tflops(plan, time.step),
        "step": {f"{name}_s": getattr(time, name) for name, _ in PARTS},
        "plan": {
            "step_s": plan.time.step,
            "tflops_per_gpu": plan.tflops,
            "step": {f"{name}_s": getattr(plan.time, name) for name, _ in PARTS},
        },
        "stages": {str(stage): _costs(costs) for stage, costs in roofline.stages.items()},
    }


def _costs(costs: RankCosts) -> dict[str, object]:
    return {
        "kernels": costs.kernels,
        "host_waits": costs.host_waits,
        "operators_s": costs.total,
        "at_peaks_s": costs.bound,
        "idle_s": costs.idle,
        "layers_s": dict(costs.layers),
        "passes": {f"{direction} of chunk {chunk}": vars(each) for (direction, chunk), each in costs.passes.items()},
        "lines": {
            place: {**vars(line), "seconds": dict(line.seconds), "kernels": dict(line.kernels)}
            for place, line in most_expensive(costs, len(costs.lines))
        },
    }

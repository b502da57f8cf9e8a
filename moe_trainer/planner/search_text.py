"""What a search found, in lines: the ranking, why the first is first, other mappings against it, and the command line to run."""

from __future__ import annotations

import shlex

from moe_trainer.planner.memory import GIB
from moe_trainer.planner.plan import Plan
from moe_trainer.planner.search import Outcome, reasons


def search_lines(outcome: Outcome, gpus: int, machine: str) -> list[str]:
    """What a search prints."""
    head = (f"{outcome.seen:,} mappings of {gpus} x {machine} estimated, {outcome.small:,} of them may fit, {outcome.planned} planned in full, "
            f"{outcome.refused} of these refused by rules; {outcome.seconds:.0f} s")
    if not outcome.seen:
        return [f"none fits on {gpus} devices: either no sizes divide heads, experts (--num-experts) and --global-batch-size (a number of devices "
                "with small factors has more mappings), or weights and optimizer alone are too large for them"]
    if not outcome.found:
        return [head, "none fits: use more devices, a smaller optimizer (--use-precision-aware-optimizer), or offloading"]
    lines = [head, "  #  tokens/s/GPU  TFLOP/s   step s  memory GiB  headroom   TP CP PP VPP  EP ETP MBS  products    dispatcher         recompute"]
    for number, each in enumerate(outcome.found, start=1):
        plan, mapping = each.plan, each.mapping
        room = "" if plan.headroom is None else f"{plan.headroom:.2f}"
        dispatcher = (mapping.backend or "alltoall") + (" overlapped" if mapping.overlap else "")
        lines.append(
            f"{number:3d} {plan.tokens_per_second:13,.0f} {plan.tflops:8.1f} {plan.time.step:8.3f} {plan.peak.total / GIB:11.1f} {room:>9s}   {mapping.tp:2d} "
            f"{mapping.cp:2d} {mapping.pp:2d} {mapping.vpp:3d} {mapping.ep:3d} {mapping.etp:3d} {mapping.mbs:3d}  {_products(plan):10s}  {dispatcher:18s} "
            f"{' '.join(mapping.recompute) or '-'}")
        lines.append(f"      binds: {each.binds}")
    if len(outcome.found) > 1:
        first, second = outcome.found[0].plan, outcome.found[1].plan
        why = reasons(first, second)
        lines.append(f"the first beats the second by {100 * (second.time.step / first.time.step - 1):.2f} %"
                     + (": " + ", ".join(why) if why else ": nothing that stands out"))
    if outcome.own is not None:
        lines += _beside("your own mapping", outcome.own, outcome.found[0].plan)
    if outcome.published is not None:
        row, plan = outcome.published
        lines += _beside(f"the published mapping ({row.name}, measured at {row.tflops:.0f} TFLOP/s)", plan, outcome.found[0].plan)
    lines += ["to run it:", "  " + shlex.join(["pretrain_moe.py", *outcome.base, *outcome.found[0].argv])]
    return lines


def _products(plan: Plan) -> str:
    """The recipe of a plan's products."""
    precision = plan.args.precision
    return precision.fp4_recipe if precision.fp4 else precision.fp8_recipe if precision.fp8 else plan.width


def _beside(name: str, plan: Plan, first: Plan) -> list[str]:
    """Another mapping against the first."""
    room = "fits" if plan.margin >= 0 else f"does not fit by {-plan.margin / GIB:.1f} GiB"
    headroom = "" if plan.headroom is None else f", headroom {plan.headroom:.2f}"
    share = 100 * (plan.tokens_per_second / first.tokens_per_second - 1)
    return [f"{name}: {plan.tokens_per_second:,.0f} tokens/s/GPU, {plan.tflops:.1f} TFLOP/s, {share:+.1f} % of the first; "
            f"{plan.peak.total / GIB:.1f} GiB, {room}{headroom}", *(f"  the first has {why}" for why in reasons(first, plan))]

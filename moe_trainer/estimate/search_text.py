"""The result of a search as text: the ranking and its reasons, comparisons, and the command line to run."""

from __future__ import annotations

import shlex

from arguments.mechanisms.formats import quantized_format
from arguments.program import as_typed
from moe_trainer.drawing.number_ranges import group_consecutive
from moe_trainer.estimate.hardware import GIB
from moe_trainer.estimate.plan import Plan
from moe_trainer.estimate.plan_text import fix_lines
from moe_trainer.estimate.search import RankedConfig, SearchResult, explain_speedup, ties
from moe_trainer.estimate.uncertainty import error_bar


def search_lines(outcome: SearchResult, gpus: int, machine: str) -> list[str]:
    rejected = f" ({outcome.rejected} of these rejected by the trainer's rules)" if outcome.rejected else ""
    lines = [
        f"{outcome.seen:,} mappings of {gpus} x {machine} estimated, {outcome.small:,} of them may fit, "
        f"{outcome.planned} planned in full{rejected}; {outcome.seconds:.0f} s"
    ]
    for reason, count in outcome.rejections:
        lines.append(f"  rejected {'once' if count == 1 else f'{count} times'}: {reason}")
    if outcome.replaced:
        lines.append(f"the search replaces: {shlex.join(outcome.replaced)}")
    if not outcome.found:
        return [*lines, *_no_fit_lines(outcome, gpus)]
    lines += [
        "  #  tokens/s/GPU  TFLOP/s     step s   +-  memory GiB  headroom   TP CP PP VPP  EP ETP MBS  GEMMs       "
        "dispatcher         recompute"
    ]
    for number, each in enumerate(outcome.found, start=1):
        plan, mapping = each.plan, each.mapping
        fit_text = "" if plan.headroom is None else f"{min(plan.headroom, 99.99):.2f}"
        dispatcher = (mapping.backend or "alltoall") + (" overlapped" if mapping.overlap else "")
        lines.append(
            f"{number:3d} {plan.tokens_per_second:13,.0f} {plan.tflops:8.1f} {plan.time.step:10.3f} "
            f"{each.bar.percent:>4s} {plan.peak.total / GIB:11.1f} {fit_text:>9s}   {mapping.tp:2d} {mapping.cp:2d} "
            f"{mapping.pp:2d} {mapping.vpp:3d} {mapping.ep:3d} {mapping.etp:3d} {mapping.mbs:3d}  "
            f"{_gemm_recipe(plan):10s}  {dispatcher:18s} "
            f"{' '.join(sorted(plan.args.training.recomputed_modules - {'mtp'})) or '-'}"
        )
        lines.append(f"      limited by: {each.bottleneck}{_uncertainties(each)}")
    lines.append(
        "headroom: the load of the busiest rank, as a multiple of an even share of tokens, at which memory is full"
    )
    lines += _order_lines(outcome)
    first = outcome.found[0].plan
    if outcome.own is not None:
        lines += _compare("your own mapping", outcome.own, first)
    if outcome.published is not None:
        run, plan = outcome.published
        name = f"the published mapping ({run.name}, measured at {run.tflops:.0f} TFLOP/s)"
        lines += _compare(name, plan, first)
    return [*lines, "to run it (on every node):", "  " + launch_line(outcome, gpus)]


def launch_line(outcome: SearchResult, gpus: int) -> str:
    """Return the best mapping as a command line with the launcher."""
    per_node = min(gpus, outcome.found[0].plan.hardware.node)
    nodes = -(-gpus // per_node)
    launcher = f"torchrun --nproc-per-node {per_node}"
    if nodes > 1:
        launcher += f" --nnodes {nodes} --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
    line = shlex.join(["pretrain_moe.py", *outcome.base, *outcome.found[0].argv])
    return as_typed("train", f"{launcher} {line}")


def _uncertainties(found: RankedConfig) -> str:
    """Return what makes the error bar wide."""
    large = [name for name, value in found.bar.reasons if value >= 0.05]
    return f"; uncertain because of {', '.join(large)}" if large else ""


def _order_lines(outcome: SearchResult) -> list[str]:
    """Return why the first is first."""
    first = outcome.found[0].plan
    fastest = min(outcome.found, key=lambda each: each.plan.time.step)
    tied = [number for number, each in enumerate(outcome.found, start=1) if number > 1 and ties(first, each.plan)]
    lines = []
    if tied:
        lines.append(
            f"a tie with the first, by these estimates: {_ranges(tied)}. Among ties the best supported is first: "
            "the smallest error, then the simplest mapping, then the nearest published run"
        )
    if fastest.plan is not first and fastest.plan.time.step < 0.995 * first.time.step:
        lines.append(
            f"the fastest of them by prediction is {outcome.found.index(fastest) + 1}, by "
            f"{100 * (first.time.step / fastest.plan.time.step - 1):.1f} %: worth a trial of some iterations"
        )
    if len(outcome.found) > 1 and not ties(first, outcome.found[1].plan):
        second = outcome.found[1].plan
        share, causes = 100 * (second.time.step / first.time.step - 1), explain_speedup(first, second)
        lines.append(f"the first beats the second by {share:.1f} %: {', '.join(causes)}")
    return lines


def _ranges(numbers: list[int]) -> str:
    """Return 1, 2, 3, 5 as "1 to 3, 5"."""
    return ", ".join(
        f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in group_consecutive(numbers)
    )


def _no_fit_lines(outcome: SearchResult, gpus: int) -> list[str]:
    """Return why nothing was found, and what would help."""
    if outcome.planned and outcome.rejected == outcome.planned:
        return ["no mapping is legal with these flags (the commonest reasons are above)"]
    if outcome.closest is None:
        return [
            f"none fits on {gpus} devices: no sizes divide heads, experts (--num-experts) and --global-batch-size (a "
            "number of devices with small factors has more mappings)"
        ]
    plan, argv = outcome.closest
    if plan.margin >= 0:
        need = (
            f"fits, but leaves headroom for {plan.headroom:.2f} times an even share of tokens only (--headroom asks "
            "for more)"
        )
    else:
        need = f"needs {-plan.margin / GIB:.1f} GiB a device more than there is"
    lines = [f"none fits: the smallest mapping {need}", f"  {shlex.join(argv)}"]
    lines += fix_lines(
        outcome.fixes,
        "with that mapping, cheapest first",
        "a smaller optimizer and offloading do not make it fit either",
    )
    if outcome.devices is not None:
        lines.append(f"with the flags as they are, {outcome.devices} devices hold it")
    return lines


def _gemm_recipe(plan: Plan) -> str:
    fmt = quantized_format(plan.args.precision)
    return plan.width if fmt is None else fmt.key


def _compare(name: str, plan: Plan, first: Plan) -> list[str]:
    """Return the comparison of another mapping with the first."""
    margin = f"{abs(plan.margin) / GIB:.1f} GiB"
    fit_text = f"fits with {margin} left" if plan.margin >= 0 else f"does not fit by {margin}"
    headroom = "" if plan.headroom is None else f", headroom {plan.headroom:.2f}"
    share = 100 * (plan.tokens_per_second / first.tokens_per_second - 1)
    is_tied, causes = ties(first, plan), explain_speedup(first, plan)
    compared = f"{abs(share):.1f} % {'faster' if share > 0 else 'slower'} than the first{', a tie' if is_tied else ''}"
    return [
        f"{name}: {plan.tokens_per_second:,.0f} tokens/s/GPU, {plan.tflops:.1f} TFLOP/s +- {error_bar(plan).percent}, "
        f"{compared}; {plan.peak.total / GIB:.1f} GiB, {fit_text}{headroom}",
        *([f"  the first has {', '.join(causes[:3])}"] if causes and not is_tied else []),
    ]

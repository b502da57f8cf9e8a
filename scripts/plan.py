#!/usr/bin/env python3
"""Plan a run before it is submitted: what it needs, how fast it will be, which mapping is best. No GPU, no torch.

    python scripts/plan.py FLAGS --world-size N --hardware H         the plan of a command line (pretrain_moe.py --dry-run)
    python scripts/plan.py search FLAGS --gpus N --hardware H        all legal mappings, ranked: the ten fastest that fit
    python scripts/plan.py calibrate                                 published runs, each predicted by constants fitted to the others

FLAGS are the trainer's; --preset NAME names a model. H: a100, h100, h200, h800, b200, gb200, gb300, or a YAML file. A search leaves out what
FLAGS say of parallel sizes, micro-batch, recompute and dispatcher, and keeps everything else (precision, optimizer, --global-batch-size).

Options of search:
  --gpus N         devices (also --world-size)
  --best K         how many to show (default 10)
  --headroom F     a rank with F times an even share of tokens must still fit (default 1)
Exit code: 0, or 2 where no plan can be made of the flags, or no mapping fits.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.planner.calibrate import Calibration, Error, median
from moe_trainer.planner.dry_run import DEFAULT_HARDWARE, run_dry_run
from moe_trainer.planner.hardware import find_hardware
from moe_trainer.planner.memory import GIB
from moe_trainer.planner.search import Outcome, reasons, search


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    if not words or words[0] in ("--help", "-h"):
        print(__doc__.strip())
        return 0 if words else 2
    if words[0] == "calibrate":
        return _calibrate()
    if words[0] == "search":
        return _search(words[1:])
    return run_dry_run(words if "--dry-run" in words else [*words, "--dry-run"])


def _search(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="plan.py search", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", "--world-size", type=int, required=True)
    parser.add_argument("--hardware", default=DEFAULT_HARDWARE)
    parser.add_argument("--best", type=int, default=10)
    parser.add_argument("--headroom", type=float, default=1.0)
    options, flags = parser.parse_known_args(words)
    if options.gpus < 1 or options.best < 1 or not options.headroom >= 1:
        parser.error("--gpus and --best are at least 1, --headroom too")
    try:
        outcome = search(flags, options.gpus, find_hardware(options.hardware), options.best, options.headroom)
    except ValueError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(search_lines(outcome, options.gpus, options.hardware)))
    return 0 if outcome.found else 2


def search_lines(outcome: Outcome, gpus: int, machine: str) -> list[str]:
    """What a search prints."""
    head = (f"{outcome.seen:,} mappings of {gpus} x {machine} estimated, {outcome.small:,} of them may fit, {outcome.planned} planned in full, "
            f"{outcome.refused} of these refused by rules; {outcome.seconds:.0f} s")
    if not outcome.found:
        return [head, "none fits: use more devices, a smaller optimizer (--use-precision-aware-optimizer), or offloading"]
    lines = [head, "  #  tokens/s/GPU  TFLOP/s   step s  memory GiB  headroom   TP CP PP VPP  EP ETP MBS  dispatcher         recompute"]
    for number, each in enumerate(outcome.found, start=1):
        plan, mapping = each.plan, each.mapping
        room = "" if plan.headroom is None else f"{plan.headroom:.2f}"
        dispatcher = (mapping.backend or "alltoall") + (" overlapped" if mapping.overlap else "")
        lines.append(
            f"{number:3d} {plan.tokens_per_second:13,.0f} {plan.tflops:8.1f} {plan.time.step:8.3f} {plan.peak.total / GIB:11.1f} {room:>9s}   {mapping.tp:2d} "
            f"{mapping.cp:2d} {mapping.pp:2d} {mapping.vpp:3d} {mapping.ep:3d} {mapping.etp:3d} {mapping.mbs:3d}  {dispatcher:18s} "
            f"{' '.join(mapping.recompute) or '-'}")
        lines.append(f"      binds: {each.binds}")
    if len(outcome.found) > 1:
        first, second = outcome.found[0].plan, outcome.found[1].plan
        why = reasons(first, second)
        lines.append(f"the first beats the second by {100 * (second.time.step / first.time.step - 1):.2f} %"
                     + (": " + ", ".join(why) if why else ": nothing that stands out"))
    if outcome.own is not None:
        own, first = outcome.own, outcome.found[0].plan
        room = "fits" if own.margin >= 0 else f"does not fit by {-own.margin / GIB:.1f} GiB"
        lines.append(f"your own mapping: {own.tokens_per_second:,.0f} tokens/s/GPU, {100 * (own.tokens_per_second / first.tokens_per_second - 1):+.1f} % "
                     f"of the first; {own.peak.total / GIB:.1f} GiB, {room}")
        lines += [f"  the first has {why}" for why in reasons(first, own)]
    lines += ["to run it:", "  " + shlex.join(["pretrain_moe.py", *outcome.base, *outcome.found[0].argv])]
    return lines


def _calibrate() -> int:
    calibration = Calibration()
    names = calibration.fitted()
    constants = calibration.fit(names)
    print(f"constants that tell all {len(names)} runs best: products_bf16 {constants.products_bf16}, products_fp8 {constants.products_fp8} of the "
          f"peak, {constants.iteration} s between iterations")
    errors = calibration.leave_one_out()
    print("each run, predicted by constants fitted to the others (TFLOP/s/GPU):")
    print("\n".join(map(_error_line, errors)))
    print(f"  median of the absolute errors {100 * median(errors):.1f} %")
    print("runs that nothing was fitted to:")
    print("\n".join(map(_error_line, calibration.predicted(constants))))
    return 0


def _error_line(error: Error) -> str:
    return f"  {error.row.name:46s} published {error.row.tflops:7.1f}  predicted {error.tflops:7.1f}  {100 * error.relative:+7.1f} %   {error.row.source}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

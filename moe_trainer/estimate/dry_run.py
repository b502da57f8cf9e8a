"""--dry-run: validate a command line as --validate-only does, and print its plan instead of running it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from arguments import ArgumentError, Arguments, parse_args
from arguments.blend import get_training_blend
from arguments.program import command_line, program_name
from arguments.report import get_world_size
from moe_trainer.drawing.report_page import write_report
from moe_trainer.estimate.hardware import Hardware, find_hardware
from moe_trainer.estimate.length_histogram import LengthHistogram, read_histogram
from moe_trainer.estimate.plan import Plan, PlanError, make_plan, validated_args
from moe_trainer.estimate.plan_pictures import plan_figures
from moe_trainer.estimate.plan_text import memory_json, plan_json, plan_lines
from moe_trainer.estimate.suggestions import cheapest_fixes
from moe_trainer.exit_codes import ExitCode

DEFAULT_HARDWARE = "h100"


def plan_of_flags(argv: list[str], checkpoint: Mapping[str, object] | None = None) -> Plan:
    """Plan a command line for the ranks of --world-size or WORLD_SIZE and the devices of --hardware.

    Raises:
        ValueError: (ArgumentError, HardwareError, PlanError) for errors the user can correct.
    """
    world_size, violations = get_world_size(argv)
    if violations:
        raise ArgumentError(violations)
    if world_size is None:
        parse_args(argv, None, checkpoint)  # other errors are reported first
        raise PlanError("a plan needs the number of ranks: give --world-size N")
    args = validated_args(argv, world_size, checkpoint)
    hardware: Hardware = find_hardware(args.output.hardware or DEFAULT_HARDWARE)
    return make_plan(args, world_size, hardware, histogram_of_flags(args))


def histogram_of_flags(args: Arguments) -> LengthHistogram | None:
    """Read the lengths of --length-histogram; None without it.

    Raises:
        ValueError: if they cannot be read.
    """
    source = args.output.length_histogram
    if source is None:
        return None
    blend = get_training_blend(args.data) if args.training.dataloader_type != "external" else None
    return read_histogram(source, blend, by_samples=args.data.has_sequences)


def planned_memory(args: Arguments, world_size: int) -> dict[str, object] | None:
    """Return the memory of a plan of legal flags, as in the report of --dry-run, None if they cannot be planned."""
    try:
        return memory_json(make_plan(args, world_size, find_hardware(args.output.hardware or DEFAULT_HARDWARE)))
    except ValueError:
        return None


def run_dry_run(argv: list[str], checkpoint: Mapping[str, object] | None = None) -> int:
    """Print the plan and, with --report FILE or --report-html FILE, write it.

    Returns:
        The exit code: OK, DOES_NOT_FIT if the device is too small, USER_ERROR if the flags cannot be planned.
    """
    if "--help" in argv or "-h" in argv:
        from arguments.help import run_help

        return run_help(argv)
    try:
        plan = plan_of_flags(argv, checkpoint)
    except ArgumentError as error:
        print(f"{program_name('train')}: no plan, since the trainer rejects this: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except ValueError as error:
        print(f"{program_name('train')}: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    fixes = cheapest_fixes(argv, plan) if plan.margin < 0 else []
    notes = [
        *plan.args.notes,
        *([plan.note] if plan.note else []),
        *(() if plan.args.output.hardware else (f"--hardware is not given: {DEFAULT_HARDWARE}",)),
    ]
    lines = [*notes, *plan_lines(plan, fixes)]
    print("\n".join(lines))
    if plan.args.output.report_html is not None:
        title = f"Plan of {plan.world_size:,} x {plan.hardware.name}"
        command = command_line("train", argv)
        try:
            write_report(plan.args.output.report_html, title, command, list(plan_figures(plan)), lines)
        except ValueError as error:
            print(f"{program_name('train')}: {error}", file=sys.stderr)
            return ExitCode.USER_ERROR
    path = plan.args.output.report
    if path is not None:
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(plan_json(plan, fixes), file, indent=1)
                file.write("\n")
        except OSError as error:
            print(
                f"{program_name('train')}: --report {path}: the file cannot be written ({error.strerror})",
                file=sys.stderr,
            )
            return ExitCode.USER_ERROR
    return ExitCode.DOES_NOT_FIT if plan.margin < 0 else ExitCode.OK

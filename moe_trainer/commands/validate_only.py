"""--validate-only: resolve and check a command line, count parameters and memory, and print and write the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from arguments.apply_flag_status import can_count_params
from arguments.container import OPTIONS, Arguments, freeze
from arguments.parse import resolve_command_line
from arguments.program import program_name
from arguments.report import as_json, get_world_size, summary, table
from arguments.rules.derived_sizes import derive_sizes
from arguments.settings import ArgumentError, Settings, Violation
from arguments.stage_layout import grid_sizes, group_options
from moe_trainer.errors import require_packages
from moe_trainer.estimate.parameters import params_report, planned_vocab_size
from moe_trainer.estimate.static_memory import state_report
from moe_trainer.exit_codes import ExitCode
from moe_trainer.parallel.grid import make_layout
from moe_trainer.parallel.groups import group_table, plan_groups
from moe_trainer.pipeline.batch_sizes import deadlocking_batch_sizes

if TYPE_CHECKING:
    from moe_trainer.training.check_files import FileCheckResult


def run_validate_only(argv: list[str], checkpoint: Mapping[str, object] | None = None) -> int:
    """Resolve, check, print and (with --report FILE) write a command line; return the exit code, 0 or 2.

    The number of ranks is --world-size, else that of the launcher's environment, else unknown. The result is printed
    first; violations go to standard error.

    Args:
        argv: the command line.
        checkpoint: see `parse_args`.
    """
    if "--help" in argv or "-h" in argv:
        from arguments.help import run_help

        return run_help(argv)
    world_size, violations = get_world_size(argv)
    settings, found = resolve_command_line(argv, world_size, checkpoint)
    violations += found
    violations += _waiting_batches(settings, violations, world_size)
    files = None
    if settings.check_files and not any(violation.kind in ("recipe", "value") for violation in violations):
        files = _check_files(freeze(settings, world_size))
        violations += files.problems
    model = _model(settings, violations, world_size, files)
    params: dict[str, int | None] = dict.fromkeys(("total", "mtp", "active", "active_no_embedding"))
    if model is not None:
        params |= params_report(model)
    state_lines = []
    if model is not None and not violations and not model.has_frozen_weights:
        state_lines = state_report(model, world_size)
    texts = [("", summary(settings, violations, params, world_size, state_lines))]
    if files is not None:
        texts.append(("files", files.lines))
    if settings.print_groups and not violations:
        texts.append(("", _group_lines(freeze(settings, world_size), world_size)))
    if not violations or settings.log_all_arguments:
        texts.append(("", table(settings, world_size, bool(settings.log_all_arguments))))
    _print(texts)
    if settings.report is not None:
        content = as_json(settings, violations, params, world_size)
        if files is not None:
            content["files"] = files.lines
        if model is not None and world_size and not violations:
            from moe_trainer.estimate.dry_run import planned_memory  # only here, since the planner is slow to import

            content["memory"] = planned_memory(model, world_size)
        try:
            with open(settings.report, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.write("\n")
        except OSError as error:
            text = f"{program_name('train')}: --report {settings.report}: the file cannot be written ({error.strerror})"
            print(text, file=sys.stderr)
            return ExitCode.USER_ERROR
    if violations:
        sys.stdout.flush()
        subject = "the arguments" if files is None else "the arguments or their files"
        print(f"{program_name('train')}: {ArgumentError(violations, subject=subject)}", file=sys.stderr)
    return ExitCode.USER_ERROR if violations else ExitCode.OK


def _print(texts: list[tuple[str, list[str]]]) -> None:
    """Print lines, each list below its title; without one as they are."""
    for title, lines in texts:
        if lines:
            print("\n".join([f"{title}:", *(f"  {line}" for line in lines)] if title else lines))


def _check_files(args: Arguments) -> FileCheckResult:
    require_packages("numpy")
    from moe_trainer.training.check_files import check_files

    return check_files(args)


def _model(
    settings: Settings, violations: list[Violation], world_size: int | None, files: FileCheckResult | None
) -> Arguments | None:
    """Return the arguments with the size of the vocabulary, None if the parameters cannot be counted."""
    if not can_count_params(settings, violations):
        return None
    model, vocab_size = freeze(settings, world_size), None if files is None else files.vocab_rows
    if not vocab_size:  # else as the run will build it
        vocab_size, note = planned_vocab_size(model)
        if note:
            settings.note(note)
    return model if vocab_size is None else replace(model, data=replace(model.data, padded_vocab_size=vocab_size))


def _group_lines(args: Arguments, world_size: int | None) -> list[str]:
    if not world_size:
        return ["--print-groups: the number of ranks is not known (give --world-size)"]
    layout = make_layout(world_size, **grid_sizes(args.parallel))
    return [f"groups of {world_size} ranks:", group_table(plan_groups(layout, **group_options(args)))]


def _waiting_batches(settings: Settings, violations: list[Violation], world_size: int | None) -> list[Violation]:
    """Return what the simulated schedule finds, unless another violation concerns its inputs."""
    facts = derive_sizes(settings, world_size)
    dests = [dest for dest, option in OPTIONS.items() if option.section in ("model", "parallel", "training", "data")]
    flags = {settings.flag(dest) for dest in dests} | {
        spelling for dest in dests for spelling in OPTIONS[dest].spellings
    }
    if (
        facts.dp is None
        or facts.layers is None
        or settings.micro_batch_size is None
        or any(violation.kind == "recipe" or flags.intersection(violation.flags) for violation in violations)
    ):
        return []
    about = (
        "rampup_batch_size"
        if settings.rampup_batch_size
        else "step_batch_size_schedule"
        if settings.step_batch_size_schedule
        else "global_batch_size"
    )
    return [
        Violation((settings.flag(about),), f"{settings.shown(about)}: {text}.")
        for text in deadlocking_batch_sizes(freeze(settings, world_size), facts.dp)
    ]

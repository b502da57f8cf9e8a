"""--validate-only: what a command line resolves to, where every value comes from, and what is wrong with it."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from arguments import rules
from arguments.apply_flag_status import can_count_params
from arguments.container import OPTIONS, SECTIONS, Arguments, freeze
from arguments.parse import resolve_command_line
from arguments.program import program_name
from arguments.rules.derived_sizes import derive_sizes
from arguments.settings import ArgumentError, Settings, Violation


@dataclass(frozen=True)
class FileCheckResult:
    """Result of checking the files that flags name: problems, lines to print, and the tokenizer's padded vocabulary."""

    problems: list[Violation]
    lines: list[str]
    vocab_rows: int | None = None


def run_validate_only(
    argv: list[str],
    count_params: Callable[[Arguments], Mapping[str, int | None]],
    checkpoint: Mapping[str, object] | None = None,
    describe_groups: Callable[[Arguments, int], str] | None = None,
    describe_state: Callable[[Arguments, int | None], list[str]] = lambda args, world_size: [],
    judge_batches: Callable[[Arguments, int], list[str]] = lambda args, data_ranks: [],
    plan_memory: Callable[[Arguments, int], Mapping[str, object] | None] | None = None,
    check_files: Callable[[Arguments], FileCheckResult] | None = None,
    find_vocab_size: Callable[[Arguments], tuple[int | None, str]] = lambda args: (None, ""),
) -> int:
    """Resolve, check, print and (with --report FILE) write a command line; return the exit code, 0 or 2.

    The number of ranks is --world-size, else the environment's WORLD_SIZE, else unknown. The result is printed first;
    violations go to standard error.

    Args:
        argv: the command line.
        count_params: returns the model's parameters: total, mtp, active, active_no_embedding.
        checkpoint: see `parse_args`.
        describe_groups: describes the process groups, for --print-groups.
        describe_state: lines about the size of weights and optimizer state.
        judge_batches: returns what is wrong with batch sizes, by simulating the pipeline schedule.
        plan_memory: returns the estimated memory, for --report.
        check_files: checks the files that flags name, for --check-files.
        find_vocab_size: returns the padded vocabulary size without opening files, None if unknown, and a note on its
            source.
    """
    if "--help" in argv or "-h" in argv:
        from arguments.help import run_help

        return run_help(argv)
    world_size, violations = get_world_size(argv)
    settings, found = resolve_command_line(argv, world_size, checkpoint)
    violations += found
    violations += _waiting_batches(settings, violations, world_size, judge_batches)
    files = None
    if (
        settings.check_files
        and check_files is not None
        and not any(violation.kind in ("recipe", "value") for violation in violations)
    ):
        files = check_files(freeze(settings, world_size))
        violations += files.problems
    model = None
    vocab_size: int | None
    if can_count_params(settings, violations):
        model = freeze(settings, world_size)
        if files is not None and files.vocab_rows:  # as the run will build it
            vocab_size, vocab_note = files.vocab_rows, ""
        else:
            vocab_size, vocab_note = find_vocab_size(model)
        if vocab_note:
            settings.note(vocab_note)
        if vocab_size is not None:
            model = replace(model, data=replace(model.data, padded_vocab_size=vocab_size))
    params: dict[str, int | None] = dict.fromkeys(("total", "mtp", "active", "active_no_embedding"))
    if model is not None:
        params |= count_params(model)
    state_lines = []
    if model is not None and not violations and not model.has_frozen_weights:
        state_lines = describe_state(model, world_size)
    print("\n".join(summary(settings, violations, params, world_size, state_lines)))
    if files is not None and files.lines:
        print("\n".join(["files:", *(f"  {line}" for line in files.lines)]))
    if settings.print_groups and not violations and describe_groups is not None:
        print(
            describe_groups(freeze(settings, world_size), world_size)
            if world_size
            else "--print-groups: the number of ranks is not known (give --world-size)"
        )
    if not violations or settings.log_all_arguments:
        print("\n".join(table(settings, world_size, bool(settings.log_all_arguments))))
    if settings.report is not None:
        content = as_json(settings, violations, params, world_size)
        if files is not None:
            content["files"] = files.lines
        if plan_memory is not None and model is not None and world_size and not violations:
            content["memory"] = plan_memory(model, world_size)
        try:
            with open(settings.report, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.write("\n")
        except OSError as error:
            text = f"{program_name('train')}: --report {settings.report}: the file cannot be written ({error.strerror})"
            print(text, file=sys.stderr)
            return 2
    if violations:
        sys.stdout.flush()
        subject = "the arguments" if files is None else "the arguments or their files"
        print(f"{program_name('train')}: {ArgumentError(violations, subject=subject)}", file=sys.stderr)
    return 2 if violations else 0


def _waiting_batches(
    settings: Settings,
    violations: list[Violation],
    world_size: int | None,
    judge: Callable[[Arguments, int], list[str]],
) -> list[Violation]:
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
        for text in judge(freeze(settings, world_size), facts.dp)
    ]


def get_world_size(argv: list[str]) -> tuple[int | None, list[Violation]]:
    """Return --world-size, else the environment's WORLD_SIZE, else None, and what is wrong with it."""
    from arguments.tokens import parse_tokens

    typed = parse_tokens(argv).last("world_size")
    if typed is not None:
        if typed < 1:
            return None, [Violation(("--world-size",), f"--world-size {typed}: there is at least one rank", "value")]
        return typed, []
    text = os.environ.get("WORLD_SIZE", "")
    if not text:
        return None, []
    if not text.isdigit() or int(text) < 1:
        return None, [Violation((), f"the environment's WORLD_SIZE={text} is not a number of ranks", "value")]
    return int(text), []


def _text(value: object) -> str:
    return " ".join(map(str, value)) if value and isinstance(value, list | tuple) else str(value)


def behind_flags(settings: Settings, world_size: int | None) -> dict[str, object]:
    """Return values that follow from several flags and that no flag holds."""
    found = rules.derived(settings, world_size)
    return {name: value for name, value in found.items() if name not in OPTIONS or settings.values[name] is None}


def table(settings: Settings, world_size: int | None = None, everything: bool = True) -> list[str]:
    """Return settings with their sources by section, then derived values; `everything` includes defaults."""
    lines = ["------------------------ arguments ------------------------"]
    left_out = 0
    for section, _cls in SECTIONS:
        shown = [dest for dest, option in OPTIONS.items() if option.section == section]
        left_out += len(shown)
        if not everything:
            shown = [dest for dest in shown if settings.source[dest] != "default"]
        left_out -= len(shown)
        if not shown:
            continue
        lines.append(f"[{section}]")
        for dest in shown:
            why = f": {settings.why[dest]}" if settings.why.get(dest) and settings.source[dest] == "derived" else ""
            source = settings.source[dest]
            lines.append(f"  {dest} ".ljust(48, ".") + f" {_text(settings.values[dest])}  ({source}{why})")
    lines.append("[derived from several flags]")
    for name, value in behind_flags(settings, world_size).items():
        lines.append(f"  {name} ".ljust(48, ".") + f" {_text(value)}  (derived)")
    lines.append("-------------------- end of arguments ---------------------")
    if left_out:
        lines.append(f"{left_out} settings are at their defaults (--log-all-arguments prints them too)")
    return lines


def summary(
    settings: Settings,
    violations: list[Violation],
    params: Mapping[str, int | None],
    world_size: int | None,
    state_lines: Sequence[str] = (),
) -> list[str]:
    """Return what to read first: the result, parameters, size of their state, notices."""
    count = f"{len(violations)} problem{'s' if len(violations) > 1 else ''}"
    lines = [
        f"not valid: {count} (see standard error)"
        if violations
        else "valid" + (f" for {world_size} rank{'s' if world_size > 1 else ''}" if world_size else "")
    ]
    if params["total"] is not None:
        lines.append(f"parameters: {params['total']:,} (+ {params['mtp'] or 0:,} multi-token prediction)")
        lines.append(f"active per token: {params['active']:,} (without embedding {params['active_no_embedding']:,})")
        lines += state_lines
    elif not violations:
        lines.append(
            "parameters: not counted, because the vocabulary comes from a tokenizer whose name is not known (give "
            "--vocab-size, or --check-files to open it)"
        )
    return [*lines, *settings.lines()]


def as_json(
    settings: Settings, violations: list[Violation], params: Mapping[str, int | None], world_size: int | None
) -> dict[str, object]:
    """Return the content of the --report file."""
    return {
        "valid": not violations,
        "world_size": world_size,
        "settings": {
            dest: {"value": settings.values[dest], "source": settings.source[dest]}
            | ({"why": settings.why[dest]} if settings.why.get(dest) else {})
            for dest in OPTIONS
        }
        | {name: {"value": value, "source": "derived"} for name, value in behind_flags(settings, world_size).items()},
        "violations": [{"flags": list(v.flags), "message": v.message, "kind": v.kind} for v in violations],
        "renamed": [{"flag": flag, "became": became} for flag, became in settings.renamed],
        "idle": [{"flag": flag, "reason": reason} for flag, reason in settings.no_effect],
        "notes": list(settings.notes),
        "recipe_env": dict(settings.recipe_env),
        "params": dict(params),
    }

"""Texts of --validate-only: what a command line resolves to, where every value comes from, and what is wrong."""

import os
from collections.abc import Mapping, Sequence

from arguments import rules
from arguments.container import OPTIONS, SECTIONS
from arguments.settings import Settings, Violation
from arguments.tokens import parse_tokens


def get_world_size(argv: list[str]) -> tuple[int | None, list[Violation]]:
    """Return --world-size, else WORLD_SIZE, else the tasks of a SLURM step of several, else None; and what is wrong."""
    typed = parse_tokens(argv).last("world_size")
    if typed is not None:
        if typed < 1:
            return None, [Violation(("--world-size",), f"--world-size {typed}: there is at least one rank", "value")]
        return typed, []
    text = os.environ.get("WORLD_SIZE", "")
    if not text:
        tasks = os.environ.get("SLURM_NTASKS", "") if {"SLURM_STEP_ID", "SLURM_PROCID"} <= os.environ.keys() else ""
        return (int(tasks) if tasks.isdecimal() and int(tasks) > 1 else None), []
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

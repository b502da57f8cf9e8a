"""argv -> Arguments: parse, apply the recipe, resolve, check, freeze.

tokens.py parses flags; recipe.py reads a preset; rules/ derives values and finds contradictions; apply_flag_status.py
rejects what is not implemented and notes what never has an effect, needs.py what has none here; container.py freezes.
All violations are collected and reported at once. Of the machine, only environment variables that a recipe names are
read.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from arguments import checkpoint_args, rules
from arguments.apply_flag_status import check_flag_status, note_flag_status
from arguments.container import OPTIONS, Arguments, freeze
from arguments.layer_pattern import mixing_sublayers
from arguments.needs import ATTENTION, DATA_RANKS, RANKS, note_unmet_needs
from arguments.rules.derived_sizes import derive_sizes
from arguments.settings import ArgumentError, Settings, Violation
from arguments.tokens import parse_tokens

WITHOUT_RUN = ("validate_only", "dry_run", "fake_process_group")
"""Switches of a command line that is read, and not run."""


def parse_args(
    argv: list[str] | None = None, world_size: int | None = None, checkpoint: Mapping[str, object] | None = None
) -> Arguments:
    """Parse, resolve and check a command line. `--help` prints the flags and exits.

    What Megatron-LM's parser accepts and its builders reject (a layer list of the wrong length, ranks that the expert
    grid does not divide) is in `.unbuildable` if nothing else is wrong; a run does not start with it.

    Args:
        argv: the command line; None for sys.argv[1:].
        world_size: number of ranks; None skips the rules about it.
        checkpoint: recorded flags for --use-checkpoint-args (see `find_checkpoint_args_source`); empty if there is no
        checkpoint yet.

    Raises:
        ArgumentError: with everything that is wrong in `.violations`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--help" in argv or "-h" in argv:
        from arguments.help import run_help

        sys.exit(run_help(argv))
    settings, violations = resolve_command_line(argv, world_size, checkpoint)
    if any(violation.kind != "build" for violation in violations):
        raise ArgumentError(violations, settings)
    return freeze(settings, world_size, violations)


def find_checkpoint_args_source(argv: list[str]) -> checkpoint_args.CheckpointArgsSource | None:
    """Return the checkpoint whose recorded flags `parse_args` needs, or None.

    With --use-checkpoint-args it is that of --load or --pretrained-checkpoint; with --auto-resume the newest one in
    --save takes precedence.
    """
    settings, _, _ = _gather(argv)
    return checkpoint_args.find_source(settings)


def flags_from_checkpoint(argv: list[str], recorded: Mapping[str, object]) -> dict[str, object]:
    """Return the values, by destination, that a command line takes from the flags that a checkpoint recorded.

    Raises:
        ArgumentError: if the command line contradicts the checkpoint.
    """
    settings, _, unread = _gather(argv)
    if unread is None or not settings.use_checkpoint_args:
        return {}
    before = dict(settings.values)
    replaced = checkpoint_args.apply(settings, recorded)
    taken = {dest: value for dest, value in settings.values.items() if value != before[dest]}
    _apply_old(settings)
    rules.resolve(settings, None)
    conflicts = list(checkpoint_args.conflicts(settings, replaced, resolve_command_line(argv, None)[0]))
    if conflicts:
        raise ArgumentError(conflicts, settings)
    taken.pop("use_checkpoint_args", None)
    return taken


def violations_without_checkpoint(argv: list[str], world_size: int | None) -> list[Violation]:
    """Return the violations that no checkpoint of --use-checkpoint-args could remove."""
    settings, violations = resolve_command_line(argv, world_size)
    open_flags = {spelling for dest in checkpoint_args.suppliable(settings) for spelling in OPTIONS[dest].spellings}
    return [
        violation
        for violation in violations
        if violation.kind in ("unknown", "value", "recipe") or not open_flags.intersection(violation.flags)
    ]


def as_plan(argv: Sequence[str]) -> list[str]:
    """Return a command line as that of a dry run, which keeps variables of a recipe file that are not set."""
    return [*argv] if any(map(parse_tokens(argv).last, WITHOUT_RUN)) else [*argv, "--dry-run"]


def resolve_command_line(
    argv: list[str], world_size: int | None, checkpoint: Mapping[str, object] | None = None
) -> tuple[Settings, list[Violation]]:
    """Resolve a command line as far as possible; return the settings and everything that is wrong with them."""
    settings, violations, unread = _gather(argv)
    if unread is None:
        return settings, violations
    replaced = {}
    if checkpoint is not None and settings.use_checkpoint_args:
        replaced = checkpoint_args.apply(settings, checkpoint)
    _apply_old(settings)
    rules.resolve(settings, world_size)
    names = {spelling for dest in unread for spelling in OPTIONS[dest].spellings}
    violations += [v for v in rules.check(settings, world_size) if not names.intersection(v.flags)]
    violations = violations + check_flag_status(settings)
    if replaced:
        alone, _ = resolve_command_line(argv, world_size)
        violations += checkpoint_args.conflicts(settings, replaced, alone)
    note_flag_status(settings)
    sizes = derive_sizes(settings, world_size)
    facts: dict[str, bool | None] = {
        RANKS: None if world_size is None else world_size > 1,
        ATTENTION: any(each.is_attention for each in mixing_sublayers(settings)),
    }
    if sizes.dp is not None and sizes.edp is not None:
        facts[DATA_RANKS] = max(sizes.dp * sizes.cp, sizes.edp) > 1
    note_unmet_needs(settings, facts, unread)
    return settings, violations


def _gather(argv: list[str]) -> tuple[Settings, list[Violation], set[str] | None]:
    """Apply defaults, recipe and command line in this order.

    Returns:
        The settings, violations, and the destinations that could not be read; None for the latter if the recipe is
        unreadable.
    """
    settings = Settings(OPTIONS)
    line = parse_tokens(argv)
    violations = list(line.violations)
    unread: set[str] | None = set(line.unread)
    preset = line.last("preset")
    if preset is not None:
        from arguments import recipe as recipes  # (only now: a plain command line needs no YAML)

        is_run = not any(map(line.last, WITHOUT_RUN))
        recipe = recipes.load(preset, os.environ, is_run)
        settings.notes += recipe.notes
        recipe.parsed.apply(settings, recipe.source)
        settings.recipe_env.update(recipe.env)
        for name, value in recipe.env.items():
            if os.environ.get(name, value) != value:
                settings.note(f"{name}={value} of {preset} has no effect: it is {os.environ[name]} in the environment.")
        violations += recipe.violations
        unread = None if recipe.violations and not recipe.parsed.given else {*line.unread, *recipe.parsed.unread}
    line.apply(settings, "command line")
    settings.typed |= line.unread  # their values are rejected, but they win over a preset's flags
    return settings, violations, unread


def _apply_old(s: Settings) -> None:
    """Apply old spellings that no rule handles."""
    if s.use_rotary_position_embeddings:
        s.set_derived("position_embedding_type", "rope", s.flag("use_rotary_position_embeddings"))
    if s.no_weight_decay_cond_type is not None:
        s.set_derived("apply_wd_to_qk_layernorm", True, s.flag("no_weight_decay_cond_type"))

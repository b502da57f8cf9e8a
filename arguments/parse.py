"""argv -> Arguments: read, take over the recipe, resolve, judge, freeze.

The steps, each in its own file: tokens.py reads flags; recipe.py reads a preset under them; rules/ derives values and
finds contradictions; verdict.py refuses what this version does not do and says what has no effect; container.py
freezes. Every step adds to one list of violations, and the user sees all of them at once. Nothing here looks at the
machine except at the environment variables a recipe names.
"""

import os
import sys
from collections.abc import Mapping

from arguments import checkpoint_args, rules, verdict
from arguments.container import OPTIONS, Arguments, freeze
from arguments.settings import ArgumentError, Settings, Violation
from arguments.tokens import read


def parse_args(
    argv: list[str] | None = None, world_size: int | None = None, checkpoint: Mapping[str, object] | None = None
) -> Arguments:
    """Read, resolve and check a command line.

    argv None means sys.argv[1:]; world_size None means that the rules on the number of ranks are left out; checkpoint
    is what a checkpoint recorded of its flags, for --use-checkpoint-args (see `checkpoint_wanted`; empty: there is no checkpoint yet). `--help` prints
    the flags and ends the process.
    What Megatron-LM's parser accepts and its builders refuse (a layer list of the wrong length, ranks that the expert
    grid does not divide) stands in `.unbuildable` when nothing else is wrong: the program refuses to start on it.
    Raises: ArgumentError (a ValueError) whose `.violations` lists everything that is wrong.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--help" in argv or "-h" in argv:
        from arguments.help import run_help

        sys.exit(run_help(argv))
    settings, violations = understand(argv, world_size, checkpoint)
    if any(violation.kind != "build" for violation in violations):
        raise ArgumentError(violations, settings)
    return freeze(settings, world_size, violations)


def checkpoint_wanted(argv: list[str]) -> checkpoint_args.Wanted | None:
    """The checkpoint whose recorded flags `parse_args` should be given, or None.

    It is that of --load or --pretrained-checkpoint, with --use-checkpoint-args; with --auto-resume first of all the newest one in --save.
    """
    settings, _, _ = _gather(argv)
    return checkpoint_args.wanted(settings)


def problems_without_checkpoint(argv: list[str], world_size: int | None) -> list[Violation]:
    """What is wrong with a command line whatever the checkpoint of --use-checkpoint-args, which cannot be read, says."""
    settings, violations = understand(argv, world_size)
    open_flags = {spelling for dest in checkpoint_args.suppliable(settings) for spelling in OPTIONS[dest].spellings}
    return [violation for violation in violations if violation.kind in ("unknown", "value", "recipe") or not open_flags.intersection(violation.flags)]


def understand(
    argv: list[str], world_size: int | None, checkpoint: Mapping[str, object] | None = None
) -> tuple[Settings, list[Violation]]:
    """Resolve a command line as far as it goes. Returns the settings and everything that is wrong with them."""
    settings, violations, unread = _gather(argv)
    if unread is None:
        return settings, violations
    if checkpoint is not None and settings.use_checkpoint_args:
        checkpoint_args.apply(settings, checkpoint)
    _apply_old(settings)
    rules.resolve(settings, world_size)
    names = {spelling for dest in unread for spelling in OPTIONS[dest].spellings}
    violations += [v for v in rules.check(settings, world_size) if not names.intersection(v.flags)]
    violations = verdict.merge_architectures(settings, violations + verdict.check(settings))
    verdict.announce(settings)
    return settings, violations


def _gather(argv: list[str]) -> tuple[Settings, list[Violation], set[str] | None]:
    """Defaults, recipe and command line, one over the other.

    Returns: the settings, what could not be read, and the destinations that miss a value because of it; None instead of
    these where nothing more can be said because the recipe cannot be read at all.
    """
    settings = Settings(OPTIONS)
    line = read(argv)
    violations, unread = list(line.violations), set(line.unread)
    preset = line.last("preset")
    if preset is not None:
        from arguments import recipe as recipes  # (only now: a plain command line needs no YAML)

        recipe = recipes.load(preset, os.environ)
        recipe.reading.apply(settings, recipe.source)
        settings.recipe_env.update(recipe.env)
        violations += recipe.violations
        unread |= recipe.reading.unread
        if recipe.violations and not recipe.reading.given:
            unread = None
    line.apply(settings, "command line")
    return settings, violations, unread


def _apply_old(s: Settings) -> None:
    """Old spellings that no rule handles."""
    if s.use_rotary_position_embeddings:
        s.set_derived("position_embedding_type", "rope", s.flag("use_rotary_position_embeddings"))
    if s.no_weight_decay_cond_type is not None:
        s.set_derived("apply_wd_to_qk_layernorm", True, s.flag("no_weight_decay_cond_type"))

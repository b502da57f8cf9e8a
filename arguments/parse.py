"""argv -> Arguments: read, take over the recipe, resolve, judge, freeze.

The steps, each in its own file: tokens.py reads flags; recipe.py reads a preset under them; rules/ derives values and
finds contradictions; verdict.py refuses what this version does not do and says what has no effect; container.py
freezes. Every step adds to one list of violations, and the user sees all of them at once. Nothing here looks at the
machine except at the environment variables a recipe names.
"""

import os
import sys
from collections.abc import Mapping

from arguments import rules, verdict
from arguments.container import OPTIONS, Arguments, freeze
from arguments.settings import ArgumentError, Settings, Violation
from arguments.tokens import read


def parse_args(argv: list[str] | None = None, world_size: int | None = None) -> Arguments:
    """Read, resolve and check a command line.

    argv None means sys.argv[1:]; world_size None means that the rules on the number of ranks are left out. `--help`
    prints the flags and ends the process.
    Raises: ArgumentError (a ValueError) whose `.violations` lists everything that is wrong.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--help" in argv or "-h" in argv:
        from arguments.help import print_help

        print_help()
        sys.exit(0)
    settings, violations = understand(argv, world_size)
    if violations:
        raise ArgumentError(violations, settings)
    return freeze(settings, world_size)


def understand(
    argv: list[str], world_size: int | None, environ: Mapping[str, str] | None = None
) -> tuple[Settings, list[Violation]]:
    """Resolve a command line as far as it goes. Returns the settings and everything that is wrong with them."""
    settings = Settings(OPTIONS)
    line = read(argv)
    violations = list(line.violations)
    unread = set(line.unread)
    preset = line.last("preset")
    if preset is not None:
        from arguments import recipe as recipes  # (only now: a plain command line needs no YAML)

        recipe = recipes.load(preset, os.environ if environ is None else environ)
        recipe.reading.apply(settings, recipe.source)
        settings.recipe_env.update(recipe.env)
        violations += recipe.violations
        unread |= recipe.reading.unread
        if recipe.violations and not recipe.reading.given:
            line.apply(settings, "command line")
            return settings, violations
    line.apply(settings, "command line")
    _apply_old(settings)
    rules.resolve(settings, world_size)
    names = {spelling for dest in unread for spelling in OPTIONS[dest].spellings}
    violations += [v for v in rules.check(settings, world_size) if not names.intersection(v.flags)]
    violations += verdict.check(settings)
    verdict.announce(settings)
    return settings, violations


def _apply_old(s: Settings) -> None:
    """Old spellings that no rule handles."""
    if s.use_rotary_position_embeddings:
        s.set_derived("position_embedding_type", "rope", s.flag("use_rotary_position_embeddings"))
    if s.no_weight_decay_cond_type is not None:
        s.set_derived("apply_wd_to_qk_layernorm", True, s.flag("no_weight_decay_cond_type"))

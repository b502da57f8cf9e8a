"""Write the record of the tests and the default tier.

    bash scripts/test.sh --all --record FOLDER           or some modules only
    python tests/suite/make_tiers.py --record FOLDER     record.xz: the tests of modules that ran are replaced
    python tests/mutants/run.py --write                  which test notices which mutant
    python tests/suite/make_tiers.py                     default.txt

The default tier has the tests that notice the mutants, those of the README's commands, and, until its time is spent,
the cheapest ones that reach blocks of the product which its other tests reach rarely.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import yaml

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from structure.source import ROOT
from suite import record, tiers

MUTANTS = ROOT / "tests/mutants"
BUDGET_S = 620.0
"""Processor time of the tests of the default tier."""
MODULE_S = 1.0
"""What importing a test module costs, about."""
ALWAYS = (
    "tests/docs/test_commands.py::test_quickstart_command_of_the_readme_runs",
    "tests/docs/test_commands.py::test_commands_of_the_manual_run[README.md]",
    "tests/arguments/test_checkpoint_args.py::test_every_flag_of_the_model_and_of_the_data_says",
    "tests/arguments/test_flags_alone.py",
    "tests/arguments/test_no_dead_flags.py",
    "tests/arguments/test_schema.py",
    "tests/memory/test_flags_of_the_model.py",
    "tests/mutants/",
    "tests/structure/",
    "tests/suite/",
    "tests/training/test_bad_input.py::test_number_flags_reject_negative_numbers",
    "tests/verification/test_random_layouts.py::test_flags_that_change_the_function_are_drawn",
)
"""The README's commands, and tests that read the repository or notice what a new flag or mechanism leaves unsaid: mutants say nothing of them."""
DECLARATIONS = "_declarations.py::"
"""In the name of tests that compare declarations with modules, which are always in the tier too."""
TIMES = 3
"""A block counts for the choice until so many tests reach it: one half each time."""


def main() -> int:
    """Write the files that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="folder of a run with --record")
    parser.add_argument("--budget", type=float, default=BUDGET_S)
    args = parser.parse_args()
    if not 0 <= args.budget < float("inf"):
        parser.error(f"--budget {args.budget}: seconds are needed")
    if args.record and not (args.record / "blocks.json").is_file():
        parser.error(f"--record {args.record}: not a folder that a whole run with --record has written")
    if args.record:
        found, old = record.read_raw(args.record), record.read()
        if old is not None:
            found = record.merge(old, found)
        record.write(found)
        print(
            f"{record.FILE.name}: {len(found.tests)} tests, {sum(found.seconds):.0f} s of processor time, {len(found.blocks)} blocks"
        )
        return 0
    known = record.read()
    if known is None:
        parser.error(f"there is no {record.FILE}; --record FOLDER makes it")
    chosen = choose(known, json.loads((MUTANTS / "noticed.json").read_text()), args.budget)
    names = sorted(known.tests[at] for at in chosen)
    tiers.DEFAULT_FILE.write_text("\n".join(names) + "\n")
    print(
        f"{tiers.DEFAULT_FILE.name}: {len(names)} tests, {sum(known.seconds[at] for at in chosen):.0f} s of processor time"
    )
    return 0


def choose(known: record.Record, noticed: dict[str, dict[str, list | None]], budget: float) -> set[int]:
    """Return the numbers of the tests of the default tier."""
    numbers = {name: at for at, name in enumerate(known.tests)}
    names = {tests[0] for by_tier in noticed.values() for tests in by_tier.values() if tests}
    if missing := sorted(names - numbers.keys()):
        sys.exit(
            f"the record has not these tests, which notice mutants; renew it for their modules: {', '.join(missing)}"
        )
    chosen = {numbers[name] for name in names}
    gone = {numbers[name] for name in tiers.without_function(known.tests)}
    chosen |= {at for name, at in numbers.items() if name.startswith(ALWAYS) or DECLARATIONS in name} - gone
    modules = {known.tests[at].partition("::")[0] for at in chosen}
    spent = sum(known.seconds[at] for at in chosen) + MODULE_S * len(modules)
    by_module = defaultdict(list)
    for name, at in numbers.items():
        by_module[name.partition("::")[0]].append(at)
    weights = np.zeros(known.bits.shape[1] * 8, np.float32)
    weights[: len(known.blocks)] = _block_weights([file for file, _, _ in known.blocks])
    least = weights * 2.0**-TIMES
    for at in chosen:
        _discount(weights, least, known.bits[at])
    gains = np.array([_gain(weights, row) for row in known.bits])
    seconds = np.maximum(np.array(known.seconds), 0.02)
    module_of = [name.partition("::")[0] for name in known.tests]
    costs = seconds + np.array([0.0 if module in modules else MODULE_S for module in module_of])
    available = np.ones(len(known.tests), bool)
    available[[*chosen, *gone]] = False
    while available.any():
        # gains only shrink: look again at the best one until it stays the best
        at = int(np.argmax(np.where(available, gains / costs, -1.0)))
        gain = _gain(weights, known.bits[at])
        if gain < 0.999 * gains[at]:
            gains[at] = gain
            continue
        available[at] = False
        if gain <= 0 or spent + costs[at] > budget:
            continue
        chosen.add(at)
        spent += costs[at]
        if module_of[at] not in modules:
            modules.add(module_of[at])
            costs[by_module[module_of[at]]] -= MODULE_S
        _discount(weights, least, known.bits[at])
    return chosen


def _gain(weights: np.ndarray, row: np.ndarray) -> float:
    return float(weights[np.unpackbits(row).astype(bool)].sum())


def _discount(weights: np.ndarray, least: np.ndarray, row: np.ndarray) -> None:
    reached = np.unpackbits(row).astype(bool)
    weights[reached] /= 2
    weights[weights < least] = 0


def _block_weights(files: list[str]) -> list[float]:
    """Return per block the number of mutants of its package by that of its blocks: mutants are where mistakes would hurt."""
    packages = [_package(file) for file in files]
    table = [entry["file"] for path in MUTANTS.glob("*.yaml") for entry in yaml.safe_load(path.read_text())]
    mutants, blocks = Counter(map(_package, table)), Counter(packages)
    return [(0.5 + mutants[package]) / blocks[package] for package in packages]


def _package(file: str) -> str:
    parts = file.split("/")
    return "/".join(parts[:2]) if parts[0] == "moe_trainer" else parts[0]


if __name__ == "__main__":
    sys.exit(main())

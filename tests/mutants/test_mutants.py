"""The tables of mutants are applicable, and run.py settles them."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import yaml
from mutants import run as mutants
from suite import tiers

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted(Path(__file__).parent.glob("*.yaml"))


def test_every_mutant_is_a_change_of_a_line_that_is_there():
    table = mutants.read_table(TABLES)
    names = [mutant.name for mutant in table]
    assert len(set(names)) == len(names) >= 200
    wrong = []
    for mutant in table:
        placed = mutant.place(ROOT)
        if placed is None:
            wrong.append(f"{mutant.name}: not in {mutant.file} {mutant.function} exactly once: {mutant.line}")
            continue
        text = (ROOT / mutant.file).read_text()
        if mutant.file.endswith(".py") and ast.dump(ast.parse(placed[0])) == ast.dump(ast.parse(text)):
            wrong.append(f"{mutant.name}: changes nothing")
        if not mutant.breaks.strip():
            wrong.append(f"{mutant.name}: does not say what breaks")
    assert not wrong, "\n".join(wrong)


def test_the_default_tier_has_a_test_that_notices_every_noticed_mutant():
    noticed = json.loads(mutants.NOTICED_FILE.read_text())
    table = {mutant.name for mutant in mutants.read_table(TABLES)}
    unsettled = sorted(table - {name for name, by_tier in noticed.items() if any(by_tier.values())})
    assert not unsettled, f"which test notices them? python tests/mutants/run.py --write {' '.join(unsettled)}"
    assert noticed.keys() <= table, "results of mutants that are not in the tables"
    default = set(tiers.DEFAULT_FILE.read_text().splitlines())
    missing = [
        name for name, by_tier in noticed.items() if not {test for test, _ in filter(None, by_tier.values())} & default
    ]
    assert not missing, "run `python tests/suite/make_tiers.py`"


def test_tests_of_the_default_tier_exist():
    wrong = tiers.without_function(tiers.DEFAULT_FILE.read_text().splitlines())
    assert not wrong, "run `python tests/suite/make_tiers.py`:\n" + "\n".join(wrong)


def test_mutants_are_noticed_survive_or_have_moved(tmp_path):
    common = {"file": "moe_trainer/pipeline/batch_sizes.py", "breaks": "nothing"}
    source = (ROOT / common["file"]).read_text()
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    line = next(
        line
        for line in ast.get_source_segment(source, function).splitlines()
        if line.strip().startswith("return ") and source.count(line) == 1
    )
    common["function"] = function.name
    table = [
        {"name": "noticed", "line": line.strip(), "change": "return None", **common},
        {"name": "equal", "line": line.strip(), "change": f"{line.strip()}  # the same", **common},
        {"name": "moved", "line": "a line of an earlier version", "change": "", **common},
    ]
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(table))
    done = subprocess.run(
        [sys.executable, mutants.__file__, "--table", path, "--limit", "1", "--processes", "1"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    outcomes = {row.split()[3]: row.split()[0] for row in done.stdout.splitlines()[:-1]}
    assert done.returncode == 1 and outcomes == {"noticed": "noticed", "equal": "survived", "moved": "moved"}, (
        done.stdout
    )

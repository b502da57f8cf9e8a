"""Take a feature out of a copy of the checkout, and report what still names or needs it.

    python tests/removal/remove.py FEATURE --into FOLDER                  take it out, look for its words, import all modules
    python tests/removal/remove.py FEATURE --into FOLDER --tests          and run the tests of its specification
    python tests/removal/remove.py FEATURE --into FOLDER --default-tier   and run the default tier

FEATURE.yaml in this folder is the specification:

    feature: one line of text
    words: [text, ...]          no tracked file names them afterwards, in either case, but CHANGELOG.md and those allowed
    files: [path, folder/, ...]                 deleted
    lines: {path: [line, ...]}                  deleted; with a line that begins a Python statement the statement goes,
                                                and the string that documents it. Each is there exactly once
    allowed: [path, folder/, ...]               files of model families and facts about other programs, which keep the words
    tests: [path, ...]                          cheap tests to run on the copy
    suite: true                                 optional: test_removal.py takes it out in every run of the suite

Rows of the tests' tables that name what is gone are dropped, and records of its flags; generated pages are written again. Only tracked files
are copied, as they are in the working tree. Exit code 1: something names the feature, or a module or test fails; 2: the
specification does not fit the checkout.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE_ROWS = ("tests/data/suite/default.txt", "tests/arguments/refusals.txt", "scripts/bench_results/pieces.md")
"""Tables of one row a line."""
TABLE_ENTRIES = (
    "tests/data/check_sources.json",
    "tests/data/triton_resources.json",
    "scripts/bench_results/combinations.json",
)
"""Tables in JSON: entries by name."""
RECORDED_FLAGS = ("tests/data/megatron_flags.json.gz", "tests/data/retired_flags.json.gz")
"""Flags of Megatron-LM: a program without a feature does not know those of the feature."""
MUTANTS, NOTICED = "tests/mutants", "tests/mutants/noticed.json"
GENERATORS = (
    (("scripts/draw_docs.py",), None),
    (("-m", "arguments.refused"), "docs/refused_flags.md"),
    (("scripts/combinations.py", "--write"), None),
)
"""Arguments of Python, and the page that has the output if the command does not write it itself."""
ALWAYS = (
    "tests/arguments/test_refusals.py::test_every_rule_refuses_a_line_and_accepts_a_similar_one",
    "tests/structure/test_capabilities.py",
)
"""Tests of every copy: no rule or capability is left without a use."""
PACKAGES = ("arguments", "model_zoo", "moe_trainer")
IMPORT_ALL = f"""
import importlib, sys
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in {PACKAGES}:  # others are libraries that are not installed
            raise
"""


class SpecError(Exception):
    """A specification that is not one, or does not fit the checkout."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What belongs to a feature."""

    feature: str
    words: list[str]
    files: list[str] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)
    allowed: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    suite: bool = False

    def is_named(self, text: str) -> bool:
        lowered = text.lower()
        return any(word.lower() in lowered for word in self.words)


def read_spec(path: Path) -> Spec:
    """Return a feature's specification.

    Raises:
        SpecError: there is none, or it has other keys or kinds of values.
    """
    try:
        spec = Spec(**yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, TypeError) as error:
        raise SpecError(f"{path} is no specification of a feature: {error}") from error
    lists = (spec.words, spec.files, spec.allowed, spec.tests, *spec.lines.values())
    if not spec.words or not all(
        isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists
    ):
        raise SpecError(f"{path}: words, files, allowed, tests and the lines of a file are lists of texts")
    return spec


def tracked(folder: Path) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=folder, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (folder / name).is_file()]


def copy_checkout(folder: Path) -> None:
    """Write the tracked files of the checkout into a new repository."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"--into {folder}: there is something; give an empty or new folder")
    for name in tracked(ROOT):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
        target.chmod((ROOT / name).stat().st_mode)
    git = ["git", "-c", "user.name=removal", "-c", "user.email=removal@localhost"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "Before the removal"]):
        subprocess.run([*git, *words], cwd=folder, check=True)


def delete_files(folder: Path, spec: Spec, name: str) -> None:
    """Delete a feature's files and its specification."""
    names = tracked(folder)
    for pattern in [*spec.files, f"tests/removal/{name}.yaml"]:
        found = [each for each in names if each == pattern or (pattern.endswith("/") and each.startswith(pattern))]
        if not found:
            raise SpecError(f"files: {pattern} is not in the checkout")
        for each in found:
            (folder / each).unlink()


def without_lines(text: str, line: str, is_python: bool) -> str:
    """Return a text without a line, or without the lines of the Python statement that it begins."""
    rows = text.splitlines(keepends=True)
    wanted = [each.strip() for each in line.strip().splitlines()]
    places = [
        at
        for at in range(len(rows) - len(wanted) + 1)
        if [row.strip() for row in rows[at : at + len(wanted)]] == wanted
    ]
    if len(places) != 1:
        raise SpecError(f"is there {len(places)} times, not once: {line}")
    first = places[0]
    last = max(first + len(wanted), _end_of_statement(text, first + 1) if is_python else 0)
    return "".join(rows[:first] + rows[last:])


def _end_of_statement(text: str, line: int) -> int:
    """Return the last line of the statement that begins on a line, with the string that documents it; 0 if none does."""
    for parent in ast.walk(ast.parse(text)):
        for statements in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(statements, list):
                continue
            for node, following in zip(statements, [*statements[1:], None]):
                if min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) != line:
                    continue
                is_documented = isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(following, ast.Expr)
                if (
                    is_documented
                    and isinstance(following.value, ast.Constant)
                    and isinstance(following.value.value, str)
                ):
                    return following.end_lineno
                return node.end_lineno
    return 0


def delete_lines(folder: Path, spec: Spec) -> None:
    for name, lines in spec.lines.items():
        path = folder / name
        if not path.exists():
            raise SpecError(f"lines: {name} is not in the checkout, or is among the files")
        text, is_python = path.read_text(encoding="utf-8"), path.suffix == ".py"
        for line in lines:
            try:
                text = without_lines(text, line, is_python)
            except (SpecError, SyntaxError) as error:
                raise SpecError(f"lines: {name}: {error}") from error
        path.write_text(text, encoding="utf-8")


def functions(folder: Path, cache: dict[str, set[str]], name: str) -> set[str]:
    """Return the functions of a file, those of classes too; none if the file is gone."""
    if name not in cache:
        path = folder / name
        cache[name] = (
            set(re.findall(r"^\s*def (\w+)", path.read_text(encoding="utf-8"), re.M)) if path.exists() else set()
        )
    return cache[name]


def row_checker(folder: Path, spec: Spec) -> Callable[[str], bool]:
    """Return whether a row names the feature, a test or a rule that is gone."""
    cache: dict[str, set[str]] = {}

    def is_gone(row: str) -> bool:
        if spec.is_named(row):
            return True
        for module, test in re.findall(r"(tests/[\w/]+\.py)::(?:\w+::)?(\w+)", row):
            if test not in functions(folder, cache, module):
                return True
        return any(
            rule not in functions(folder, cache, f"arguments/rules/{module}.py")
            for module, rule in re.findall(r"\b(\w+)\.((?:check|limit|note|resolve)_\w+)", row)
        )

    return is_gone


def drop_rows(folder: Path, spec: Spec) -> Iterator[str]:
    """Drop the rows of the tests' tables that name what is gone. Yields what was dropped."""
    is_gone = row_checker(folder, spec)
    for name in filter(lambda name: (folder / name).exists(), TABLE_ROWS):
        rows = (folder / name).read_text(encoding="utf-8").splitlines()
        kept = _kept_rows(rows, is_gone)
        (folder / name).write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")
        yield f"{name}: {len(rows) - len(kept)} rows"
    for name in filter(lambda name: (folder / name).exists(), TABLE_ENTRIES):
        before = json.loads((folder / name).read_text(encoding="utf-8"))
        after = _kept_entries(before, is_gone)
        if after != before:
            (folder / name).write_text(json.dumps(after, indent=1), encoding="utf-8")
            yield f"{name}: entries"
    for name in filter(lambda name: (folder / name).exists(), RECORDED_FLAGS):
        before = json.loads(gzip.decompress((folder / name).read_bytes()))
        after = _kept_records(before, spec)
        if after != before:
            (folder / name).write_bytes(gzip.compress(json.dumps(after).encode()))
            yield f"{name}: records"
    yield from _drop_mutants(folder, is_gone)
    _drop_lines_of_other_specs(folder, spec)


def _kept_rows(rows: list[str], is_gone: Callable[[str], bool]) -> list[str]:
    """Leave out rows and ends of rows, and those that stand on the words of a row left out (NAME = ..., used as {NAME})."""
    names: set[str] = set()

    def stands_on_gone(text: str) -> bool:
        return is_gone(text) or any(f"{{{name}}}" in text for name in names)

    while True:
        shorter = [row if row.startswith("#") else _without_ends(row, stands_on_gone) for row in rows]
        kept = [row for row in shorter if row.startswith("#") or not stands_on_gone(row)]
        left_out = {found[1] for row in set(shorter) - set(kept) if (found := re.match(r"([A-Z]\w*) = ", row))}
        if left_out <= names:
            return kept
        names |= left_out


def _without_ends(row: str, is_gone: Callable[[str], bool]) -> str:
    """Leave out other ends of a line (WORDS / END / END -> ...) that are gone; the first one goes with its row."""
    line, arrow, outcome = row.partition(" -> ")
    first, *ends = line.split(" / ") if arrow else [line]
    return " / ".join([first, *(end for end in ends if not is_gone(end))]) + arrow + outcome


def _kept_entries(value: object, is_gone: Callable[[str], bool]) -> object:
    if isinstance(value, dict):
        return {key: _kept_entries(each, is_gone) for key, each in value.items() if not is_gone(key)}
    return value


def _kept_records(value: object, spec: Spec) -> object:
    """Leave out records of flags that name the feature, and choices that do."""
    if isinstance(value, dict):
        return {key: _kept_records(each, spec) for key, each in value.items()}
    if isinstance(value, list):
        return [_kept_records(each, spec) for each in value if not _is_record_of(each, spec)]
    return value


def _is_record_of(value: object, spec: Spec) -> bool:
    """Return whether a choice, a record by key, or a record that begins with its flags is of the feature."""
    if isinstance(value, dict):
        return any(spec.is_named(each) for each in value.get("flags", ()))
    if isinstance(value, list):
        return bool(value) and _is_record_of(value[0], spec)
    return isinstance(value, str) and spec.is_named(value)


def _drop_lines_of_other_specs(folder: Path, spec: Spec) -> None:
    """Leave out of other specifications what went with this feature: files, and lines that name it or were in them."""
    for path in (folder / HERE.relative_to(ROOT)).glob("*.yaml"):
        other = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key in ("files", "allowed", "tests"):
            other[key] = [each for each in other.get(key, ()) if (folder / each).exists()]
        other["lines"] = {
            name: [line for line in lines if not spec.is_named(line)]
            for name, lines in other.get("lines", {}).items()
            if (folder / name).exists()
        }
        path.write_text(yaml.safe_dump(other, sort_keys=False, width=1000), encoding="utf-8")


def _drop_mutants(folder: Path, is_gone: Callable[[str], bool]) -> Iterator[str]:
    """Drop mutants of lines that are gone, and those that only tests noticed which are gone."""
    noticed = json.loads((folder / NOTICED).read_text(encoding="utf-8"))
    noticed = {
        name: {tier: None if found and is_gone(found[0]) else found for tier, found in by_tier.items()}
        for name, by_tier in noticed.items()
    }
    seen: set[str] = set()
    for path in sorted((folder / MUTANTS).glob("*.yaml")):
        head, *entries = re.split(r"^(?=- name: )", path.read_text(encoding="utf-8"), flags=re.M)
        kept = []
        for entry in entries:
            mutant = yaml.safe_load(entry)[0]
            name, target = mutant["name"], folder / mutant["file"]
            lines = (
                [line.strip() for line in target.read_text(encoding="utf-8").splitlines()] if target.exists() else []
            )
            is_there = mutant["line"].strip().splitlines()[0].strip() in lines
            if not is_gone(entry) and is_there and any(noticed.get(name, {"new": True}).values()):
                kept.append(entry)
                seen.add(name)
        path.write_text(head + "".join(kept), encoding="utf-8")
        if len(kept) < len(entries):
            yield f"{path.relative_to(folder)}: {len(entries) - len(kept)} mutants"
    noticed = {name: by_tier for name, by_tier in noticed.items() if name in seen}
    (folder / NOTICED).write_text(json.dumps(noticed, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def run_python(folder: Path, *words: str, given: str | None = None) -> subprocess.CompletedProcess:
    """Run Python in the copy, so that it imports the copy's modules."""
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=env, input=given, capture_output=True, text=True, check=False)


def write_pages(folder: Path) -> Iterator[str]:
    """Write the generated pages again. Yields what went wrong."""
    for words, page in GENERATORS:
        done = run_python(folder, *words)
        if done.returncode:
            yield f"python {' '.join(words)} fails:\n{done.stderr[-2000:]}"
        elif page:
            (folder / page).write_text(done.stdout, encoding="utf-8")


def naming_lines(folder: Path, spec: Spec) -> Iterator[str]:
    """Yield file:line of what still names the feature."""
    for name in tracked(folder):
        is_allowed = any(name == each or (each.endswith("/") and name.startswith(each)) for each in spec.allowed)
        if name == "CHANGELOG.md" or is_allowed:
            continue
        if spec.is_named(name):
            yield f"{name}: the name of the file"
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # no text
        for number, line in enumerate(text.splitlines(), 1):
            if spec.is_named(line):
                yield f"{name}:{number}: {line.strip()[:160]}"


def import_problem(folder: Path) -> str:
    """Return what goes wrong when every module of the product is imported; "" if nothing does."""
    names = [
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in tracked(folder)
        if name.partition("/")[0] in PACKAGES and name.endswith(".py")
    ]
    wanted = [name for name in names if not name.endswith("__main__") and ".remote_code" not in name]
    done = run_python(folder, "-c", IMPORT_ALL, given="\n".join(wanted))
    return done.stderr[-2000:] if done.returncode else ""


def run_tests(folder: Path, tests: list[str]) -> int:
    """Run tests and ALWAYS in the copy, or the default tier if none are named. Returns pytest's exit code."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = run_python(folder, *words, *(["--processes", "1", *tests, *ALWAYS] if tests else []))
    print(done.stdout[-6000:], done.stderr[-2000:], sep="", flush=True)
    return done.returncode


def take_out(name: str, folder: Path, specs: Path = HERE) -> Iterator[str]:
    """Take a feature out of a new copy of the checkout. Yields what still names or needs it.

    Args:
        name: the feature, by the name of its specification.
        folder: where the copy is written.
        specs: folder of the specifications.

    Raises:
        SpecError: the specification does not fit the checkout.
    """
    spec = read_spec(specs / f"{name}.yaml")
    copy_checkout(folder)
    delete_files(folder, spec, name)
    delete_lines(folder, spec)
    print("dropped:", *drop_rows(folder, spec), sep="\n  ", flush=True)
    yield from write_pages(folder)
    yield from naming_lines(folder, spec)
    if problem := import_problem(folder):
        yield f"not every module can be imported:\n{problem}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("feature", metavar="FEATURE", choices=sorted(path.stem for path in HERE.glob("*.yaml")))
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tests", action="store_true", help="run the tests of the specification")
    what.add_argument("--default-tier", action="store_true", help="run the default tier")
    options = parser.parse_args()
    folder = options.into.resolve()
    try:
        spec = read_spec(HERE / f"{options.feature}.yaml")
        problems = list(take_out(options.feature, folder))
    except SpecError as error:
        print(f"remove.py: {options.feature}.yaml: {error}", file=sys.stderr)
        return 2
    print(*problems, f"{len(problems)} problems", sep="\n", flush=True)
    failed = bool(problems)
    if options.default_tier or (options.tests and spec.tests):
        failed |= run_tests(folder, [] if options.default_tier else spec.tests) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

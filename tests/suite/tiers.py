"""Which tests a run without paths has: the default tier, those that a change can affect, or all.

The default tier is data: `tests/data/suite/default.txt`, which make_tiers.py writes: the tests that notice the mutants, the README's
commands, and cheap tests that reach the rest. A test that the record does not know is new, and belongs to every tier.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from structure.source import ROOT
from suite import blocks, record

DEFAULT_FILE = ROOT / "tests/data/suite/default.txt"
SELECTING = ("keyword", "lf", "failedfirst", "newfirst", "stepwise")
"""pytest's own options that select tests: with one of them there is no tier."""
BUSY = 0.85
"""Share of the time that the cores of a run are taken to be busy."""
COLLECTION_S = 45.0
"""Seconds of --changed that are left for collecting and for forking workers."""
EVERYWHERE = frozenset({"tests/conftest.py", "pytest.ini", "constraints.txt", "setup.py"})
"""Files that can affect every test."""


def choose(config: pytest.Config) -> Tier | None:
    """Return the tier that the command line asks for, None for everything that pytest itself selects."""
    option = config.option
    selects = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.all or option.record
    if option.record and (option.keyword or any("::" in word for word in config.args)):
        raise pytest.UsageError("--record records whole modules: leave out -k and single tests")
    if option.changed:
        if selects:
            raise pytest.UsageError("--changed chooses the tests: leave out paths, --all and --record")
        if not record.FILE.exists():
            raise pytest.UsageError(f"--changed needs {record.FILE}, which tests/suite/make_tiers.py writes")
        return changed_tier(option.tier_limit, option.processes)
    if selects or config.rootpath.resolve() != ROOT or not record.FILE.exists():
        return None
    if option.markexpr != "not slow" or any(getattr(option, name, None) for name in SELECTING):
        return None
    names = DEFAULT_FILE.read_text().splitlines() if DEFAULT_FILE.exists() else []
    if not names:
        raise pytest.UsageError(f"{DEFAULT_FILE} names no tests; python tests/suite/make_tiers.py writes it")
    return Tier(names, "the default tier; --all runs everything", [])


class Tier:
    """Tests by name, and the new ones."""

    def __init__(self, names: Iterable[str], header: str, summary: list[str], modules: Iterable[str] = ()):
        self.names, self.header, self._summary = frozenset(names), header, summary
        self._modules = frozenset(name.partition("::")[0] for name in self.names) | frozenset(modules)
        self._whole = frozenset(modules)
        self._known = frozenset(record.read_seconds())
        self._known_names: dict[str, set[str]] = defaultdict(set)
        for name in self._known:
            module, _, function = name.partition("[")[0].partition("::")
            self._known_names[module].add(function)
        self._count = 0

    def has_module(self, path: Path) -> bool:
        """Return True if the file has tests of the tier, or is new, or has new tests."""
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if name in self._modules or name not in self._known_names:
            return True
        return bool(function_names(path) - self._known_names[name])

    def select(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Return the tests of the tier, and the others."""
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            module = item.nodeid.partition("::")[0]
            is_new = item.nodeid not in self._known
            (kept if is_new or module in self._whole or item.nodeid in self.names else left_out).append(item)
        self._count = len(kept)
        collected = {item.nodeid for item in items}
        modules = {name.partition("::")[0] for name in collected}
        gone = sorted(name for name in self.names - collected if name.partition("::")[0] in modules)
        if gone:
            self._summary.append(f"not there any more, renew the record: {len(gone)} tests of this tier, {gone[0]}")
        return kept, left_out

    def summary(self) -> list[str]:
        """Return what to print at the end."""
        return [f"{self._count} tests: {self.header}", *self._summary]


def without_function(names: Iterable[str]) -> list[str]:
    """Return the names of tests whose function is not there, or is slow."""
    functions = dict[str, set[str]]()
    for module in {name.partition("::")[0] for name in names}:
        functions[module] = function_names(ROOT / module) if (ROOT / module).exists() else set()
    return [
        name for name in names if name.partition("::")[2].partition("[")[0] not in functions[name.partition("::")[0]]
    ]


def function_names(path: Path) -> set[str]:
    """Return the test functions of a module, methods as Class::name, without importing it; without the slow ones."""

    def names(nodes: Iterable[ast.stmt], prefix: str) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not _is_slow(node):
                yield prefix + node.name

    return set(names(ast.parse(path.read_text()).body, ""))


def _is_slow(node: ast.FunctionDef) -> bool:
    return "pytest.mark.slow" in map(ast.unparse, node.decorator_list)


# ---- what a change can affect


def changed_tier(limit_s: float, processes: int) -> Tier:
    """Return the tests that reach what differs from main, the cheapest for each changed function first."""
    known = record.read()
    base = _base()
    product, helpers, modules = _changed_files(base)
    functions = [(file, function) for file in product for function in _changed_functions(base, file)]
    everywhere = sorted(helpers & EVERYWHERE)
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    users = {name for name in texts if name.startswith("tests/structure/test_")} if product or modules else set()
    for file in sorted(helpers - EVERYWHERE):
        users |= (found := _modules_that_use(file, texts))
        if not found:
            everywhere.append(file)
    # Code outside functions runs at import, before any test: whatever uses the file may depend on it. Kernels have no probes.
    columns = {
        (file, function): known.columns.get((file, function or None)) or known.columns.get((file, None), ())
        for file, function in functions
    }
    reached = {pair: known.tests_that_reach(found).tolist() for pair, found in columns.items()}
    unknown = [f"{file} {function}".strip() for (file, function), tests in reached.items() if not tests]
    for at, name in enumerate(known.tests):
        if (module := name.partition("::")[0]) in users - modules:
            reached.setdefault((module, ""), []).append(at)
    affected = sorted({test for tests in reached.values() for test in tests}, key=lambda test: known.seconds[test])
    budget = max(limit_s - COLLECTION_S, limit_s / 4) * min(processes, 2) * BUSY
    whole = {at for at, name in enumerate(known.tests) if name.partition("::")[0] in modules}
    of_modules = sum(known.seconds[test] for test in whole)
    reached = {pair: [test for test in tests if test not in whole] for pair, tests in reached.items()}
    chosen, spent = _cheapest(reached, affected, known.seconds, budget - of_modules)
    left = [test for test in affected if test not in chosen | whole]
    summary = [
        f"compared with {base}: {len(product)} files of the product changed, with {len(functions)} functions that were there; "
        f"other files: {len(helpers)}; test modules: {len(modules)}; {len(affected)} tests reach or use them",
        f"left out: {len(left)} of those, {sum(known.seconds[test] for test in left):.0f} s of processor time; --all runs everything",
    ]
    if of_modules > budget:
        summary.append(f"the changed test modules alone need {of_modules:.0f} s of processor time")
    if everywhere:
        summary.append(f"can affect any test: {', '.join(everywhere)}; --all runs everything")
    if unknown:
        summary.append(f"no recorded test reaches: {', '.join(unknown[:8])}{' ...' if len(unknown) > 8 else ''}")
    names = [known.tests[test] for test in chosen]
    header = f"what the changes since {base} can affect, about {spent + of_modules:.0f} s of processor time"
    return Tier(names, header, summary, modules)


def _cheapest(reached: dict, affected: list[int], seconds: list[float], budget: float) -> tuple[set[int], float]:
    """Choose in rounds: per changed function its next cheapest test, until the budget is spent."""
    chosen: set[int] = set()
    spent = 0.0
    queues = [sorted(tests, key=lambda test: seconds[test]) for tests in reached.values() if tests]
    while queues and spent < budget:
        for queue in queues:
            while queue and queue[0] in chosen:
                queue.pop(0)
            if queue and spent + seconds[queue[0]] <= budget:
                chosen.add(queue[0])
                spent += seconds[queue.pop(0)]
            else:
                queue.clear()
        queues = [queue for queue in queues if queue]
    return chosen, spent


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise pytest.UsageError("--changed asks git what has changed, and there is no git") from None
    if result.returncode:
        raise pytest.UsageError(f"--changed: git {' '.join(arguments)}: {result.stderr.strip() or result.returncode}")
    return result.stdout


def _base() -> str:
    """Return the commit to compare with: where this branch left main, or the last commit on main itself."""
    known = set(
        _git("for-each-ref", "--format=%(refname:short)", "refs/heads/main", "refs/remotes/origin/main").split()
    )
    for main in ("origin/main", "main"):
        if main in known:
            return _git("merge-base", "HEAD", main).strip()[:12]
    raise pytest.UsageError("--changed compares with main, which this clone does not have: git fetch origin main:main")


def changed_files() -> set[str]:
    """Return all files that differ from main."""
    return set(_changed_names(_base()))


def _changed_names(base: str) -> list[str]:
    lines = _git("diff", "--name-only", "--no-renames", base).splitlines()
    return list(dict.fromkeys([*lines, *_git("ls-files", "--others", "--exclude-standard").splitlines()]))


def _changed_files(base: str) -> tuple[list[str], set[str], set[str]]:
    """Return changed files of the product, changed helpers of tests, and changed test modules."""
    product, helpers, modules = [], set(), set()
    for line in _changed_names(base):
        path = Path(line)
        if line in EVERYWHERE:
            helpers.add(line)
        elif path.parts[0] == "tests":
            if _is_module(line):
                modules |= {line} if (ROOT / path).exists() else set()
            else:
                helpers.add(line)
        elif path.suffix == ".py":
            product.append(line)
        else:
            helpers.add(line)
    return product, helpers, modules


def _changed_functions(base: str, file: str) -> list[str]:
    was_there = _git("ls-tree", "--name-only", base, "--", file)
    old = _hashes(_git("show", f"{base}:{file}") if was_there else "")
    new = _hashes((ROOT / file).read_text() if (ROOT / file).exists() else "")
    return [name for name in old if old[name] != new.get(name)]


def _hashes(source: str) -> dict[str, str]:
    try:
        return blocks.function_hashes(source)
    except SyntaxError:
        return {}


def _modules_that_use(file: str, texts: dict[str, str]) -> set[str]:
    """Return the test modules that import a helper, also by another helper, or name a data file.

    A conftest.py belongs to all modules of its folder. A file that none names belongs to the tests of its folder: those
    next to it or above, or in the folder of tests with the same name. `texts`: all files of the tests.
    """
    found: set[str] = set()
    waiting = [file]
    while waiting:
        path = Path(waiting.pop())
        if path.name == "conftest.py":
            found |= {name for name in texts if path.parent in Path(name).parents}
            continue
        is_name = re.escape(path.name if path.suffix else str(path))
        pattern = re.compile(_import_of(path) if path.suffix == ".py" else is_name, re.MULTILINE)
        new = {name for name, text in texts.items() if pattern.search(text)} - found
        found |= new
        waiting += [name for name in new if not _is_module(name)]
    modules = {name for name in found if _is_module(name)}
    parts = [part for part in Path(file).parts[:-1] if part not in ("tests", "moe_trainer")]
    while not modules and parts:
        folder = Path("tests", *parts)
        modules = {name for name in texts if Path(name).parent == folder and _is_module(name)}
        parts.pop()
    return modules


def _import_of(helper: Path) -> str:
    """Return what an import of a helper looks like: tests import each other by the path below tests/."""
    *package, name = map(re.escape, helper.with_suffix("").parts[1:])
    whole, package = r"\.".join([*package, name]), r"\.".join(package)
    one_of_several = rf"|from {package} import (?:[^(\n]*|\([^)]*)\b{name}\b" if package else ""
    return rf"^\s*(?:(?:from|import) {whole}\b{one_of_several})"


def _is_module(name: str) -> bool:
    return Path(name).match("test_*.py")

"""Record which blocks of the product's code a test runs, in its own process and in all that it starts.

An import hook compiles every module of the product with one store into a shared buffer at the start of each block of a
function. The buffer is a mapped file: forked ranks write into it by themselves, new interpreters find it by an
environment variable and a .pth file of the environment (`install_for_interpreters`). After each test its process reads
the buffer and clears it.

coverage.py was not taken: it keeps one data file per process, which ranks that end with os._exit do not write, and its
tracer runs for every line of every rank; this costs a store per block.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import json
import marshal
import mmap
import os
import sys
from pathlib import Path
from types import CodeType

from structure.source import PACKAGES, ROOT, product_files

VARIABLE = "MOE_TRAINER_TEST_PROBES"
PROBED = (*PACKAGES, "scripts", "pretrain_moe")
BUFFER = "__test_probes__"
"""Name of the buffer, a builtin: the main program of `python -m` has its own globals."""


class Prober(ast.NodeTransformer):
    """Insert a probe at the start of every block of the functions of a module; `blocks` are (function, first line)."""

    def __init__(self, first: int):
        self.first = first
        self.blocks: list[tuple[str, int]] = [("", 1)]
        self._names: list[str] = []
        self._depth = 0

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        at = next((i for i, stmt in enumerate(node.body) if not _comes_first(stmt)), len(node.body))
        node.body.insert(at, self._store(0, 1))
        return ast.fix_missing_locations(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self._names.append(node.name)
        depth, self._depth = self._depth, 0
        self.generic_visit(node)
        self._depth = depth
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            return node  # Triton compiles its source
        self._names.append(node.name)
        self._depth += 1
        node.body = self._block(node.body)
        self._depth -= 1
        self._names.pop()
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if self._depth and isinstance(node, ast.stmt):
            for name in ("body", "orelse", "finalbody"):
                if getattr(node, name, None):
                    setattr(node, name, self._block(getattr(node, name)))
            for handler in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
                handler.body = self._block(handler.body)
            return node
        return super().generic_visit(node)

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        is_start = True
        for at, stmt in enumerate(body):
            if at == 0 and isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant):
                result.append(stmt)
                continue
            if is_start and not isinstance(stmt, (ast.Nonlocal, ast.Global)):
                self.blocks.append((".".join(self._names), stmt.lineno))
                result.append(self._store(len(self.blocks) - 1, stmt.lineno))
                is_start = False
            result.append(self.visit(stmt))
            is_start = is_start or hasattr(stmt, "body")
        return result

    def _store(self, block: int, line: int) -> ast.stmt:
        target = ast.Subscript(ast.Name(BUFFER, ast.Load()), ast.Constant(self.first + block), ast.Store())
        store = ast.Assign([target], ast.Constant(1))
        for node in ast.walk(store):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
        return store


def _comes_first(stmt: ast.stmt) -> bool:
    return (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)) or (
        isinstance(stmt, ast.ImportFrom) and stmt.module == "__future__"
    )


def code_path(folder: Path, file: Path) -> Path:
    """Return where a prepared folder has the code of a file of the product."""
    return (folder / file.relative_to(ROOT).as_posix().replace("/", "+")).with_suffix(".code")


def prepare(folder: Path) -> int:
    """Compile the product with probes into the folder, and write its list of blocks; return their number."""
    blocks: list[tuple[str, str, int]] = []
    firsts: dict[str, int] = {}
    for path in product_files():
        relative = path.relative_to(ROOT).as_posix()
        firsts[relative] = len(blocks)
        prober = Prober(len(blocks))
        tree = prober.visit(ast.parse(path.read_text()))
        code = compile(tree, str(path), "exec", dont_inherit=True)
        code_path(folder, path).write_bytes(marshal.dumps(code))
        blocks += [(relative, function, line) for function, line in prober.blocks]
    (folder / "blocks.json").write_text(json.dumps(blocks))
    (folder / "files.json").write_text(json.dumps(firsts))
    return len(blocks)


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its code with probes."""

    def __init__(self, name: str, path: str, finder: Finder):
        super().__init__(name, path)
        self.finder = finder

    def get_code(self, fullname: str) -> CodeType:
        """Return the prepared code."""
        return marshal.loads(code_path(self.finder.folder, Path(self.path)).read_bytes())


class Finder(importlib.abc.MetaPathFinder):
    """Finds the product's modules of this checkout in a prepared folder."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        self.buffer: mmap.mmap

    def use(self, path: Path) -> None:
        """Write into this file from now on."""
        if not path.exists():
            path.write_bytes(bytes(self.size))
        with path.open("r+b") as file:
            self.buffer = mmap.mmap(file.fileno(), self.size)
        setattr(builtins, BUFFER, self.buffer)
        os.environ[VARIABLE] = str(path)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the product, None for all others."""
        if name.partition(".")[0] not in PROBED:
            return None
        base = ROOT / name.replace(".", "/")
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if code_path(self.folder, file).exists():
                return importlib.util.spec_from_file_location(name, file, loader=Loader(name, str(file), self))
        return None


def loaded_modules() -> list[str]:
    """Return the modules of the product that this process has imported, of which nothing would be recorded."""
    return [name for name in sys.modules if name.partition(".")[0] in PROBED]


def install(buffer: Path) -> Finder:
    """Load the product with probes from now on, which write into the file `buffer` of a prepared folder."""
    folder = buffer.parent
    finder = Finder(folder, (folder / "size").stat().st_size)
    finder.use(buffer)
    sys.meta_path.insert(0, finder)
    return finder


def install_from_environment() -> None:
    """Install the probes in an interpreter that a test has started; called by the .pth file."""
    buffer = Path(os.environ[VARIABLE])
    finder = install(buffer)
    # The main program is not imported: record at least that it ran.
    for argument in sys.orig_argv[1:4]:
        path = Path(argument)
        if path.suffix == ".py" and path.exists() and path.resolve().is_relative_to(ROOT):
            at = json.loads((finder.folder / "files.json").read_text()).get(path.resolve().relative_to(ROOT).as_posix())
            if at is not None:
                finder.buffer[at] = 1


def install_for_interpreters() -> Path:
    """Write the .pth file that installs the probes in every interpreter of this environment; return its path.

    A sitecustomize module would be hidden by those of tests that have their own.
    """
    import sysconfig

    path = Path(sysconfig.get_path("purelib")) / "moe_trainer_test_probes.pth"
    code = f"import os, sys; {VARIABLE!r} in os.environ and (sys.path.append({str(Path(__file__).parents[1])!r}), __import__('suite.probes').probes.install_from_environment(), sys.path.pop())"
    path.write_text(code + "\n")
    return path

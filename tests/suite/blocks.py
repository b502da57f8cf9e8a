"""Blocks and functions of a module's text: where probes are, how a record names them, and what has changed."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable

BUFFER = "__test_probes__"
"""Name of the probes' buffer, a builtin: the main program of `python -m` has its own globals."""


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


def blocks_of(source: str) -> list[tuple[str, int, int]]:
    """Return (function, number in the function, first line) of every block of a module's text."""
    prober = Prober(0)
    prober.visit(ast.parse(source))
    functions = [function for function, _ in prober.blocks]
    return [(function, number, line) for (function, line), number in zip(prober.blocks, numbers(functions))]


def numbers(functions: Iterable[Hashable]) -> list[int]:
    """Return for every block the number of earlier ones of its function."""
    counts: Counter = Counter()
    found = []
    for function in functions:
        found.append(counts[function])
        counts[function] += 1
    return found


def function_spans(source: str, qualified_name: str) -> list[tuple[int, int]]:
    """Return (lines before it, lines up to its end) of every function or class of that name (Class.method)."""
    found: list[tuple[int, int]] = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = (*names, child.name)
                if ".".join(name) == qualified_name:
                    found.append((child.lineno - 1, child.end_lineno or child.lineno))
                visit(child, name)
            else:
                visit(child, names)

    visit(ast.parse(source), ())
    return found


def function_hashes(source: str) -> dict[str, str]:
    """Return a hash of the code of every function of a module's text, and of the rest under ""."""
    hashes: dict[str, str] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = ".".join((*names, child.name))
                hashes[name] = hashes.get(name, "") + _hash(child)  # a property and its setter, or overloads
                child.body = [ast.Pass()]  # signature and decorators belong to the rest too
            elif isinstance(child, ast.ClassDef):
                visit(child, (*names, child.name))

    tree = ast.parse(source)
    visit(tree, ())
    hashes[""] = _hash(tree)
    return hashes


def _hash(node: ast.AST) -> str:
    return hashlib.sha1(ast.dump(node).encode()).hexdigest()[:12]

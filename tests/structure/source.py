"""Reading this repository's own sources: files, module names, imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("arguments", "model_zoo", "moe_trainer")
MODULES = ("pretrain_moe.py", "setup.py")


@dataclass(frozen=True)
class Import:
    """One import of one module: full dotted name, its line, whether it runs when the file is imported."""

    module: str
    line: int
    top_level: bool


def source_files(*folders: str) -> list[Path]:
    """Return every Python file below these folders of the repository, sorted."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def product_files() -> list[Path]:
    """Return every Python file that is installed or run by users, but not the code that exported models bring along.

    That code is data for this program, and transformers runs it outside of it.
    """
    return [path for path in source_files(*PACKAGES, "scripts") if path.parent.name != "remote_code"] + [
        ROOT / name for name in MODULES if (ROOT / name).exists()
    ]


def module_name(path: Path) -> str:
    """Return the dotted name under which a file of the repository is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(node: ast.AST, top_level: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below, with whether it is executed while the module is imported."""
    for child in ast.iter_child_nodes(node):
        yield child, top_level
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        deferred = for_types or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _walk(child, top_level and not deferred)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Resolve `from ..x import y` to the absolute name of x."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join(parts + ([node.module] if node.module else []))


def imports(text: str, module: str = "", is_package: bool = False, known: frozenset[str] = frozenset()) -> list[Import]:
    """List every import in a source text.

    Plain ones, those in functions and under TYPE_CHECKING, and importlib's with a literal name.

    `from package import name` counts as the module package.name when `known` has such a module.
    """
    found = []
    for node, top_level in _walk(ast.parse(text), True):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "import_module", "importlib.import_module") and isinstance(
                node.args[0].value, str
            ):
                names = [node.args[0].value]
        found += [Import(name, node.lineno, top_level) for name in dict.fromkeys(names)]
    return found


@cache
def read_imports(path: Path, known: frozenset[str] = frozenset()) -> list[Import]:
    """List every import of a file; see imports()."""
    return imports(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py", known)


def known_modules() -> frozenset[str]:
    """Return the dotted names of all modules of the product."""
    return frozenset(module_name(path) for path in product_files())

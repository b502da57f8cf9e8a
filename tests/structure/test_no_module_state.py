"""No mutable state at module level: several models, tests and layouts in one process are independent.

What is refused: module-level and class-level mutable values (lists, dicts, sets and calls that may return such),
`global`, augmented assignments at module level, assignments to attributes of modules, classes and functions from
inside functions, mutable default arguments, functions that cache their results. What is allowed: constants as
tuples, frozensets and MappingProxyType, compiled patterns, loggers, frozen records.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from structure.source import ROOT, product_files

# Calls whose result does not change.
FIXED_CALLS = frozenset(
    "tuple frozenset MappingProxyType types.MappingProxyType import_module re.compile logging.getLogger getLogger TypeVar ParamSpec NewType "
    "namedtuple collections.namedtuple int float str bool complex range slice len min max sum abs Path pathlib.Path struct.Struct "
    "Struct Decimal Fraction datetime.timedelta timedelta sorted math.log math.sqrt math.prod torch.Size torch.device np.dtype "
    "numpy.dtype operator.itemgetter operator.attrgetter os.path.join frozenset.union str.maketrans getattr ast.literal_eval "
    "functools.partial tl.constexpr".split()
)
# Calls whose argument may be a mutable display, because the result hides or copies it.
FREEZING_CALLS = frozenset(
    {"tuple", "frozenset", "MappingProxyType", "types.MappingProxyType", "sum", "len", "min", "max"}
)
REMEMBERING = frozenset({"cache", "lru_cache", "functools.cache", "functools.lru_cache"})
# (file, function): what it caches belongs to the machine, not to a run.
MAY_REMEMBER = frozenset(
    {
        (
            "moe_trainer/quantization/scaled_mm.py",
            "_works",
        ),  # whether this device computes such a GEMM: a probe that is not repeated
        ("moe_trainer/quantization/scaled_grouped.py", "_works"),  # the same for GEMMs of groups
        ("moe_trainer/quantization/scaled_grouped.py", "_weight_grads_work"),
        ("moe_trainer/quantization/scaled_grouped.py", "_block_gemms_work"),
    }
)
IMMUTABLE = frozenset({"tuple", "frozenset", "str", "int", "float", "bool"})
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def _is_frozen_class(node: ast.ClassDef) -> bool:
    """Say whether instances of a class cannot change: frozen dataclass, NamedTuple, Enum."""
    frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
    return frozen or any(
        ast.unparse(base).split(".")[-1] in ("NamedTuple", "Enum", "IntEnum", "StrEnum") for base in node.bases
    )


def _makers(tree: ast.Module, names: frozenset[str]) -> frozenset[str]:
    """Return the functions of a module that return one of these names, or a tuple or set of it that cannot change."""
    returns = {node.name: node.returns for node in tree.body if isinstance(node, ast.FunctionDef) and node.returns}
    return frozenset(name for name, node in returns.items() if {*re.findall(r"\w+", ast.unparse(node))} <= names)


@cache
def _frozen_classes(path: Path) -> frozenset[str]:
    """Return the frozen classes of a module, and its functions that return plain values that cannot change."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_frozen_class(node)}
    return classes | _makers(tree, IMMUTABLE)


def _frozen_names(tree: ast.Module) -> frozenset[str]:
    """Return the names in this module of frozen classes, its own and imported ones of ours, and of their makers."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_frozen_class(node)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            path = ROOT / (node.module.replace(".", "/") + ".py")
            if path.exists():
                names |= {alias.asname or alias.name for alias in node.names if alias.name in _frozen_classes(path)}
    return frozenset(names) | _makers(tree, frozenset(names) | IMMUTABLE)


def _mutable_part(value: ast.AST, frozen: frozenset[str]) -> str | None:
    """Return the part of a value that can change, as source text, or None."""
    if isinstance(value, MUTABLE):
        return ast.unparse(value)
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        if name not in FIXED_CALLS and name not in frozen:
            return ast.unparse(value)
        inside = [*value.args, *(keyword.value for keyword in value.keywords)]
        if name in FREEZING_CALLS:
            inside = [part for each in inside for part in (_elements(each))]
        elif name in FIXED_CALLS:
            return None
        return next((part for each in inside if (part := _mutable_part(each, frozen))), None)
    if isinstance(value, (ast.Tuple, ast.BinOp, ast.IfExp, ast.BoolOp, ast.Starred, ast.UnaryOp)):
        children = [child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr)]
        return next((part for child in children if (part := _mutable_part(child, frozen))), None)
    return None


def _elements(value: ast.AST) -> list[ast.AST]:
    """Return what a display contains; a comprehension's element; otherwise the value itself."""
    if isinstance(value, (ast.List, ast.Set)):
        return list(value.elts)
    if isinstance(value, ast.Dict):  # the result of a call after ** is copied
        return [item for key, item in zip(value.keys, value.values) if key or not isinstance(item, ast.Call)]
    if isinstance(value, ast.DictComp):
        return [value.value]
    if isinstance(value, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        return [value.elt]
    return [] if isinstance(value, ast.Call) else [value]


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that run in this body, with those inside if, try, with, for and while."""
    found = []
    for node in body:
        found.append(node)
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            for part in ("body", "orelse", "finalbody"):
                found += _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                found += _statements(handler.body)
    return found


def _find_in_body(body: list[ast.stmt], frozen: frozenset[str], where: str) -> list[str]:
    bad = []
    for node in _statements(body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(target) for target in targets] in (["__all__"], ["__slots__"]):
                continue
            is_field = where != "module" and isinstance(node.value, ast.Call) and not isinstance(node, ast.Assign)
            part = None if is_field else _mutable_part(node.value, frozen)
            if part:
                bad.append(f"{node.lineno}: {where}-level value that can change: {part}")
        elif isinstance(node, ast.AugAssign):
            bad.append(f"{node.lineno}: {where}-level augmented assignment")
        elif isinstance(node, ast.ClassDef):
            bad += _find_in_body(node.body, frozen, "class")
    return bad


def _find_in_functions(tree: ast.Module) -> list[str]:
    """Find `global`, mutable defaults, and assignments to attributes of what the module holds."""
    shared = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            shared |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    bad = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for default in [*function.args.defaults, *(each for each in function.args.kw_defaults if each)]:
            if isinstance(default, MUTABLE) or ast.unparse(default) in ("list()", "dict()", "set()"):
                bad.append(f"{default.lineno}: default argument that can change: {ast.unparse(default)}")
        body = function.body if isinstance(function.body, list) else [function.body]
        local = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
        local |= {
            name.id
            for part in body
            for name in ast.walk(part)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        for node in (each for part in body for each in ast.walk(part)):
            if isinstance(node, ast.Global):
                bad.append(f"{node.lineno}: global {', '.join(node.names)}")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else []:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in shared - local
                ):
                    bad.append(f"{node.lineno}: changes {ast.unparse(target)}, which everybody shares")
    return bad


def _find_caches(tree: ast.Module, file: str) -> list[str]:
    """Find functions with a cache, which is state that everybody shares."""
    return [
        f"{node.lineno}: {node.name} remembers its results"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (file, node.name) not in MAY_REMEMBER
        for decorator in node.decorator_list
        if ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) in REMEMBERING
    ]


def find_violations(text: str, file: str = "") -> list[str]:
    """List, as 'line: problem', all state at module level in a source text. file: its path in the repository."""
    tree = ast.parse(text)
    found = (
        _find_in_body(tree.body, _frozen_names(tree), "module") + _find_in_functions(tree) + _find_caches(tree, file)
    )
    return list(dict.fromkeys(found))


def test_allowed_caches_still_exist():
    for file, function in MAY_REMEMBER:
        assert any(
            f" {function} remembers" in line for line in find_violations((ROOT / file).read_text(encoding="utf-8"))
        ), (
            file,
            function,
        )


def test_modules_have_no_mutable_state():
    # Scripts are programs: they are never imported next to something else.
    bad = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in product_files()
        if path.relative_to(ROOT).parts[0] != "scripts"
        for line in find_violations(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "text",
    [
        "x = []",
        "x: dict[str, int] = {}",
        "x = {1, 2}",
        "x = [i for i in range(3)]",
        "x = dict(a=1)",
        "x = defaultdict(list)",
        "x = ([1], 2)",
        "x = MappingProxyType({'a': [1]})",
        "x = Thing()",
        "x = 0\nx += 1",
        "if True:\n    x = []",
        "try:\n    import y\nexcept ImportError:\n    x = []",
        "class A:\n    x = []",
        "class A:\n    x = None\ndef f():\n    A.x = 1",
        "import y\ndef f():\n    y.z = 1",
        "def f():\n    f.calls += 1",
        "x = 1\ndef f():\n    global x\n    x = 2",
        "def f(a=[]):\n    pass",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\nx = A(1)",
        "import functools\n@functools.lru_cache\ndef _works(a):\n    return a",
        "from functools import lru_cache\nclass A:\n    @lru_cache(maxsize=8)\n    def f(self):\n        return 1",
        "import functools\n@functools.cache\ndef f():\n    return []",
    ],
)
def test_mutable_module_state_is_detected(text):
    assert find_violations(text)


@pytest.mark.parametrize(
    "text",
    [
        "x = (1, 2)",
        "x = frozenset({1, 2})",
        "x = MappingProxyType({'a': (1,)})",
        "x = tuple(i for i in range(3))",
        "x = tuple(import_module(i) for i in y)",
        "import logging\nlog = logging.getLogger(__name__)",
        "__all__ = ['x']",
        "from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass A:\n    b: list = field(default_factory=list)\nx = A((1,))",
        "class A:\n    def f(self):\n        self.x = []",
        "def f(y):\n    y.z = 1\n    x = {}\n    return x",
        "T = list[int] | None",
    ],
)
def test_constants_and_frozen_objects_are_allowed(text):
    assert not find_violations(text)

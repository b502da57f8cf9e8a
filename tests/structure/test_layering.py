"""A room imports only from lower floors, and nothing imports in circles.

Every import counts, also those inside functions and under TYPE_CHECKING. A new room or a new file directly under
moe_trainer/ has to be entered in the table: where something stands is a decision.
"""

import subprocess
import sys

import pytest
from structure.source import PACKAGES, ROOT, imports, imports_of, known_modules, module_name, product_files

GROUND = frozenset({"errors", "exit_codes", "backends", "place", "shape", "arguments"})
MODEL_WING = frozenset({"ops", "parallel", "memory"}) | GROUND
MACHINERY = frozenset({"parallel", "ops"}) | GROUND

# room -> rooms it may import besides itself. `errors`, `exit_codes` and `place` are single files without imports of their own.
ALLOWED = {
    "model_zoo": frozenset(),
    "arguments": frozenset({"model_zoo"}),
    "errors": frozenset(),
    "exit_codes": frozenset(),
    "place": frozenset({"errors"}),
    "backends": frozenset({"errors"}),
    "shape": frozenset({"arguments"}),
    "ops": frozenset(),
    "parallel": frozenset({"errors"}),
    "memory": frozenset({"ops", "parallel"}),
    "pipeline": frozenset({"parallel", "ops", "memory", "shape"}),
    "layers": MODEL_WING,
    "moe": MODEL_WING | {"layers"},
    "model": MODEL_WING | {"layers", "moe"},
    "optim": MACHINERY,
    "data": MACHINERY,
    "checkpoint": MACHINERY,
    "report": MACHINERY,
    "guard": MACHINERY,
    "planner": frozenset({"arguments", "exit_codes", "shape", "parallel"}),
    "initialize": GROUND | {"parallel", "report"},
    "proof": GROUND | {"training", "run", "initialize", "model", "moe", "pipeline", "data", "parallel", "ops", "guard", "checkpoint"},
}
# The roof may import everything: the loop and what belongs to it, and the entry points.
ROOF = ("train", "training", "run", "pretrain_moe", "scripts", "setup")
WITHOUT_TORCH = (
    "arguments", "model_zoo", "moe_trainer.shape", "moe_trainer.place", "moe_trainer.errors", "moe_trainer.exit_codes", "moe_trainer.parallel.groups",
    "moe_trainer.proof.shrink", "moe_trainer.proof.carried", "moe_trainer.proof.definitions", "moe_trainer.proof.low_precision",
    "moe_trainer.proof.random_layouts", "moe_trainer.proof.mapping", "moe_trainer.proof.sizes", "moe_trainer.planner",
)
ONLY_GRID = ("planner",)


def room(module: str) -> str:
    """Return the room of a module: the part after moe_trainer, or the top-level name."""
    parts = module.split(".")
    return parts[1] if parts[0] == "moe_trainer" and len(parts) > 1 else parts[0]


def is_ours(module: str) -> bool:
    return module.split(".")[0] in (*PACKAGES, "pretrain_moe", "scripts", "tests")


def offences(module: str, found: list) -> list[str]:
    """List the imports of a module that go up or across."""
    here = room(module)
    if here in ROOF:
        return []
    if here == "moe_trainer":
        return [f"{module}:{each.line} the package file must stay empty" for each in found]
    if here not in ALLOWED:
        return [f"{module}: enter the room {here!r} into the table of this test"]
    bad = []
    for each in found:
        there = room(each.module)
        if is_ours(each.module) and there != here and there not in ALLOWED[here]:
            bad.append(f"{module}:{each.line} imports {each.module}")
        elif here in ONLY_GRID and there == "parallel" and each.module != "moe_trainer.parallel.grid":
            bad.append(f"{module}:{each.line} imports {each.module}: a plan may only use parallel/grid.py")
        elif module.startswith(WITHOUT_TORCH) and each.module.split(".")[0] in ("torch", "numpy"):
            bad.append(f"{module}:{each.line} imports {each.module}: this room works without it")
    return bad


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return one import circle as a list of modules, or an empty list."""
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> list[str]:
        state[node] = 1
        path.append(node)
        for after in sorted(edges.get(node, ())):
            if state.get(after) == 1:
                return path[path.index(after) :] + [after]
            if after not in state and (loop := visit(after)):
                return loop
        path.pop()
        state[node] = 2
        return []

    for start in sorted(edges):
        if start not in state and (loop := visit(start)):
            return loop
    return []


def test_no_import_goes_up_or_across():
    known = known_modules()
    bad = [line for path in product_files() for line in offences(module_name(path), imports_of(path, known))]
    assert not bad, "\n".join(bad)


def test_no_import_circles():
    known = known_modules()
    edges = {
        module_name(path): {each.module for each in imports_of(path, known) if each.module in known}
        - {module_name(path)}
        for path in product_files()
    }
    loop = circle(edges)
    assert not loop, " -> ".join(loop)


def test_package_files_are_empty():
    """Rooms have no door of their own: an import names the file. The doors are arguments, its rules and model_zoo."""
    doors = {ROOT / door / "__init__.py" for door in ("arguments", "arguments/rules", "model_zoo")}
    filled = [
        path
        for path in product_files()
        if path.name == "__init__.py" and path not in doors and path.read_text().strip()
    ]
    assert not filled


def test_flags_and_counts_work_without_torch():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy'))); import arguments, model_zoo\n"
        "from moe_trainer.shape import counts, flops\n"
        "args = arguments.parse_args(['--preset', 'mixtral_tiny', '--mock-data'])\n"
        "assert counts.count_parameters(args).total > 0 and flops.training_flops(args, 1, 8, 128) > 0\n"
        "from moe_trainer.proof import report, shrink\n"
        "assert shrink.shrink(['--preset', 'mixtral_tiny', '--mock-data', '--expert-model-parallel-size', '4'], 8).cases"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("moe_trainer.ops.x", "def f():\n    import arguments\n"),
        ("moe_trainer.ops.x", "from moe_trainer.parallel.state import Group"),
        (
            "moe_trainer.model.x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moe_trainer.optim.build import y",
        ),
        ("moe_trainer.data.x", "from ..checkpoint import checkpoint"),
        ("moe_trainer.checkpoint.x", "import importlib\nimportlib.import_module('moe_trainer.optim.build')"),
        ("moe_trainer.planner.x", "from moe_trainer.parallel import state"),
        ("moe_trainer.layers.x", "from moe_trainer import train"),
        ("moe_trainer.shape.x", "import torch.nn"),
        ("moe_trainer.cellar.x", "import os"),
        ("arguments.x", "from moe_trainer.shape import counts"),
    ],
)
def test_an_offence_is_caught(module, text):
    known = known_modules() | {"moe_trainer.train", "moe_trainer.parallel.state", "moe_trainer.checkpoint.checkpoint"}
    assert offences(module, imports(text, module, known=known))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("moe_trainer.moe.x", "from moe_trainer.layers.linear import y\nimport torch\nfrom arguments import Arguments"),
        ("moe_trainer.planner.x", "from moe_trainer.parallel import grid"),
        ("moe_trainer.train", "from moe_trainer.model import build\nfrom moe_trainer.optim import build as b"),
        ("moe_trainer.data.x", "from . import loader"),
    ],
)
def test_what_is_allowed_passes(module, text):
    known = known_modules() | {"moe_trainer.parallel.grid"}
    assert not offences(module, imports(text, module, known=known))


def test_a_circle_is_caught():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})

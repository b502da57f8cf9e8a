"""Check the dependency rules: a module imports only from lower levels, and nothing imports in circles.

Every import counts, including those inside functions and under TYPE_CHECKING. A new package, or a new file directly
under moe_trainer/, must be entered in LEVELS.
"""

import re
import subprocess
import sys

import pytest
from structure.source import PACKAGES, ROOT, imports, known_modules, module_name, product_files, read_imports

LEVELS = {
    "errors": 0,
    "exit_codes": 0,
    "io": 0,
    "early_signals": 0,
    "launch_env": 0,
    "user_function": 0,
    "version": 0,
    "backends": 0,
    "model_zoo": 0,
    "participant": 0,
    "drawing": 1,
    "ops": 1,
    "parallel": 1,
    "arguments": 1,
    "declared_module": 1,
    "memory": 2,
    "quantization": 2,
    "pipeline": 2,
    "token_index": 2,
    "layers": 3,
    "optim": 3,
    "data": 3,
    "checkpoint": 3,
    "metrics": 3,
    "resilience": 3,
    "debug": 3,
    "estimate": 3,
    "comparison": 4,
    "moe": 4,
    "model": 5,
    "inference": 6,
    "evaluation": 7,
    "training": 8,
    "api": 9,
    "verification": 9,
    "launch": 10,
    "commands": 11,
    "pretrain_moe": 12,
    "__main__": 12,
    "scripts": 13,
    "setup": 13,
}
MODEL = ("layers", "moe", "model")
MACHINERY = ("pipeline", "optim", "data", "checkpoint", "metrics", "resilience", "debug", "estimate")
LEAVES = ("errors", "exit_codes", "io", "launch_env", "backends")
# Pairs (importer, imported) that the levels alone would allow.
FORBIDDEN = frozenset(
    {(a, b) for a in MODEL for b in MACHINERY}
    | {("training", each) for each in ("layers", "moe", "quantization")}
    | {("arguments", leaf) for leaf in LEAVES}
    | {("ops", leaf) for leaf in LEAVES}
    | {("drawing", leaf) for leaf in LEAVES if leaf != "io"}
)
# Imports inside one level.
SAME_LEVEL = frozenset(
    {
        ("user_function", "errors"),
        ("backends", "errors"),
        ("declared_module", "arguments"),
        ("estimate", "data"),
    }
)
WITHOUT_TORCH = (
    "arguments",
    "model_zoo",
    "moe_trainer.drawing",
    "moe_trainer.estimate",
    "moe_trainer.data.group_packing",
    "moe_trainer.data.space_queue",
    "moe_trainer.launch_env",
    "moe_trainer.errors",
    "moe_trainer.exit_codes",
    "moe_trainer.io",
    "moe_trainer.ops.block_sizes",
    "moe_trainer.token_index",
    "moe_trainer.ops.logit_chunks",
    "moe_trainer.parallel.grid",
    "moe_trainer.parallel.groups",
    "moe_trainer.pipeline.orders",
    "moe_trainer.pipeline.simulate",
    "moe_trainer.pipeline.batch_sizes",
    "moe_trainer.verification.definitions",
    "moe_trainer.verification.kept_flags",
    "moe_trainer.verification.low_precision",
    "moe_trainer.verification.mapping",
    "moe_trainer.verification.random_layouts",
    "moe_trainer.verification.shrink",
    "moe_trainer.verification.sizes",
)


def package(module: str) -> str:
    """Return the package of a module: the part after moe_trainer, or the top-level name."""
    parts = module.split(".")
    return parts[1] if parts[0] == "moe_trainer" and len(parts) > 1 else parts[0]


def is_product_module(module: str) -> bool:
    return module.split(".")[0] in (*PACKAGES, "pretrain_moe", "scripts", "tests")


def may_import(importer: str, imported: str) -> bool:
    """Return True if the dependency rules let one package import another."""
    if importer == imported or (importer, imported) in SAME_LEVEL:
        return True
    if imported not in LEVELS or (importer, imported) in FORBIDDEN:
        return False
    return LEVELS[imported] < LEVELS[importer]


def violations(module: str, found: list) -> list[str]:
    """List the imports of a module that break the dependency rules."""
    importer = package(module)
    if importer == "moe_trainer":
        loaded = [
            each for each in found if each.top_level and (is_product_module(each.module) or each.module == "torch")
        ]
        return [f"{module}:{each.line} the package file must import nothing" for each in loaded]
    if importer not in LEVELS:
        return [f"{module}: enter the package {importer!r} in LEVELS of this test"]
    bad = []
    for each in found:
        if is_product_module(each.module) and not may_import(importer, package(each.module)):
            bad.append(f"{module}:{each.line} imports {each.module}")
        elif module.startswith(WITHOUT_TORCH) and each.module.split(".")[0] in ("torch", "numpy"):
            bad.append(f"{module}:{each.line} imports {each.module}: this module must work without it")
        elif (
            module.startswith(WITHOUT_TORCH)
            and is_product_module(each.module)
            and not each.module.startswith(WITHOUT_TORCH)
        ):
            bad.append(f"{module}:{each.line} imports {each.module}, which may import torch")
    return bad


def find_import_cycle(edges: dict[str, set[str]]) -> list[str]:
    """Return one import cycle as a list of modules, or an empty list."""
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


def test_imports_follow_the_levels():
    known = known_modules()
    bad, pairs = [], set()
    for path in product_files():
        module, found = module_name(path), read_imports(path, known)
        bad += violations(module, found)
        pairs |= {(package(module), package(each.module)) for each in found}
    assert not bad, "\n".join(bad)
    assert pairs >= SAME_LEVEL, f"remove from SAME_LEVEL: {sorted(SAME_LEVEL - pairs)}"


def test_imports_have_no_cycles():
    known = known_modules()
    edges = {
        module_name(path): {each.module for each in read_imports(path, known) if each.module in known}
        - {module_name(path)}
        for path in product_files()
    }
    loop = find_import_cycle(edges)
    assert not loop, " -> ".join(loop)


def test_every_package_is_in_the_dependency_table():
    names = {package(module_name(path)) for path in product_files()} - {"moe_trainer"}
    assert names <= set(LEVELS) and set(LEVELS) - names <= {"setup"}


def test_manual_shows_the_dependency_table():
    text = (ROOT / "docs/design/index.md").read_text(encoding="utf-8")
    found = re.findall(r"^ ?(\d+)  ([\w/|. ]+)$", text, re.MULTILINE)
    shown = {
        name.removesuffix("/").removesuffix(".py"): int(level)
        for level, row in found
        for name in re.findall(r"[\w./]+", row)
    }
    assert shown == {name: level for name, level in LEVELS.items() if name != "setup"}


def test_package_files_are_empty():
    """An import names the file it needs. Few packages have an interface in their package file."""
    with_interface = ("arguments", "arguments/rules", "model_zoo", "moe_trainer")
    interfaces = {ROOT / name / "__init__.py" for name in with_interface}
    filled = [
        path
        for path in product_files()
        if path.name == "__init__.py" and path not in interfaces and path.read_text().strip()
    ]
    assert not filled


def test_only_the_registry_imports_formats_of_checkpoints():
    """Native saving and loading never open the code of another format; see checkpoint/formats.py."""
    known, folder = known_modules(), ROOT / "moe_trainer/checkpoint"
    others = tuple(f"moe_trainer.checkpoint.{path.parent.name}." for path in folder.glob("*/__init__.py"))
    found = {
        (path.stem, each.module)
        for path in folder.glob("*.py")
        for each in read_imports(path, known)
        if f"{each.module}.".startswith(others)
    }
    assert len(others) == 2 and {importer for importer, _ in found} == {"formats"}
    top_level = [each for each in read_imports(folder / "formats.py", known) if each.top_level]
    assert not [each for each in top_level if f"{each.module}.".startswith(others)]


def test_a_run_loads_no_code_of_other_formats():
    known = known_modules()
    edges = {
        module_name(path): {each.module for each in read_imports(path, known) if each.top_level}
        for path in product_files()
    }
    pending, loaded = ["moe_trainer.training.pretrain", "moe_trainer.api"], set()
    while pending:
        if (module := pending.pop()) not in loaded:
            loaded.add(module)
            pending += edges.get(module, ())
    others = ("moe_trainer.checkpoint.hf.", "moe_trainer.checkpoint.megatron_legacy.")
    assert "moe_trainer.checkpoint.formats" in loaded
    assert not [module for module in loaded if module.startswith(others)]


def test_flags_and_estimates_work_without_torch():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy'))); import arguments, model_zoo\n"
        "from moe_trainer.estimate import flops, parameters\n"
        "args = arguments.parse_args(['--preset', 'mixtral_tiny', '--mock-data'])\n"
        "assert parameters.count_parameters(args).total > 0 and flops.training_flops(args, 1, 8, 128) > 0\n"
        "from moe_trainer.verification import report, shrink\n"
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
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moe_trainer.optim.optimizer import y",
        ),
        ("moe_trainer.data.x", "from ..checkpoint import manager"),
        ("moe_trainer.checkpoint.x", "import importlib\nimportlib.import_module('moe_trainer.optim.optimizer')"),
        ("moe_trainer.estimate.x", "from moe_trainer.parallel import state"),
        ("moe_trainer.layers.x", "from moe_trainer.training import pretrain"),
        ("moe_trainer.moe.x", "from moe_trainer.estimate import memory"),
        ("moe_trainer.training.x", "from moe_trainer.verification import parity"),
        ("moe_trainer.training.x", "def f():\n    from moe_trainer.moe.balancing import y"),
        ("moe_trainer.estimate.x", "import torch.nn"),
        ("moe_trainer.new_package.x", "import os"),
        ("arguments.x", "from moe_trainer.estimate import flops"),
    ],
)
def test_layering_violation_is_detected(module, text):
    known = known_modules() | {"moe_trainer.parallel.state", "moe_trainer.checkpoint.manager"}
    assert violations(module, imports(text, module, known=known))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("moe_trainer.moe.x", "from moe_trainer.layers.linear import y\nimport torch\nfrom arguments import Arguments"),
        ("moe_trainer.estimate.x", "from moe_trainer.parallel import grid"),
        ("moe_trainer.training.x", "from moe_trainer.model import build\nfrom moe_trainer.optim import build as b"),
        ("moe_trainer.data.x", "from . import loader"),
    ],
)
def test_allowed_import_is_no_layering_violation(module, text):
    known = known_modules() | {"moe_trainer.parallel.grid"}
    assert not violations(module, imports(text, module, known=known))


def test_import_cycle_is_detected():
    assert find_import_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert not find_import_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})

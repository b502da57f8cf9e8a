"""Each optional library is imported by its one file, lazily, and nothing needs one to be imported.

The choosers import a library inside a function when a flag selects it; a file whose whole purpose is the library
(te.py, lm_eval_model.py, triton_*.py) may import it at its head, because the chooser imports that file in turn.
"""

import subprocess
import sys
from fnmatch import fnmatch

import pytest
from structure.source import ROOT, imports, known_modules, module_name, product_files, read_imports

# library -> (files that may import it, whether at their head)
OWNERS = {
    "transformer_engine": (("moe_trainer/layers/te.py",), True),
    "transformer_engine_torch": (("moe_trainer/layers/te.py",), True),
    "triton": (("moe_trainer/*/triton_*.py",), True),
    "fla": (("moe_trainer/ops/triton_delta_rule.py",), False),
    "lm_eval": (("moe_trainer/evaluation/lm_eval_model.py",), True),
    "deep_ep": (("moe_trainer/moe/dispatch/deepep.py", "moe_trainer/moe/dispatch/hybridep.py"), False),
    "apex": (("moe_trainer/optim/apex.py",), False),
    "amp_C": (("moe_trainer/optim/apex.py",), False),
    "fused_weight_gradient_mlp_cuda": (("moe_trainer/optim/apex.py",), False),
    "wandb": (("moe_trainer/metrics/*.py",), False),
    "tensorboard": (("moe_trainer/metrics/*.py",), False),
    "torch.utils.tensorboard": (("moe_trainer/metrics/*.py",), False),
    "transformers": (
        (
            "moe_trainer/data/*.py",
            "scripts/benchmarks/bench_cpu.py",
            "scripts/benchmarks/bench_baselines.py",
            "scripts/benchmarks/bench_gpu.py",
            "moe_trainer/commands/convert.py",
            "scripts/follow_weights.py",
        ),
        False,
    ),
    "torchtitan": (("scripts/benchmarks/bench_cpu.py", "scripts/benchmarks/bench_baselines.py"), False),
    "tiktoken": (("moe_trainer/data/*.py",), False),
    "zstandard": (("moe_trainer/data/*.py",), False),
    "pyarrow": (("moe_trainer/data/document_sources.py",), False),
    "fsspec": (("moe_trainer/data/object_storage.py",), False),
    "flash_attn": ((), False),
    "megatron": (("moe_trainer/verification/megatron_core/model.py",), False),
}
ONE_FILE_IN_THE_PACKAGE = tuple(library for library in OWNERS if library not in ("triton", "deep_ep"))


def library(module: str) -> str | None:
    """Return the optional library that a module belongs to, or None."""
    for name in sorted(OWNERS, key=len, reverse=True):
        if module == name or module.startswith(name + "."):
            return name
    return None


def find_violations(path: str, found: list) -> list[str]:
    """List the imports of optional libraries that do not belong into this file, or stand at its head."""
    bad = []
    for each in found:
        name = library(each.module)
        if name is None:
            continue
        owners, at_head = OWNERS[name]
        if not any(fnmatch(path, owner) for owner in owners):
            bad.append(f"{path}:{each.line} imports {each.module}; it belongs into {', '.join(owners) or 'no file'}")
        elif each.top_level and not at_head:
            bad.append(f"{path}:{each.line} imports {each.module} at its head; import it in the function that needs it")
    return bad


def test_optional_libraries_stay_with_their_owners():
    bad = [
        line
        for path in product_files()
        for line in find_violations(path.relative_to(ROOT).as_posix(), read_imports(path))
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("name", ONE_FILE_IN_THE_PACKAGE)
def test_one_file_per_library(name):
    users = {
        path.name
        for path in product_files()
        if not {"scripts", "commands"} & {*path.relative_to(ROOT).parts}
        and any(library(each.module) == name for each in read_imports(path))
    }
    assert len(users) <= 1, users


def test_all_modules_import_without_optional_libraries():
    """Import every module of the packages in one process in which the optional libraries do not exist."""
    modules = sorted(
        name
        for name in known_modules()
        if name.split(".")[0] in ("arguments", "model_zoo", "moe_trainer")
        and not name.rsplit(".", 1)[-1].startswith("triton_")
        and name not in ("moe_trainer.layers.te", "moe_trainer.evaluation.lm_eval_model")
    )
    missing = sorted(name for name in OWNERS if "." not in name and name != "triton")
    # None in sys.modules makes an import fail; triton stays, because torch itself may want it.
    code = f"import sys, importlib\nsys.modules.update(dict.fromkeys({missing}))\n"
    code += f"for name in {modules}:\n    importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("moe_trainer/training/pretrain.py", "def f():\n    import wandb"),
        ("moe_trainer/data/tokenizer.py", "import transformers"),
        ("moe_trainer/data/tokenizer.py", "try:\n    from tiktoken import x\nexcept ImportError:\n    x = None"),
        ("moe_trainer/metrics/logger.py", "from torch.utils.tensorboard import SummaryWriter"),
        (
            "moe_trainer/layers/linear.py",
            "def f():\n    import importlib\n    importlib.import_module('transformer_engine.pytorch')",
        ),
        ("moe_trainer/ops/permute.py", "def f():\n    import triton.language as tl"),
    ],
)
def test_misplaced_optional_import_is_detected(path, text):
    assert find_violations(path, imports(text))


def test_allowed_optional_imports_are_not_reported():
    assert not find_violations("moe_trainer/data/tokenizer.py", imports("def f():\n    import transformers"))
    assert not find_violations(
        "moe_trainer/ops/triton_permute.py", imports("import triton\nimport triton.language as tl")
    )
    assert module_name(ROOT / "moe_trainer" / "estimate" / "__init__.py") == "moe_trainer.estimate"

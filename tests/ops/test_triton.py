"""The Triton kernels without a GPU.

In Triton's interpreter against torch, and compiled for the GPUs they are meant for.

Whether a kernel is interpreted is decided when triton is imported, for the full process, so the cases of
tests/ops/triton_cases run in separate processes (one for each of GROUPS: `TRITON_INTERPRET=1 python -m pytest
tests/ops/triton_cases/norm.py` runs one file by hand). Compiling needs neither a GPU nor a driver; it goes all the way
to the machine code.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", reason="triton is not installed: MOE_TRAINER_TEST_WITH=triton bash scripts/test.sh installs it (198 MB)"
)

HERE = Path(__file__).resolve().parent
GROUPS = {  # of about equal duration
    "delta": "delta_chunks delta_rule",
    "model": "model pairs router",
    "others": "absorbed_mla block_gemm cross_entropy grouped_gemm norm paged_copy permute pointwise quantize rope",
}
SHARED, REGISTERS = 232448, 65536  # bytes of a block, registers of a multiprocessor: the same from sm_90 to sm_103
LIMITED = ("shared", "registers", "stack")
SCRIPT = "import sys; sys.path[:0] = ['tests', '.']; from ops.triton_compile import main; main(int(sys.argv[1]))"


def run_in_subprocess(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parents[1],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_kernel_module_has_cases():
    kernels = {
        path.stem.removeprefix("triton_") for path in (HERE.parents[1] / "moe_trainer").glob("*/triton_*.py")
    } - {"blocks"}
    files = {path.stem for path in (HERE / "triton_cases").glob("*.py")} - {"conftest"}
    assert files == kernels | {"model", "pairs"} == set(" ".join(GROUPS.values()).split())


def test_no_function_of_a_kernel_returns_what_may_be_none():
    """Triton 3.6 cannot return None, which an optional pointer is; triton 3.7 can, so that compiling here would not tell."""
    found = []
    for path in (HERE.parents[1] / "moe_trainer").glob("*/triton_*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef) or "triton.jit" not in map(
                ast.unparse, function.decorator_list
            ):
                continue
            names = {
                node.left.id
                for node in ast.walk(function)
                if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and "None" in ast.unparse(node)
            }
            returned = {
                node.id
                for statement in ast.walk(function)
                if isinstance(statement, ast.Return) and statement.value is not None
                for node in (statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value])
                if isinstance(node, ast.Name)
            }
            found += [(path.name, function.name, name) for name in sorted(names & returned)]
    assert found == []


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted_kernels_equal_torch(group):
    cases = [f"{HERE}/triton_cases/{name}.py" for name in GROUPS[group].split()]
    done = run_in_subprocess(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--processes", "1", *cases],
        TRITON_INTERPRET="1",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("capability", [90, 100, 103])
def test_every_kernel_compiles(capability, tmp_path):
    """All of them in one process: torch and triton are imported once.

    Resources must not exceed the recorded ones; to record them again: python -c "<SCRIPT>" CAPABILITY.
    """
    done = run_in_subprocess(["-c", SCRIPT, str(capability)], TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    found, recorded = (
        json.loads(done.stdout),
        json.loads((HERE.parent / "data" / "triton_resources.json").read_text(encoding="utf-8")),
    )
    for name, taken in found["kernels"].items():
        assert taken["shared"] <= SHARED and taken["registers"] * taken["warps"] * 32 <= REGISTERS, (name, taken)
    assert "tensor cores" in found["kernels"]["grouped_gemm rows_kernel *bf16 0"]
    if found["triton"] == recorded["triton"]:  # others compile otherwise: 3.6 spills 8 bytes of quantize both_kernel
        known = recorded[str(capability)]
        assert [name for name, taken in found["kernels"].items() if "*bf16" in name and taken["stack"]] == []
        assert set(found["kernels"]) == set(known)
        more = {
            name: (taken, known[name])
            for name, taken in found["kernels"].items()
            if any(taken[what] > known[name][what] for what in LIMITED)
        }
        assert not more, more

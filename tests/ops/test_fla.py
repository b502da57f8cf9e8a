"""The delta rule of flash-linear-attention in Triton's interpreter against plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip(
    "fla",
    reason="flash-linear-attention is not installed: pip install --no-deps flash-linear-attention fla-core einops",
)


def test_flash_linear_attention_equals_torch():
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "ops.fla_case"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-4000:]

"""TransformerEngine's own Python for processes with emulated devices: out of its wheel, over the extension in libraries/.

The wheel (1 MB) holds the library's Python and nothing compiled. It is not installed, for that would ask for CUDA's libraries; scripts/test.sh
leaves it in the environment's folder `wheels`, and MOE_TRAINER_TRANSFORMER_ENGINE may name another copy.
"""

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emulated_cuda import run

LIBRARIES = Path(__file__).with_name("libraries")
VERSION = json.loads((LIBRARIES / "transformer_engine_torch.json").read_text())["version"]
NEEDS = ("triton", "pydantic", "einops", "packaging")
SETTINGS = (("NVTE_PROJECT_BUILDING", "1"), ("NVTE_FLASH_ATTN", "0"), ("NVTE_FUSED_ATTN", "0"))
"""As while it is built: without looking for CUDA's libraries. Attention is its own in plain torch."""

LOAD = 'load_framework_extension("torch")\n'
EXPORTER = '''"""Without onnxscript."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: NotImplemented
'''


def find_wheel() -> Path:
    """Return the wheel. Skip the test if it or its dependencies are missing."""
    named, name = os.environ.get("MOE_TRAINER_TRANSFORMER_ENGINE"), f"transformer_engine-{VERSION}-py3-none-any.whl"
    found = Path(named) if named else Path(sys.prefix, "wheels", name)
    if not found.exists():
        pytest.skip(
            f"no {found}: MOE_TRAINER_TEST_WITH='triton transformer_engine' bash scripts/test.sh downloads it (1 MB)"
        )
    if found.name != name:
        pytest.fail(f"{found}: the extension is written for {name}, and no other version or file")
    missing = [package for package in NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"TransformerEngine imports {missing[0]}, which is not installed")
    return found


def unpack_wheel() -> Path:
    """Return the folder of the unpacked package in the user's cache, patched to import its extension by name and to need no onnxscript."""
    source = find_wheel()
    key = hashlib.sha256(source.read_bytes() + (LOAD + EXPORTER).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_trainer_tests"
    made = folder / f"transformer_engine-{VERSION}-{key}"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            part = Path(temporary, "part")
            zipfile.ZipFile(source).extractall(part)
            start = part / "transformer_engine/pytorch/__init__.py"
            text = start.read_text()
            assert LOAD in text
            start.write_text(text.replace(LOAD, "import transformer_engine_torch\n"))
            (part / "transformer_engine/pytorch/onnx_extensions.py").write_text(EXPORTER)
            try:
                part.rename(made)
            except OSError:  # another process was first
                assert made.exists()
    return made


def on_device(function: Callable, *args: Any, **how: Any) -> Any:
    """As run.on_device, in processes that have imported the package."""
    return run.on_device(
        function,
        *args,
        library=run.Library("transformer_engine.pytorch", (str(LIBRARIES), str(unpack_wheel())), SETTINGS),
        **how,
    )

"""TransformerEngine's own Python over its extension in torch: tests/gpu/test_te_parity.py on an emulated device.

TRANSFORMER_ENGINE_CHECKOUT names a git checkout of the library (known to work: v2.17.1); without one these tests are skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_cuda.run import HERE, environment

ONNX = '''def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: NotImplemented
'''
LOAD = 'load_framework_extension("torch")\n'


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> tuple[Path, Path]:
    """The checkout, and a folder with its Python, whose extension is imported by name and which does without onnxscript."""
    named = os.environ.get("TRANSFORMER_ENGINE_CHECKOUT")
    if not named:
        pytest.skip("TRANSFORMER_ENGINE_CHECKOUT names no git checkout of TransformerEngine")
    checkout, folder = Path(named), tmp_path_factory.mktemp("transformer_engine")
    shutil.copytree(checkout / "transformer_engine", folder / "transformer_engine", ignore=lambda _, names: [
        name for name in names if "." in name and not name.endswith((".py", ".txt"))])
    start = folder / "transformer_engine/pytorch/__init__.py"
    text = start.read_text()
    assert LOAD in text
    start.write_text(text.replace(LOAD, "import transformer_engine_torch\n"))
    (folder / "transformer_engine/pytorch/onnx_extensions.py").write_text(ONNX)
    about = folder / "transformer_engine.dist-info"
    about.mkdir()
    version = (checkout / "build_tools/VERSION.txt").read_text().strip()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")
    return checkout, folder


def test_parity_with_the_local_layers(package):
    """Linears, norms, attention, whole models with recompute and offload, and products by current scaling."""
    checkout, folder = package
    env = environment(1)
    env |= {"PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(HERE / "libraries"), str(folder), env["PYTHONPATH"]]),
            "TRANSFORMER_ENGINE_SOURCES": str(checkout), "NVTE_PROJECT_BUILDING": "1", "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "gpu/test_te_parity.py", "-k",
                           "not two_gpus and not blockwise and not mxfp8"], cwd=HERE.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout.splitlines()[-1], done.stdout[-6000:] + done.stderr[-2000:]

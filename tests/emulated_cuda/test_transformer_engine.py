"""TransformerEngine's own Python over its extension in torch: tests/gpu/test_te_parity.py on an emulated device.

Where TRANSFORMER_ENGINE_CHECKOUT names a git checkout of the recorded version, the record is held against it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_cuda import te_package
from emulated_cuda.run import HERE, environment


@pytest.mark.parametrize(("capability", "which"), [
    ("9.0", "not two_gpus and not mxfp8 and not nvfp4"),  # which this device has no units for
    ("10.0", "products or mxfp8"),
])
def test_parity_with_the_local_layers(capability, which):
    """Linears, norms, attention, whole models with recompute and offload, and products by every recipe."""
    package, env = te_package.environment(te_package.unpacked()), environment(1)
    package |= {"PYTHONPATH": package["PYTHONPATH"] + os.pathsep + env["PYTHONPATH"], "EMULATED_CUDA_CAPABILITY": capability}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "gpu/test_te_parity.py", "-k", which],
                          cwd=HERE.parent, env=env | package, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout.splitlines()[-1], done.stdout[-6000:] + done.stderr[-2000:]


def test_the_record_is_what_the_sources_declare():
    checkout = os.environ.get("TRANSFORMER_ENGINE_CHECKOUT")
    if not checkout:
        pytest.skip("TRANSFORMER_ENGINE_CHECKOUT names no git checkout of TransformerEngine")
    recorder = te_package.LIBRARIES / "record_transformer_engine.py"
    done = subprocess.run([sys.executable, str(recorder), checkout], check=True, capture_output=True, text=True)
    assert done.stdout == Path(te_package.LIBRARIES, "transformer_engine_torch.json").read_text()

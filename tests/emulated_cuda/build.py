"""Compile the emulated device: once for each version of torch and of its source, kept in the user's cache folder."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")


class CannotBuild(Exception):
    """What is missing."""


def library() -> Path:
    """The compiled library. Raises: CannotBuild, with the reason."""
    if torch.version.cuda is not None:
        raise CannotBuild("the emulated device is for builds of torch without CUDA")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_trainer_tests"
    built = folder / f"emulated_cuda-{key}.so"
    if not built.exists():
        _compile(built)
    return built


def _compile(built: Path) -> None:
    compiler, home = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        raise CannotBuild("the emulated device needs g++")
    if not (home / "include/ATen/core/Tensor.h").exists():
        raise CannotBuild("the emulated device needs torch's headers")
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder, "device.so")
        command = [compiler, "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include",
                   f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(SOURCE), "-o", str(made),
                   f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotBuild(f"the emulated device does not compile against torch {torch.__version__}:\n{done.stderr[-2000:]}")
        made.rename(built)


if __name__ == "__main__":
    print(library())

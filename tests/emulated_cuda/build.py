"""Compile the emulated device: once for each installed torch and each version of its source, kept in the user's cache folder."""

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "device.cpp"


class CannotBuildError(Exception):
    """The device cannot be compiled; the message names what is missing."""


def library() -> Path:
    """The compiled library. Raises: CannotBuildError, with the reason."""
    if os.environ.get("EMULATED_CUDA"):  # this process has the device already
        return Path(os.environ["EMULATED_CUDA_LIBRARY"])
    if torch.version.cuda is not None:
        raise CannotBuildError("the emulated device is for builds of torch without CUDA")
    # The library finds torch's by the folder that it was linked with, which may be that of an environment that is gone.
    torch_of = f"{torch.__version__} {torch.__file__}"
    key = hashlib.sha256(SOURCE.read_bytes() + torch_of.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_trainer_tests"
    built = folder / f"emulated_cuda-{key}.so"
    if not _is_whole(built):
        try:
            _compile(built)
        except OSError as error:
            raise CannotBuildError(
                f"the emulated device cannot be written to {folder} ({error.strerror}): set XDG_CACHE_HOME to a folder that can be"
            ) from error
    return built


def environment(devices: int) -> dict[str, str]:
    """What a Python process needs to have devices. Raises: CannotBuildError."""
    path = (HERE / "site", HERE.parent, HERE.parents[1], os.environ.get("PYTHONPATH"))
    inherited = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }  # conftest.py hides real ones
    return {
        **inherited,
        "EMULATED_CUDA": str(devices),
        "EMULATED_CUDA_LIBRARY": str(library()),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in path if folder),
    }


def _is_whole(built: Path) -> bool:
    """Whether it is there and no other file: one that was cut off, say, when a disk was full."""
    try:
        content = built.read_bytes()
    except OSError:
        return False
    if content[:4] != b"\x7fELF" or b"ec_device_count" not in content:
        return False
    (sections,), (size, number) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    return len(content) >= sections + size * number  # the table of sections is the last thing in it


def _compile(built: Path) -> None:
    compiler, home = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        raise CannotBuildError("the emulated device needs g++")
    if not (home / "include/ATen/core/Tensor.h").exists():
        raise CannotBuildError("the emulated device needs torch's headers")
    built.parent.mkdir(parents=True, exist_ok=True)
    for left in built.parent.glob("build-*"):  # of builds that were killed
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=built.parent) as folder:
        made = Path(folder, "device.so")
        command = [
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-I{home}/include",
            f"-I{home}/include/torch/csrc/api/include",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            str(SOURCE),
            "-o",
            str(made),
            f"-L{home}/lib",
            "-lc10",
            "-ltorch_cpu",
            f"-Wl,-rpath,{home}/lib",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotBuildError(
                f"the emulated device does not compile against torch {torch.__version__}:\n{done.stderr[-2000:]}"
            )
        made.rename(built)


if __name__ == "__main__":
    try:
        print(library())
    except CannotBuildError as error:
        print(f"build.py: {error}", file=sys.stderr)
        sys.exit(2)

"""Shared test set-up: one thread, fixed seeds, and the folder of shared reference facts."""

import gc
import os
import random
from pathlib import Path

import numpy
import pytest
import side_by_side
import torch
import torch._dynamo  # torch imports it at the first optimizer step or checkpoint: here once, instead of in every forked rank
from hypothesis import HealthCheck, settings
from side_by_side import pytest_runtestloop, pytest_terminal_summary  # noqa: F401 - hooks

# Several ranks are forked from this process; a parent that has used more than one OpenMP thread would hang them.
torch.set_num_threads(1)

# No deadline per example: a busy machine is no failure. The same examples every time: a red test must be red again.
# (Nor is it one that it draws examples slowly: too_slow goes by the clock.)
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config):
    """Only tests/gpu, run by itself, sees the machine's GPUs. A backward pass in this process, where there are some, starts a thread for
    each, and no rank that is forked later could run one; commands that tests start would train on them, all ranks on the same."""
    side_by_side.pytest_configure(config)
    given = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    if not all(path.resolve().is_relative_to(GPU_TESTS) for path in given):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multi_gpu") and count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs several CUDA devices, found {count} (only tests/gpu, run by itself, sees any)"))
        elif item.get_closest_marker("gpu") and count < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device (only tests/gpu, run by itself, sees one)"))


def pytest_collection_finish():
    """What all imports left is not looked at by any later collection: in a forked rank each would copy every page of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeds():
    """Every test starts from the same random state and deterministic kernels."""
    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference facts (golden runs, flag lists); tests that need it are skipped without it."""
    given = os.environ.get("MOE_TRAINER_SHARED")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip(f"no reference facts at {folder}; set MOE_TRAINER_SHARED to their folder")
    return folder

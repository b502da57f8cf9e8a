"""Shared test setup: one thread, fixed seeds, and the folder of reference facts."""

import contextlib
import gc
import logging
import os
import random
import signal
from pathlib import Path

import gloo
import numpy
import pytest
import torch
import torch._dynamo  # imported here once: otherwise every forked rank would import it
from hypothesis import HealthCheck, settings

pytest_plugins = ["suite.runner"]

# Several ranks are forked from this process; a parent that has used more than one OpenMP thread would hang them.
torch.set_num_threads(1)
gloo.share_device()

# No deadlines: a busy machine is not a failure. The same examples every time, so that failures are reproducible.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.fixture(scope="module", autouse=True)
def restored_environment():
    """Undo what a module's tests leave in this process: programs that run here set variables and configure their logs."""
    before = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("moe_trainer", "arguments")]
    logs = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, logs):
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers
    own = {"PYTEST_CURRENT_TEST"}  # pytest's own
    for name in os.environ.keys() - before.keys() - own:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name not in own})


def pytest_configure(config):
    """Hide the GPUs unless only tests/gpu is run.

    With visible GPUs a backward pass in this process starts a thread per GPU, after which no forked rank can run one;
    and commands that tests start would train on the GPUs, all ranks on the same one.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        # A rank that a message wakes shall not preempt the sender: gloo's thread would spin on the lock that it holds.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # inherited from nohup or a script's background job; the processes that tests interrupt would inherit it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    paths = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    if not all(path.resolve().is_relative_to(GPU_TESTS) for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif torch.cuda.is_available():
        config.option.processes = 1  # CUDA cannot be used in a fork of a process that has asked for devices


def pytest_collection_modifyitems(items):
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multi_gpu") and count < 2:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"needs several CUDA devices, found {count} (only tests/gpu, run by itself, sees any)"
                )
            )
        elif item.get_closest_marker("gpu") and count < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device (only tests/gpu, run by itself, sees one)"))


def pytest_collection_finish():
    """Exclude all imported objects from garbage collection, which would copy their pages in every forked rank."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # otherwise collections take 4 % of the time


@pytest.fixture(autouse=True)
def seeds():
    """Start every test from the same random state, with deterministic kernels."""
    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference facts (golden runs, flag lists), or skip the test without it."""
    paths = os.environ.get("MOE_TRAINER_SHARED")
    folder = Path(paths) if paths else Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip(f"no reference facts at {folder}; set MOE_TRAINER_SHARED to their folder")
    return folder

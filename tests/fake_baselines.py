"""Baseline models for the test of scripts/benchmarks/bench_cpu.py that hang, lack a package, or die, in separate processes."""

import os
import time


def hangs(model, dtype):
    time.sleep(10000)


def misses_a_package(model, dtype):
    raise ModuleNotFoundError("No module named 'triton'")


def dies(model, dtype):
    steps = iter(range(3))

    def step():
        if next(steps, None) is None:
            os._exit(7)
        return 1.0

    return step, "short-lived"

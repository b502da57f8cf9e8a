"""The allocator setting works: a large block that is freed and allocated again causes no page faults."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from moe_trainer.memory.host_allocator import tune_malloc
if sys.argv[1] == "keep":
    assert tune_malloc()
def touch():
    block = bytearray(64 << 20)
    del block
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how, **env):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**clean, "PYTHONPATH": str(root), **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_blocks_are_reused():
    assert page_faults("keep") < page_faults("plain") / 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_environment_overrides_the_allocator_setting():
    assert page_faults("keep", MALLOC_MMAP_THRESHOLD_="131072") > page_faults("keep")

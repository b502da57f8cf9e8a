"""A flag that acts alone needs nothing but the run: a run of the small preset reads it."""

import sys
from pathlib import Path

from harness import run_ranks

from arguments.container import OPTIONS, SECTIONS
from tests.arguments.test_flags_alone import ALONE, preset_words
from tests.arguments.test_no_dead_flags import READ_BY_ARGUMENTS
from tests.training import forked

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--num-layers 2 --seq-length 32 --global-batch-size 2 --train-iters 1 --eval-iters 1 --eval-interval 1".split()
BEFORE_THE_RUN = {"dry_run", "exit_signal_handler"}  # train_process.main


def read_flags(rank, n, argv, folder):
    """Run a job; return the flags that code of the program reads, not those that it copies or records."""
    names = set()

    def getattribute(self, name):
        code = sys._getframe(1).f_code
        of_program = code.co_filename.startswith((str(ROOT / "moe_trainer"), str(ROOT / "arguments")))
        if of_program and name in OPTIONS and code.co_name not in ("as_dict", "<dictcomp>"):
            names.add(name)
        return object.__getattribute__(self, name)

    for _, cls in SECTIONS:
        cls.__getattribute__ = getattribute
    assert forked._rank(rank, n, argv, folder) == 0
    return names


def test_flags_that_act_alone_are_read(tmp_path):
    """A flag that is not read here is read after another one only: it needs that one (see flag(needs=...))."""
    (read,) = run_ranks(read_flags, 1, [*preset_words(), *SMALL], tmp_path)
    assert len(read) > 300
    assert ALONE - read - READ_BY_ARGUMENTS == BEFORE_THE_RUN

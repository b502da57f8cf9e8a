#!/usr/bin/env python3
"""`moe-trainer doctor` from a checkout: moe_trainer/commands/doctor.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.__main__ import run
from moe_trainer.commands.doctor import Finding, collect_environment, find_package, get_required_names

__all__ = ["Finding", "collect_environment", "find_package", "get_required_names"]

if __name__ == "__main__":
    sys.exit(run("doctor", sys.argv[1:]))

#!/usr/bin/env python3
"""`moe-trainer plan` from a checkout: moe_trainer/commands/plan.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.__main__ import run

if __name__ == "__main__":
    sys.exit(run("plan", sys.argv[1:]))

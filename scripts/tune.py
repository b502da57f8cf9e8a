#!/usr/bin/env python3
"""`moe-trainer tune` from a checkout: moe_trainer/commands/tune.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.__main__ import run

if __name__ == "__main__":
    sys.exit(run("tune", sys.argv[1:]))

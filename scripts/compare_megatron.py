#!/usr/bin/env python3
"""`moe-trainer compare-megatron` from a checkout: moe_trainer/commands/compare_megatron.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.__main__ import run

if __name__ == "__main__":
    sys.exit(run("compare-megatron", sys.argv[1:]))

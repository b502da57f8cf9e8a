#!/usr/bin/env python3
"""`moe-trainer train-tokenizer` from a checkout: moe_trainer/commands/train_tokenizer.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.__main__ import run

if __name__ == "__main__":
    sys.exit(run("train-tokenizer", sys.argv[1:]))

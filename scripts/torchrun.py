"""torchrun with the exit code of the ranks, and their error message last: moe_trainer/launch/torchrun.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.launch.torchrun import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

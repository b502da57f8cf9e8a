"""`moe-trainer launch`: moe_trainer/launch/launch.sh, with the Python that runs this."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from arguments.program import program_name
from moe_trainer.exit_codes import ExitCode

SCRIPT = Path(__file__).resolve().parents[1] / "launch" / "launch.sh"


def main(argv: Sequence[str]) -> int:
    """Become the launcher."""
    bash = shutil.which("bash")
    if bash is None:
        print(f"{program_name('launch')}: bash is not installed; torchrun -m moe_trainer train works", file=sys.stderr)
        return ExitCode.USER_ERROR
    own = {"MOE_TRAINER_PYTHON": sys.executable, "MOE_TRAINER_LAUNCHER": program_name("launch")}
    os.execve(bash, [bash, str(SCRIPT), *argv], {**os.environ, **own})

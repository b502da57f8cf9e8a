"""What the user typed to start this program, for messages: `moe-trainer plan`, or `python scripts/plan.py`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

SCRIPTS = MappingProxyType(
    {
        "train": "pretrain_moe.py",
        "plan": "scripts/plan.py",
        "tune": "scripts/tune.py",
        "prove": "scripts/prove_layout.py",
        "convert": "scripts/convert.py",
        "generate": "scripts/generate.py",
        "evaluate": "scripts/evaluate.py",
        "train-tokenizer": "scripts/train_tokenizer.py",
        "preprocess": "scripts/preprocess_data.py",
        "inspect": "scripts/inspect_data.py",
        "dashboard": "scripts/dashboard.py",
        "compare": "scripts/compare.py",
        "compare-megatron": "scripts/compare_megatron.py",
        "doctor": "scripts/doctor.py",
        "launch": "scripts/launch.sh",
    }
)
"""Commands of `moe-trainer`, and the file of a checkout that runs the same."""
STARTS = ("moe-trainer", "python -m moe_trainer")


def _typed_start() -> str | None:
    """Return what was typed before the name of a command, None if a script was started (moe_trainer/__main__.py)."""
    start, _, name = sys.argv[0].rpartition(" ")
    return start if start in STARTS and name in SCRIPTS else None


def program_name(command: str) -> str:
    """Return the name of the running program for messages; of this command if another program calls its code."""
    if _typed_start() is not None:
        return sys.argv[0]
    running, scripts = Path(sys.argv[0]).name, {Path(script).name for script in SCRIPTS.values()}
    return running if running in scripts else Path(SCRIPTS[command]).name


def typed_command(command: str) -> str:
    """Return the running command as it is typed, without its arguments."""
    return f"python {SCRIPTS[command]}" if _typed_start() is None else sys.argv[0]


def command_line(command: str, words: Sequence[str]) -> str:
    """Return the command line of the running command, for reports."""
    return f"{typed_command(command)} {shlex.join(words)}"


def other_command(command: str) -> str:
    """Return how the user starts another command: its script, if the user works in a checkout without installing it."""
    start = _typed_start()
    if start is None and (Path(__file__).parents[1] / SCRIPTS[command]).is_file():
        return SCRIPTS[command]
    return f"{start or STARTS[0]} {command}"


def as_typed(command: str, text: str) -> str:
    """Return a text that names the script of a command, or the trainer, with what the user types instead."""
    start = _typed_start()
    if start is None:
        return text
    script = re.escape(SCRIPTS[command])

    def rename(match: re.Match[str]) -> str:
        program = start if match["torchrun"] is None else f"{match['torchrun']}-m moe_trainer"
        new = f"{program} {command}{match['words']}"
        return f"{new}  ".ljust(len(match[0])) if match["gap"] else new  # columns stay aligned

    starts = r"(?P<torchrun>torchrun .*?)|python "
    text = re.sub(rf"({starts})?{script}(?P<words>.*?)(?P<gap> {{2,}}|$)", rename, text, flags=re.MULTILINE)
    return re.sub(r"(python )?pretrain_moe\.py", f"{start} train", text)

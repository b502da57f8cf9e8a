"""Print what a plan's report says of a run that does not fit its devices, with the launchers' variables in place of flags.

    python scripts/launch_fixes.py REPORT GPUS_PER_NODE      REPORT: of `pretrain_moe.py --dry-run --report REPORT`
"""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLES = (
    ("--tensor-model-parallel-size", "TP"), ("--pipeline-model-parallel-size", "PP"), ("--pipeline-model-parallel-layout", "LAYOUT"),
    ("--expert-model-parallel-size", "EP"), ("--expert-tensor-parallel-size", "ETP"), ("--context-parallel-size", "CP"),
    ("--micro-batch-size", "MBS"), ("--moe-token-dispatcher-type", "DISPATCHER"), ("--recompute-modules", "RECOMPUTE"),
)
IMPLIED = (
    # by TP, by RECOMPUTE with modules, by RECOMPUTE=full
    ("--sequence-parallel",), ("--recompute-granularity", "selective"), ("--recompute-method", "uniform"), ("--recompute-num-layers", "1"),
)


def as_variables(words: Sequence[str], gpus_per_node: int) -> str:
    """Flags as variables of the launchers, "and flags" with those that have none."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            options.append([])
        options[-1].append(word)
    names = dict(VARIABLES)
    variables, rest = [], []
    for flag, *values in options:
        text = " ".join(values)
        if flag in names:
            variables.append(f"{names[flag]}={shlex.quote(text)}")
        elif flag == "--world-size":
            variables.append(f"NNODES={-(-int(text) // gpus_per_node)}")
        elif (flag, *values) == ("--recompute-granularity", "full"):
            variables.append("RECOMPUTE=full")
        elif (flag, *values) not in IMPLIED:
            rest += [flag, *values]
    return " ".join(variables) + (" and " if variables and rest else "") + (f"flags {shlex.join(rest)}" if rest else "")


def main(path: str, gpus_per_node: str) -> None:
    """Print the error, and a line for each fix."""
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    memory = report["memory"]
    print(f"error: this run DOES NOT FIT the memory of its devices: stage {memory['stage']} needs {-memory['margin_gb']:.2f} GiB more than a device has")
    if report["fixes"]:
        print("       cheapest changes that fit:")
    for fix in report["fixes"]:
        print(f"         {as_variables(fix['flags'], int(gpus_per_node))}: {fix['outcome']}")
    print("       HARDWARE=NAME plans for other devices")


if __name__ == "__main__":
    main(*sys.argv[1:])

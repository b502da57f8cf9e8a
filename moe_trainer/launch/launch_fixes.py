"""Print the changes that make a run fit its devices, as variables of the launchers.

    python launch_fixes.py REPORT GPUS_PER_NODE      REPORT: of `pretrain_moe.py --dry-run --report REPORT`

The launchers print this if a dry run ends with exit code 3.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLES = (
    ("--tensor-model-parallel-size", "TP"),
    ("--pipeline-model-parallel-size", "PP"),
    ("--pipeline-model-parallel-layout", "LAYOUT"),
    ("--expert-model-parallel-size", "EP"),
    ("--expert-tensor-parallel-size", "ETP"),
    ("--context-parallel-size", "CP"),
    ("--micro-batch-size", "MBS"),
    ("--global-batch-size", "GBS"),
    ("--moe-token-dispatcher-type", "DISPATCHER"),
    ("--recompute-modules", "RECOMPUTE"),
)
IMPLIED = (
    ("--sequence-parallel",),  # by TP
    ("--recompute-granularity", "selective"),  # by RECOMPUTE with modules
    ("--recompute-method", "uniform"),  # by RECOMPUTE=full
    ("--recompute-num-layers", "1"),
)


def flags_to_variables(words: Sequence[str], gpus_per_node: int) -> str:
    """Return flags as variables of the launchers; flags without a variable follow as "and flags ..."."""
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


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, metavar="REPORT", help="JSON report of a dry run")
    parser.add_argument("gpus_per_node", type=int, metavar="GPUS_PER_NODE")
    options = parser.parse_args(argv)
    report = json.loads(options.report.read_text(encoding="utf-8"))
    stage, missing_gib = report["memory"]["stage"], -report["memory"]["margin_gb"]
    print(
        f"error: this run DOES NOT FIT the memory of its devices: stage {stage} needs {missing_gib:.2f} GiB more than "
        "a device has"
    )
    if report["fixes"]:
        print("       cheapest changes that fit:")
    for fix in report["fixes"]:
        print(f"         {flags_to_variables(fix['flags'], options.gpus_per_node)}: {fix['outcome']}")
    print("       HARDWARE=NAME plans for other devices")


if __name__ == "__main__":
    main(sys.argv[1:])

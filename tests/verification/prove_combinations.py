"""Pairs of features of docs/combinations.md whose proof needs a device or a library, on emulated devices.

    python tests/verification/prove_combinations.py [FEATURE...]     run the pairs (with one of these features)
    python tests/verification/prove_combinations.py --record         keep the results for the page; without FEATURE all of them

Two or four ranks, a device each, three steps in bf16 from the flags as they are. A graph must give every bit of training without it; a
library (its stand-in) losses and norms of the all-to-all, and formats with random rounding those of one device.
"""

# ruff: noqa: E402 - the path comes before the imports

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import combinations
from emulated_cuda.run import on_device
from memory.graphed import list_differences
from verification.pair_runs import difference, train, train_alone

from moe_trainer.exit_codes import ExitCode

SHARED = Path(os.environ.get("MOE_TRAINER_SHARED", ROOT.parent / "shared"))
SMALL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --seq-length 32 --global-batch-size 8 --train-iters 3 --lr 1e-3 "
    "--cuda-graph-warmup-steps 1 --no-gradient-accumulation-fusion --on-missing-backend fallback "
    "--triton-kernels none"
)
"""Sizes of the model; gradients are summed in the order of graphs, which use hooks. Interpreted kernels take minutes."""
TOLERANCE, TOLERANCE_OF_NOISE = 5e-3, 2e-2
"""Largest relative difference of a loss or gradient norm: tokens' results are summed rank by rank, in bf16; other noise may round."""
MAPPING = re.compile(
    r"--(expert-model-parallel|pipeline-model-parallel|num-virtual-stages-per-pipeline|context-parallel|moe-hierarchical-domain)\S* \d+"
    r"|--overlap-moe-expert-parallel-comm|--use-megatron-fsdp --data-parallel-sharding-strategy \w+ --ckpt-format \w+"
)


def ranks_of(names: tuple[str, ...]) -> int:
    return 4 if {"PP", "VPP", "CP"} & set(names) else 2


def lines(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the command line of a pair, and that of the reference: without the graph, else without the library, else for one device."""
    argv = [*combinations.make_argv(*names), *SMALL.split()]
    if has_graph(names):
        kept = [combinations.without_graph(name) for name in names]
    elif has_library(names):
        kept = [name for name in names if name not in combinations.LIBRARIES]
    else:
        return argv, MAPPING.sub("", " ".join(argv)).split()
    return argv, [*combinations.make_argv(*kept), *SMALL.split()]


def has_graph(names: tuple[str, ...]) -> bool:
    return any(combinations.FEATURES[name].kind == "graphs" for name in names)


def has_library(names: tuple[str, ...]) -> bool:
    return any(name in combinations.LIBRARIES for name in names)


def prove(names: tuple[str, ...], recorded: dict) -> str:
    """Return how a pair agrees with its reference: "bits", "within X", or what differs."""
    argv, reference = lines(names)
    ranks = ranks_of(names)
    one_device = not (has_graph(names) or has_library(names))
    try:
        results = on_device(train, [argv] if one_device else [reference, argv], recorded, ranks=ranks, devices=ranks)
        plain = on_device(train_alone, [reference], recorded) if one_device else None
    except AssertionError as error:
        return f"FAILED: {str(error).strip()[-900:]}"
    different, largest = set(), 0.0
    for runs in results:
        ours, expected = runs[-1], plain[0] if one_device else runs[0]
        if runs is results[0]:  # which has the weights
            different |= set(list_differences(expected.outcome, ours.outcome))
        largest = max(largest, difference(expected.outcome, ours.outcome))
        if has_graph(names) and not ours.captured:
            return "FAILED: nothing was captured"
        if (
            missing := {combinations.LIBRARIES[name] for name in names if name in combinations.LIBRARIES}
            - ours.dispatchers
        ):
            return f"FAILED: {missing} did not run, but {ours.dispatchers}"
    if not different:
        return "bits"
    if has_graph(names) or not largest <= (TOLERANCE_OF_NOISE if combinations.NOISY.intersection(names) else TOLERANCE):
        return f"FAILED: {sorted(different)[:4]} differ, losses and norms by {largest:.1e}"
    return f"within {largest:.0e}"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prove_combinations.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("features", nargs="*", metavar="FEATURE", help=f"one of {', '.join(combinations.FEATURES)}")
    parser.add_argument("--record", action="store_true", help="keep the results for docs/combinations.md")
    options = parser.parse_args(words)
    recorded = json.loads((SHARED / "reference" / "deep_ep_api.json").read_text())
    failed = 0
    for pair in combinations.accepted_pairs():
        if not combinations.needs_device(pair) or (options.features and not set(pair) & set(options.features)):
            continue
        started = time.monotonic()
        found = prove(pair, recorded)
        good = found == "bits" or found.startswith("within")
        failed += not good
        print(f"{' + '.join(pair)}: {found} ({time.monotonic() - started:.1f} s)", flush=True)
        if options.record:
            combinations.record(pair, device=found if good else "FAILED")
    return ExitCode.FAILED if failed else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure every Triton kernel of moe_trainer/ops against the torch operation it stands in for, in one run on one GPU.

    python scripts/bench_kernels.py [--sizes mixtral qwen3-30b] [--kernels norm rope] [--rounds 20] [--write]

Prints milliseconds (medians by CUDA events), how many times as fast the kernel is, and what it reaches: TFLOP/s of the products, GB/s of
inputs and results of the rest. Each pair is checked for the same numbers first. --write also records the table, dated, in
scripts/bench_results/kernels.md. Without a CUDA device there is nothing to measure: exit status 2.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.kernel_pairs import NAMES, SIZES, make
from scripts.measuring import record, stamp

MEASURED = tuple(name for name, _ in SIZES if name not in ("parity", "tiny"))
APART = 2e-2  # bf16: the torch operations round between their steps


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference relative to the norm."""
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def measure(name: str, size: str, rounds: int) -> list[str]:
    """One row of the table."""
    pair = make(name, size, torch.bfloat16, "cuda")
    results = pair.kernel()
    distance = max(apart(one, other) for one, other in zip(results, pair.plain(), strict=True))
    plain, kernel = (pair.milliseconds(function, rounds) for function in (pair.plain, pair.kernel))
    if pair.flops:
        reached = f"{pair.flops / kernel / 1e9:,.0f} TFLOP/s"
    else:
        reached = f"{(pair.moved + sum(each.nbytes for each in results)) / kernel / 1e6:,.0f} GB/s"
    agrees = f"{distance:.0e}" if distance <= APART else f"**{distance:.0e}**"
    return [name, size, f"{plain:.3f}", f"{kernel:.3f}", f"{plain / kernel:.2f}", reached, agrees]


def main() -> int:
    """The table on stdout; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=MEASURED, default=MEASURED)
    parser.add_argument("--kernels", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="add the table to scripts/bench_results/kernels.md")
    args = parser.parse_args()
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        what = "the package triton" if torch.cuda.is_available() else "a CUDA device"
        print(f"bench_kernels.py needs {what}: there is nothing to measure here", file=sys.stderr)
        return 2
    heading = ["kernel", "size", "torch ms", "Triton ms", "times as fast", "reaches", "apart"]
    lines = ["| " + " | ".join(heading) + " |", "|---|---|" + "---:|" * (len(heading) - 2)]
    print("\n".join(lines))
    for name in args.kernels:
        for size in args.sizes:
            lines.append("| " + " | ".join(measure(name, size, args.rounds)) + " |")
            print(lines[-1], flush=True)
            torch.cuda.empty_cache()
    if args.write:
        record("kernels.md", f"## {stamp(torch.cuda.get_device_name())}, bf16\n\n" + "\n".join(lines), more=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

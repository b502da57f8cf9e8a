"""Measure every Triton kernel of moe_trainer/ops against the torch operation it replaces, on one GPU.

    python scripts/benchmarks/bench_kernels.py [--sizes mixtral qwen3-30b] [--kernels norm rope] [--rounds 20] [--write]

Prints milliseconds (medians of CUDA events), the speedup, and the throughput: TFLOP/s of GEMMs, GB/s of inputs and
outputs of other kernels. The results of both are compared first. --write appends the table, with its date, to the
record. Exit code 2 without a CUDA device.
"""

import importlib.util
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_trainer.exit_codes import ExitCode
from scripts.benchmarks.bench_common import Report, make_parser
from scripts.benchmarks.kernel_cases import NAMES, SIZES, make
from scripts.provenance import provenance_line

BENCH_SIZES = tuple(name for name, _ in SIZES if name not in ("parity", "tiny"))
MAX_ERROR = 2e-2  # bf16: the torch operations round between their steps


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm of the reference."""
    actual, reference = actual.double(), reference.double()
    return float((actual - reference).norm() / reference.norm().clamp(min=1e-30))


def measure(name: str, size: str, rounds: int) -> list[str]:
    """Return one row of the table."""
    case = make(name, size, torch.bfloat16, "cuda")
    results = case.kernel()
    error = max(relative_error(*pair) for pair in zip(results, case.plain(), strict=True))
    plain, kernel = (case.milliseconds(function, rounds) for function in (case.plain, case.kernel))
    if case.flops:
        throughput = f"{case.flops / kernel / 1e9:,.0f} TFLOP/s"
    else:
        throughput = f"{(case.input_bytes + sum(result.nbytes for result in results)) / kernel / 1e6:,.0f} GB/s"
    error_text = f"{error:.0e}" if error <= MAX_ERROR else f"**{error:.0e}**"
    return [name, size, f"{plain:.3f}", f"{kernel:.3f}", f"{plain / kernel:.2f}", throughput, error_text]


def main() -> int:
    parser = make_parser(__doc__, "kernels.md")
    parser.add_argument("--sizes", nargs="+", choices=BENCH_SIZES, default=BENCH_SIZES, help="(default: all)")
    parser.add_argument("--kernels", nargs="+", choices=NAMES, default=NAMES, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=20, help="measured calls (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        requirement = "the package triton" if torch.cuda.is_available() else "a CUDA device"
        print(f"bench_kernels.py needs {requirement}", file=sys.stderr)
        return ExitCode.USER_ERROR
    report = Report(f"## {provenance_line(torch.cuda.get_device_name())}, bf16")
    report.start_table("kernel", "size", "torch ms", "Triton ms", "speedup", "throughput", "relative error")
    for name in options.kernels:
        for size in options.sizes:
            report.add_row(*measure(name, size, options.rounds))
            torch.cuda.empty_cache()
    if options.write:
        report.write("kernels.md", append=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

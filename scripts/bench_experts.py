"""Measure the experts' forward and backward: a loop of GEMMs against one grouped GEMM.

    python scripts/bench_experts.py [--threads 1 2] [--write]

Prints milliseconds (median) and the share of this machine's GEMM rate for a few shapes. The rule in
moe_trainer/ops/grouped_gemm.py (prefer_grouped) rests on it.
"""

import statistics
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.ops.expert_mlp import ExpertMLPKernels, ExpertWeights, expert_mlp
from moe_trainer.ops.grouped_gemm import GROUPED_MM
from moe_trainer.ops.pointwise import Activation
from scripts.bench_common import Report, gemm_rate, load_line, make_parser, provenance_line, timed

# tokens, hidden, expert ffn width, experts, top-k
SHAPES = (
    (1024, 256, 512, 8, 2),
    (1024, 256, 512, 32, 4),
    (2048, 512, 1024, 8, 2),
    (2048, 512, 256, 64, 8),
    (512, 512, 256, 64, 8),
)


def measure(shape, dtype: torch.dtype, rounds: int) -> tuple[float, ...]:
    """Return median seconds of a forward and backward, as a loop and grouped.

    The two alternate; every round routes again, as training does.
    """
    tokens, hidden, ffn, num_experts, topk = shape
    x = torch.randn(tokens * topk, hidden).to(dtype).requires_grad_()
    p = torch.rand(tokens * topk).requires_grad_()
    w1 = (torch.randn(num_experts, 2 * ffn, hidden) * 0.02).to(dtype).requires_grad_()
    w2 = (torch.randn(num_experts, hidden, ffn) * 0.02).to(dtype).requires_grad_()
    grad = torch.randn(tokens * topk, hidden).to(dtype)
    skew = torch.randn(num_experts) * 0.15

    def step(counts: tuple[int, ...], gemms: dict) -> None:
        y = expert_mlp(x, p, ExpertWeights(w1, w2), counts, Activation("silu", gated=True), **gemms)
        torch.autograd.grad(y, (x, p, w1, w2), grad)

    times = []
    for _ in range(rounds + rounds // 3):
        for gemms in ({"allow_grouped": False}, {"kernels": ExpertMLPKernels(gemms=GROUPED_MM)}):
            experts = (torch.rand(tokens, num_experts) + skew).topk(topk)[1].flatten()
            counts = tuple(torch.bincount(experts, minlength=num_experts).tolist())
            times.append(timed(lambda counts=counts, gemms=gemms: step(counts, gemms)))
    measured = times[2 * (rounds // 3) :]  # after warm-up rounds
    return statistics.median(measured[::2]), statistics.median(measured[1::2])


def main() -> None:
    parser = make_parser(__doc__, "experts.md")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    report = Report(
        "# Experts, forward and backward",
        "",
        f"{provenance_line()}, {load_line()} (load lowers the shares; loop and grouped GEMM alternate). "
        "Method: scripts/bench_experts.py.",
    )
    shape_columns = "tokens x hidden, ffn, experts/top-k", "rows per expert"
    report.start_table("threads", "dtype", *shape_columns, "loop ms (share)", "grouped ms (share)")
    for threads, dtype in product(options.threads, (torch.float32, torch.bfloat16)):
        torch.set_num_threads(threads)
        rate = gemm_rate(dtype, 1536, rounds=10)
        for shape in SHAPES:
            tokens, hidden, ffn, num_experts, topk = shape
            flops = 3 * 2 * tokens * topk * hidden * ffn * 3
            times = measure(shape, dtype, options.rounds)
            report.add_row(
                threads,
                str(dtype)[6:],
                f"{tokens} x {hidden}, {ffn}, {num_experts}/{topk}",
                tokens * topk // num_experts,
                *(f"{seconds * 1e3:.1f} ({flops / seconds / rate:.0%})" for seconds in times),
            )
    if options.write:
        report.write("experts.md")


if __name__ == "__main__":
    main()

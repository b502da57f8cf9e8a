"""Measure the experts' forward and backward: a loop of GEMMs against one grouped GEMM.

    python scripts/bench_experts.py [--threads 1 2] [--write]

Prints milliseconds (median) and the share of this machine's GEMM rate for a few shapes; --write also records the table
in scripts/bench_results/experts.md. The rule in moe_trainer/ops/grouped_gemm.py (prefer_grouped) rests on it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_trainer.ops.expert_mlp import expert_mlp
from moe_trainer.ops.grouped_gemm import GROUPED_MM
from moe_trainer.ops.pointwise import Activation
from scripts.bench_common import gemm_rate, load_line, provenance_line, write_result

# tokens, hidden, expert ffn width, experts, top-k
SHAPES = (
    (1024, 256, 512, 8, 2),
    (1024, 256, 512, 32, 4),
    (2048, 512, 1024, 8, 2),
    (2048, 512, 256, 64, 8),
    (512, 512, 256, 64, 8),
)


def measure(shape, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """Return median seconds of a forward and backward, as a loop and grouped.

    The two run in turns; every round routes again, as training does.
    """
    tokens, hidden, ffn, num_experts, topk = shape
    x = torch.randn(tokens * topk, hidden).to(dtype).requires_grad_()
    p = torch.rand(tokens * topk).requires_grad_()
    w1 = (torch.randn(num_experts, 2 * ffn, hidden) * 0.02).to(dtype).requires_grad_()
    w2 = (torch.randn(num_experts, hidden, ffn) * 0.02).to(dtype).requires_grad_()
    grad = torch.randn(tokens * topk, hidden).to(dtype)
    activation = Activation("silu", gated=True)
    skew = torch.randn(num_experts) * 0.15
    ways, times = {False: {"allow_grouped": False}, True: {"gemms": GROUPED_MM}}, {False: [], True: []}
    for _ in range(rounds + rounds // 3):
        for grouped, taken in times.items():
            chosen = (torch.rand(tokens, num_experts) + skew).topk(topk)[1]
            counts = tuple(torch.bincount(chosen.flatten(), minlength=num_experts).tolist())
            start = time.perf_counter()
            y = expert_mlp(x, p, w1, w2, counts, activation, **ways[grouped])
            torch.autograd.grad(y, (x, p, w1, w2), grad)
            taken.append(time.perf_counter() - start)
    return tuple(statistics.median(taken[rounds // 3 :]) for taken in times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = [
        "| threads | dtype | tokens x hidden, ffn, experts/top-k | rows per expert | loop ms (share) | grouped ms "
        "(share) |",
        "|---|---|---|---|---|---|",
    ]
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            rate = gemm_rate(dtype, 1536, rounds=10)
            for shape in SHAPES:
                tokens, hidden, ffn, num_experts, topk = shape
                flops = 3 * 2 * tokens * topk * hidden * ffn * 3
                cells = [
                    f"{seconds * 1e3:.1f} ({flops / seconds / rate:.0%})"
                    for seconds in measure(shape, dtype, options.rounds)
                ]
                lines.append(
                    f"| {threads} | {str(dtype)[6:]} | {tokens} x {hidden}, {ffn}, {num_experts}/{topk} "
                    f"| {tokens * topk // num_experts} | {cells[0]} | {cells[1]} |"
                )
                print(lines[-1], flush=True)
    if options.write:
        head = (
            f"# Experts, forward and backward\n\n{provenance_line()}, {load_line()} (shares suffer under load; the "
            "comparison is in turns). See scripts/bench_experts.py.\n\n"
        )
        write_result("experts.md", head + "\n".join(lines))


if __name__ == "__main__":
    main()

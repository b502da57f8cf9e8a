"""Measure one layer's attention over context-parallel ranks on this machine: time and communication of every kind.

    python scripts/bench_context_parallel.py [--length 4096] [--write]

The ranks are processes that talk over gloo, one thread each. Times are medians of the slowest rank, so with more ranks
than idle cores they show the machine, not the method; the bytes are exact and the same everywhere. --write also records
the table in scripts/bench_results/context_parallel.md.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: every rank has one thread

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_trainer.layers.context_parallel import make_core_attention
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import ParallelState
from scripts.bench_common import load_line, provenance_line, write_result

HEADS, GROUPS, WIDTH = 8, 4, 64
CASES = (
    ("one rank", 1),
    ("p2p", 2),
    ("allgather", 2),
    ("a2a", 2),
    ("p2p", 4),
    ("allgather", 4),
    ("a2a", 4),
    ("a2a+p2p", 4),
)
MODEL = SimpleNamespace(softmax_type="vanilla", attention_dropout=0.0, window_attn_skip_freq=None, window_size=None)


class Sent(TorchDispatchMode):
    """Bytes that leave this rank."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.bytes = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("c10d::")
        # of what a rank hands over: to one member, to each of the others, or all parts but its own
        tensor, share = {
            "send": (0, 1.0),
            "_allgather_base_": (1, self.size - 1.0),
            "_reduce_scatter_base_": (1, 1.0 - 1.0 / self.size),
            "alltoall_base_": (1, 1.0 - 1.0 / self.size),
        }.get(name, (None, 0.0))
        if tensor is not None:
            x = args[tensor]
            x = x[0] if isinstance(x, (list, tuple)) else x
            self.bytes += x.numel() * x.element_size() * share
        return function(*args, **(kwargs or {}))


def work(rank: int, size: int, kind: str, length: int, rounds: int, folder: str) -> None:
    """One rank: forward and backward of an attention, and what it cost."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    ps = ParallelState.create(size, rank, cp=size, cp_levels=(2, size // 2) if kind == "a2a+p2p" else None)
    core = make_core_attention(MODEL, 1, head_dim=WIDTH, ps=ps, comm_types=[kind])
    local = SequenceShard(ps.cp).local
    q, k, v = (local(torch.randn(length, 1, heads, WIDTH), 0).requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    grad = torch.randn(q.shape[0], 1, HEADS * WIDTH)
    with Sent(2 if kind == "a2a+p2p" else size) as sent:
        core(q, k, v).backward(grad)
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        core(q, k, v).backward(grad)
        times.append(time.perf_counter() - start)
    torch.save((statistics.median(times), sent.bytes), f"{folder}/{rank}")
    dist.destroy_process_group()


def measure(kind: str, size: int, length: int, rounds: int) -> tuple[float, float]:
    """(seconds of the slowest rank, mean bytes sent by a rank)."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(work, (size, kind, length, rounds, folder), nprocs=size, start_method="fork")
        results = [torch.load(f"{folder}/{rank}") for rank in range(size)]
    return max(seconds for seconds, _ in results), statistics.mean(sent for _, sent in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    lines = [
        "# Attention over context-parallel ranks",
        "",
        f"{provenance_line()}, gloo, {load_line()}. "
        f"One sequence of {args.length} positions, {HEADS} query and {GROUPS} key-value heads of {WIDTH}, fp32, "
        "forward and backward of one layer.",
        "",
        "| kind | ranks | ms | x ranks / one rank | MiB sent per rank |",
        "|---|---|---|---|---|",
    ]
    base = None
    for kind, size in CASES:
        seconds, sent = measure(kind, size, args.length, args.rounds)
        base = base or seconds
        lines.append(f"| {kind} | {size} | {seconds * 1e3:.0f} | {seconds * size / base:.2f} | {sent / 2**20:.2f} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    if args.write:
        write_result("context_parallel.md", text)
    print(text)


if __name__ == "__main__":
    main()

"""Measure one layer's attention over context-parallel ranks on this machine: time and communication of every kind.

    python scripts/bench_context_parallel.py [--length 4096] [--write]

The ranks are processes that communicate over gloo, one thread each. Times are medians of the slowest rank, so with more
ranks than idle cores they show the machine, not the method; the bytes are exact and the same everywhere.
"""

import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.layers.context_parallel import make_core_attention
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import ParallelState
from scripts.bench_common import Report, load_line, make_parser, provenance_line, run_on_ranks, timed

HEADS, GROUPS, HEAD_DIM = 8, 4, 64
CASES = (
    ("one rank", 1),
    *((kind, 2) for kind in ("p2p", "allgather", "a2a")),
    *((kind, 4) for kind in ("p2p", "allgather", "a2a", "a2a+p2p")),
)
MODEL = SimpleNamespace(
    softmax_type="vanilla",
    attention_dropout=0.0,
    window_attn_skip_freq=None,
    window_size=None,
    attention_chunk_size=None,
)


class SentBytes(TorchDispatchMode):
    """Count the bytes that leave this rank, by the sizes that its collectives are called with."""

    def __init__(self, size: int):
        super().__init__()
        self.bytes = 0.0
        # collective -> argument with the tensor; how often it leaves: to one rank, to all others, without our own part
        self._collectives = {
            "send": (0, 1.0),
            "_allgather_base_": (1, size - 1.0),
            "_reduce_scatter_base_": (1, 1.0 - 1.0 / size),
            "alltoall_base_": (1, 1.0 - 1.0 / size),
        }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("c10d::")
        if name in self._collectives:
            index, share = self._collectives[name]
            x = args[index][0] if isinstance(args[index], (list, tuple)) else args[index]
            self.bytes += x.nbytes * share
        return function(*args, **(kwargs or {}))


def run_attention(rank: int, size: int, kind: str, length: int, rounds: int) -> tuple[float, float]:
    """Run attention forward and backward on one rank. Returns the median seconds and the bytes sent."""
    is_two_level = kind == "a2a+p2p"
    ps = ParallelState.create(size, rank, cp=size, cp_levels=(2, size // 2) if is_two_level else None)
    core = make_core_attention(MODEL, 1, head_dim=HEAD_DIM, ps=ps, comm_types=[kind])
    local = SequenceShard(ps.cp).local
    q, k, v = (local(torch.randn(length, 1, heads, HEAD_DIM), 0).requires_grad_() for heads in (HEADS, GROUPS, GROUPS))
    grad = torch.randn(q.shape[0], 1, HEADS * HEAD_DIM)

    def step() -> None:
        core(q, k, v).backward(grad)

    with SentBytes(2 if is_two_level else size) as sent:
        step()
    times = []
    for _ in range(rounds):
        dist.barrier()
        times.append(timed(step))
    return statistics.median(times), sent.bytes


def measure(kind: str, size: int, length: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of the slowest rank and the mean of the bytes sent by a rank."""
    seconds, sent = zip(*run_on_ranks(run_attention, size, kind, length, rounds))
    return max(seconds), statistics.mean(sent)


def main() -> None:
    parser = make_parser(__doc__, "context_parallel.md")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = Report(
        "# Attention over context-parallel ranks",
        "",
        f"{provenance_line()}, gloo, {load_line()}. One sequence of {options.length} positions, {HEADS} query and "
        f"{GROUPS} key-value heads of {HEAD_DIM}, fp32, forward and backward of one layer.",
    )
    report.start_table("kind", "ranks", "ms", "x ranks / one rank", "MiB sent per rank")
    base = None
    for kind, size in CASES:
        seconds, sent = measure(kind, size, options.length, options.rounds)
        base = base or seconds
        report.add_row(kind, size, f"{seconds * 1e3:.0f}", f"{seconds * size / base:.2f}", f"{sent / 2**20:.2f}")
    if options.write:
        report.write("context_parallel.md")


if __name__ == "__main__":
    main()

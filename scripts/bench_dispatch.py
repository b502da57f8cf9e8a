"""Measure what experts on several ranks cost: communication and time of one MoE layer, forward and backward.

    python scripts/bench_dispatch.py [--steps 12] [--write]

The same tokens in all are spread over 1, 2 and 4 gloo ranks (experts over all of them), for 8, 64 and 256 experts at
constant top-k, by all-to-all and by all-gather. All figures come from one run and are meant as ratios:

* sent: elements that leave a rank, all ranks together, per token: what the collectives move, by kind;
* CPU: processor seconds of all ranks and threads per token, which do not depend on how many ranks share a core;
* wall: seconds of a step; four ranks share this machine's cores.

Experts get more, tokens do not: what an expert adds is the reading of its weights and the writing of their gradients.
The table shows what that is per token; it shrinks as tokens per expert grow (--tokens).
"""

import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments.mechanisms.dispatchers import find_dispatcher
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.memory.host_allocator import tune_malloc
from moe_trainer.model.build import attach_dispatcher
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.moe.layer import MoELayer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from scripts.bench_common import Report, load_line, make_parser, provenance_line, run_on_ranks

HIDDEN, FFN, TOPK = 256, 128, 4
RANKS, EXPERTS, DISPATCHERS = (1, 2, 4), (8, 64, 256), ("alltoall", "allgather")
WARM_UP_STEPS = 2
# elements that leave a rank for each element of the tensor given, as a function of the group's size
LEAVES = {
    "all_to_all": lambda size: (size - 1) / size,
    "all_gather": lambda size: size - 1,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_reduce": lambda size: 2 * (size - 1) / size,
}


def make_layer(num_experts: int, dispatcher: str, ps: ParallelState) -> MoELayer:
    model = ModelArgs(num_layers=1, hidden_size=HIDDEN, ffn_hidden_size=FFN, swiglu=True, add_bias_linear=False)
    moe = MoEArgs(
        num_experts=num_experts, moe_router_topk=TOPK, moe_grouped_gemm=True, **find_dispatcher(dispatcher).selected_by
    )
    layer = MoELayer(model, moe, ps, name="layer", layer_number=1, factory=LOCAL)
    attach_dispatcher([layer], build_dispatcher(moe, ps))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.02)
    return layer


def count_sent(sent: Counter) -> None:
    """Add up what leaves this rank from now on. Even splits are assumed: routing is nearly even here."""
    run = collectives.communicate

    def counting(group, operation, x, /, *args, **kwargs):
        if x is not None and x.is_floating_point():
            kind = next(kind for kind in LEAVES if operation.startswith(kind))
            sent[kind] += x.numel() * LEAVES[kind](group.size)
        return run(group, operation, x, *args, **kwargs)

    collectives.communicate = counting


def get_dispatchers(size: int) -> tuple[str, ...]:
    """Return the dispatchers to compare; one rank exchanges nothing, so one is enough."""
    return DISPATCHERS if size > 1 else DISPATCHERS[:1]


def run_layers(rank: int, size: int, num_tokens: int, steps: int) -> dict:
    """Run all layers on one rank. Returns by (experts, dispatcher): wall and CPU seconds, elements sent by kind."""
    tune_malloc()  # as the trainer does
    ps = ParallelState.create(size, rank, ep=size)
    sent: Counter = Counter()
    count_sent(sent)
    results = {}
    for num_experts in EXPERTS:
        layers = {dispatcher: make_layer(num_experts, dispatcher, ps) for dispatcher in get_dispatchers(size)}
        walls, cpus, totals = ({dispatcher: kind() for dispatcher in layers} for kind in (list, list, Counter))
        for step in range(WARM_UP_STEPS + steps):  # alternating, so that a disturbance affects all of them
            x = torch.randn(num_tokens // size, 1, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))
            for dispatcher, layer in layers.items():
                layer.zero_grad(set_to_none=True)
                dist.barrier()
                sent.clear()
                wall, cpu = time.perf_counter(), time.process_time()
                layer(x.requires_grad_()).square().mean().backward()
                dist.barrier()
                if step >= WARM_UP_STEPS:
                    walls[dispatcher].append(time.perf_counter() - wall)
                    cpus[dispatcher].append(time.process_time() - cpu)
                    totals[dispatcher].update(sent)
        for dispatcher, total in totals.items():
            volume = {kind: count / steps for kind, count in total.items()}
            medians = statistics.median(walls[dispatcher]), statistics.median(cpus[dispatcher])
            results[num_experts, dispatcher] = *medians, volume
    return results


def measure(size: int, num_tokens: int, steps: int) -> dict:
    """Return by (experts, dispatcher), per step: wall seconds, CPU seconds of all ranks, elements they sent by kind."""
    by_rank = run_on_ranks(run_layers, size, num_tokens, steps)
    measured = {}
    for key in by_rank[0]:
        walls, cpus, volumes = zip(*(results[key] for results in by_rank))
        measured[key] = max(walls), sum(cpus), sum(map(Counter, volumes), Counter())
    return measured


def add_tables(report: Report, num_tokens: int, steps: int) -> None:
    measured = {(size, *key): value for size in RANKS for key, value in measure(size, num_tokens, steps).items()}
    first_wall, first_cpu, _ = measured[1, EXPERTS[0], "alltoall"]
    volume_unit = sum(measured[2, EXPERTS[0], "alltoall"][2].values())
    names = {(size, dispatcher): dispatcher if size > 1 else "(local)" for size in RANKS for dispatcher in DISPATCHERS}
    sent_columns = "elements sent per token", "by kind", "sent, ratio"
    time_columns = "CPU per token, us", "CPU, ratio", "wall of a step, ms", "wall, ratio"
    report.start_table("EP", "experts", "dispatcher", *sent_columns, *time_columns)
    for (size, num_experts, dispatcher), (wall, cpu, sent) in measured.items():
        total = sum(sent.values())
        kinds = ", ".join(f"{kind} {count / num_tokens:.0f}" for kind, count in sorted(sent.items())) or "none"
        volume = f"{total / num_tokens:.0f}", kinds, f"{total / volume_unit:.2f}"
        cpu_cells = f"{cpu / num_tokens * 1e6:.1f}", f"{cpu / first_cpu:.2f}"
        wall_cells = f"{wall * 1e3:.1f}", f"{wall / first_wall:.2f}"
        report.add_row(size, num_experts, names[size, dispatcher], *volume, *cpu_cells, *wall_cells)
    report.add("", "CPU per token by number of experts at constant top-k, each row relative to its 8 experts:", "")
    report.start_table("EP", "dispatcher", *(f"{count} experts" for count in EXPERTS))
    for size in RANKS:
        for dispatcher in get_dispatchers(size):
            cpus = [measured[size, count, dispatcher][1] for count in EXPERTS]
            report.add_row(size, names[size, dispatcher], *(f"{cpu / cpus[0]:.2f}" for cpu in cpus))


def main() -> None:
    parser = make_parser(__doc__, "dispatch.md")
    text = "tokens of a step, all ranks together"
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help=text)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    report = Report(
        "# Dispatch over ranks",
        "",
        f"{provenance_line()}, gloo, one thread a rank, {load_line()} before the run. Method: "
        "scripts/bench_dispatch.py.",
        "",
        f"One MoE layer, hidden {HIDDEN}, expert width {FFN} (gated), top-{TOPK}, fp32, forward and backward, median "
        f"of {options.steps} steps. Ratios: sent to EP 2 by all-to-all, CPU and wall to one rank with 8 experts.",
    )
    for num_tokens in options.tokens:
        report.add(f"## {num_tokens} tokens a step", "")
        add_tables(report, num_tokens, options.steps)
        report.add("")
    if options.write:
        report.write("dispatch.md")


if __name__ == "__main__":
    main()

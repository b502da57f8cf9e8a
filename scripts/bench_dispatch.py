"""Measure what experts on several ranks cost: communication and time of one MoE layer, forward and backward.

    python scripts/bench_dispatch.py [--steps 12] [--write]

The same tokens in all are spread over 1, 2 and 4 gloo ranks (experts over all of them), for 8, 64 and 256 experts at
constant top-k, by all-to-all and by all-gather. All figures come from one run and are meant as ratios:

* sent: elements that leave a rank, all ranks together, per token: what the collectives move, by kind;
* CPU: processor seconds of all ranks and threads per token, which do not depend on how many ranks share a core;
* wall: seconds of a step; four ranks share this machine's cores.

Experts get more, tokens do not: what an expert adds is the reading of its weights and the writing of their gradients.
The table shows what that is per token; it shrinks as tokens per expert grow (--tokens). --write records the tables in
scripts/bench_results/dispatch.md.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.memory.host_allocator import tune_malloc
from moe_trainer.moe.dispatch.select import attach_dispatcher, build_dispatcher
from moe_trainer.moe.layer import MoELayer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from scripts.bench_common import load_line, provenance_line, write_result

HIDDEN, FFN, TOPK = 256, 128, 4
RANKS, EXPERTS, DISPATCHERS = (1, 2, 4), (8, 64, 256), ("alltoall", "allgather")
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
        num_experts=num_experts, moe_router_topk=TOPK, moe_token_dispatcher_type=dispatcher, moe_grouped_gemm=True
    )
    layer = MoELayer(model, moe, ps, name="layer", layer_number=1, factory=LOCAL)
    attach_dispatcher([layer], build_dispatcher(moe, ps))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.02)
    return layer


def count_sent(sent: Counter) -> None:
    """From now on add up what leaves this rank. Even splits are assumed: routing is nearly even here."""
    run = collectives.communicate

    def counting(group, operation, x, /, *args, **kwargs):
        if x is not None and x.is_floating_point():
            kind = next(kind for kind in LEAVES if operation.startswith(kind))
            sent[kind] += x.numel() * LEAVES[kind](group.size)
        return run(group, operation, x, *args, **kwargs)

    collectives.communicate = counting


def work(rank: int, n: int, folder: str, num_tokens: int, steps: int, queue) -> None:
    torch.set_num_threads(1)
    tune_malloc()  # as the trainer does
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", n), rank=rank, world_size=n)
    ps = ParallelState.create(n, rank, ep=n)
    sent: Counter = Counter()
    count_sent(sent)
    for num_experts in EXPERTS:
        layers = {
            dispatcher: make_layer(num_experts, dispatcher, ps)
            for dispatcher in (DISPATCHERS if n > 1 else ("alltoall",))
        }
        results = {dispatcher: ([], [], Counter()) for dispatcher in layers}
        for step in range(steps + 2):  # in turns, so that a noisy moment hits all of them
            x = torch.randn(num_tokens // n, 1, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))
            for dispatcher, layer in layers.items():
                layer.zero_grad(set_to_none=True)
                dist.barrier()
                sent.clear()
                wall, cpu = time.perf_counter(), time.process_time()
                layer(x.requires_grad_()).square().mean().backward()
                dist.barrier()
                if step >= 2:
                    results[dispatcher][0].append(time.perf_counter() - wall)
                    results[dispatcher][1].append(time.process_time() - cpu)
                    results[dispatcher][2].update(sent)
        for dispatcher, (walls, cpus, total) in results.items():
            volume = {kind: count / steps for kind, count in total.items()}
            queue.put((num_experts, dispatcher, statistics.median(walls), statistics.median(cpus), volume))
    dist.barrier()
    dist.destroy_process_group()


def measure(n: int, num_tokens: int, steps: int) -> dict:
    """Return by (experts, dispatcher), per step: wall seconds, CPU seconds of all ranks, elements they sent by kind."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, n, folder, num_tokens, steps, queue)) for rank in range(n)]
        for process in ranks:
            process.start()
        per_rank = [queue.get(timeout=1800) for _ in range(n * len(EXPERTS) * (len(DISPATCHERS) if n > 1 else 1))]
        for process in ranks:
            process.join()
    measured: dict = {}
    for num_experts, dispatcher, wall, cpu, volume in per_rank:
        walls, cpus, sent = measured.setdefault((num_experts, dispatcher), ([], [], Counter()))
        walls.append(wall)
        cpus.append(cpu)
        sent.update(volume)
    return {key: (max(walls), sum(cpus), sent) for key, (walls, cpus, sent) in measured.items()}


def tables(num_tokens: int, steps: int) -> list[str]:
    measured = {(n, *key): value for n in RANKS for key, value in measure(n, num_tokens, steps).items()}
    first_wall, first_cpu, _ = measured[1, EXPERTS[0], "alltoall"]
    volume_unit = sum(measured[2, EXPERTS[0], "alltoall"][2].values())
    lines = [
        "| EP | experts | dispatcher | elements sent per token | by kind | sent, ratio | CPU per token, us | CPU, "
        "ratio | wall of a step, ms | wall, ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (n, num_experts, dispatcher), (wall, cpu, sent) in measured.items():
        total = sum(sent.values())
        kinds = ", ".join(f"{kind} {count / num_tokens:.0f}" for kind, count in sorted(sent.items())) or "none"
        name = dispatcher if n > 1 else "(local)"
        lines.append(
            f"| {n} | {num_experts} | {name} | {total / num_tokens:.0f} | {kinds} | {total / volume_unit:.2f} | "
            f"{cpu / num_tokens * 1e6:.1f} | {cpu / first_cpu:.2f} | {wall * 1e3:.1f} | {wall / first_wall:.2f} |"
        )
    lines += [
        "",
        "Cost per token by number of experts at constant top-k, CPU, each row relative to its 8 experts:",
        "",
        "| EP | dispatcher | " + " | ".join(f"{count} experts" for count in EXPERTS) + " |",
        "|---|---|" + "---|" * len(EXPERTS),
    ]
    for n in RANKS:
        for dispatcher in DISPATCHERS if n > 1 else ("alltoall",):
            base = measured[n, EXPERTS[0], dispatcher][1]
            ratios = " | ".join(f"{measured[n, count, dispatcher][1] / base:.2f}" for count in EXPERTS)
            lines.append(f"| {n} | {dispatcher if n > 1 else '(local)'} | {ratios} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens of a step, all ranks together"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = [
        f"{provenance_line()}, gloo, one thread a rank, {load_line()} before the run. See scripts/bench_dispatch.py "
        "for what is measured.",
        "",
        f"One MoE layer, hidden {HIDDEN}, expert width {FFN} (gated), top-{TOPK}, fp32, forward and backward, median "
        f"of {options.steps} steps. "
        "Ratios: sent to EP 2 by all-to-all, CPU and wall to one rank with 8 experts.",
        "",
    ]
    text = ["# Dispatch over ranks", "", *head]
    for num_tokens in options.tokens:
        text += [f"## {num_tokens} tokens a step", "", *tables(num_tokens, options.steps), ""]
    print("\n".join(text))
    if options.write:
        write_result("dispatch.md", "\n".join(text))


if __name__ == "__main__":
    main()

"""Measure how much communication each overlap flag hides: 4 gloo ranks over a loopback of limited bandwidth.

    python scripts/bench_overlap.py [--mbit 5000] [--rounds 7] [--cases NAME...] [--write]

Linux with `unshare`, `ip` and `tc`; root, or a kernel that allows user namespaces. The ranks run in a network namespace
of their own, whose loopback is throttled by a token bucket (all ranks share it) and freed again, in turns. Every
variant of a case is a training run in the same four processes, and steps alternate between variants and between the
throttled and the free loopback, so that a disturbance of the machine meets all alike. Medians of step times:

* free, throttled: seconds of a step;
* exposed: throttled - the fastest free step of the case, the communication that the step waits for (all variants of a
  case compute the same, and a free loopback still takes time, which overlap hides, too);
* ratio: exposed communication of the variant / that of the case's first variant, without overlap.

A rank waits for the network without using a core, so hiding works here as it does on a cluster; the compute of four
ranks on few cores does not (step times say nothing about a GPU). --write records the table in
scripts/bench_results/overlap.md.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from queue import Empty

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench_common import load_line, provenance_line, write_result

RANKS = 4
INSIDE = "MOE_TRAINER_BENCH_NAMESPACE"
MODEL = (
    "--num-layers 8 --hidden-size 192 --ffn-hidden-size 384 --num-attention-heads 8 --num-experts 8 --moe-router-topk "
    "2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall "
    "--normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 "
    "--lr-decay-style constant "
    "--train-iters 1000 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --logging-level 30"
).split()
EXCHANGE = (
    "--bf16 --global-batch-size 16 --expert-model-parallel-size 4 --moe-router-load-balancing-type none "
    "--moe-aux-loss-coeff 0"
)
SHARED = f"{EXCHANGE} --moe-shared-expert-intermediate-size 384"
SHARDED = "--global-batch-size 8 --use-distributed-optimizer --ddp-bucket-size 1000000"
PIPELINE = "--global-batch-size 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
# case -> variants: (name, flags); the first one hides nothing
CASES = {
    "gradients": [
        ("all-reduce behind the step (dp 4)", "--global-batch-size 8 --ddp-bucket-size 1000000"),
        ("--overlap-grad-reduce", "--global-batch-size 8 --ddp-bucket-size 1000000 --overlap-grad-reduce"),
    ],
    "distributed optimizer": [
        ("reduce-scatter and all-gather behind the step (dp 4)", SHARDED),
        ("--overlap-grad-reduce", f"{SHARDED} --overlap-grad-reduce"),
        ("--overlap-grad-reduce --overlap-param-gather", f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"),
    ],
    "pipeline messages": [
        ("--no-overlap-p2p-communication (pp 4, vpp 2)", f"{PIPELINE} --no-overlap-p2p-communication"),
        ("overlapped (the default)", PIPELINE),
    ],
    "expert exchange": [
        ("one microbatch after the other (ep 4)", EXCHANGE),
        ("--overlap-moe-expert-parallel-comm", f"{EXCHANGE} --overlap-moe-expert-parallel-comm"),
        (
            "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
            f"{EXCHANGE} --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        ),
    ],
    "shared experts": [
        ("after the routed ones (ep 4)", SHARED),
        ("--moe-shared-expert-overlap", f"{SHARED} --moe-shared-expert-overlap"),
    ],
    "context ring": [
        (
            "--cp-comm-type allgather (cp 4)",
            "--global-batch-size 2 --context-parallel-size 4 --cp-comm-type allgather --seq-length 512 "
            "--max-position-embeddings 512",
        ),
        (
            "--cp-comm-type p2p",
            "--global-batch-size 2 --context-parallel-size 4 --cp-comm-type p2p --seq-length 512 "
            "--max-position-embeddings 512",
        ),
    ],
}
# activations are smaller than gradients: at this part of the bandwidth they too take a good part of a step
SLOWER = {"pipeline messages": 10, "expert exchange": 5, "shared experts": 5}


def enter_namespace(argv: list[str]) -> None:
    """Start this script again in a network namespace of its own. Does not return."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"bench_overlap.py: {', '.join(missing)} not found (packages util-linux and iproute2)")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", *user, sys.executable, __file__, *argv])


def throttle(mbit: int | None) -> None:
    """Limit the loopback of this namespace to so many Mbit/s; None: do not."""
    subprocess.run("tc qdisc del dev lo root".split(), stderr=subprocess.DEVNULL, check=False)
    if mbit is not None:
        burst = max(256_000, mbit * 500)  # bytes of a kernel's tick (4 ms), below which the rate is not reached
        subprocess.run(f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {burst} latency 500ms".split(), check=True)


def work(rank: int, folder: str, case: str, mbit: int, rounds: int, queue) -> None:
    """Train all variants of a case on this rank; rank 0 reports step times by variant, free and throttled."""
    import torch
    import torch.distributed as dist

    from arguments import parse_args
    from moe_trainer.launch_env import LaunchEnv
    from moe_trainer.memory.host_allocator import tune_malloc
    from moe_trainer.training.context import TrainState
    from moe_trainer.training.initialize import make_groups
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    torch.set_num_threads(1)
    tune_malloc()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    runs, steps = {}, 2 * (rounds + 1)
    for name, flags in CASES[case]:
        args = parse_args([*MODEL, *flags.split()], RANKS)
        ps = make_groups(args, LaunchEnv(rank, RANKS, rank, None, None, "benchmark"), timedelta(seconds=600))
        microbatches = args.training.global_batch_size // (args.training.micro_batch_size * ps.dp.size)
        runs[name] = make_run(args, rank, ps, steps), TrainState(), microbatches
    times = {name: ([], []) for name in runs}
    for round_number in range(rounds + 1):
        for throttled, limit in enumerate((None, mbit)):
            if rank == 0:
                throttle(limit)
            for name, (run, state, microbatches) in runs.items():
                dist.barrier()
                start = time.perf_counter()
                train_step(run, state, microbatches)
                dist.barrier()
                state.iteration += 1
                if round_number:
                    times[name][throttled].append(time.perf_counter() - start)
    for run, _, _ in runs.values():
        run.optimizer.wait_params()
    if rank == 0:
        queue.put({name: tuple(map(statistics.median, both)) for name, both in times.items()})
    dist.barrier()
    os._exit(0)  # communicators of several variants: nothing is left to be saved


def measure(case: str, mbit: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Variant -> median seconds of a step, free and throttled."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    throttle(None)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, folder, case, mbit, rounds, queue)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        while True:
            try:
                return queue.get(timeout=1.0)
            except Empty:
                if any(process.exitcode for process in ranks):
                    for process in ranks:
                        process.kill()
                    sys.exit(f"bench_overlap.py: a rank of {case!r} failed")


def rows(case: str, rate: int, found: dict[str, tuple[float, float]]) -> list[str]:
    compute = min(free for free, _ in found.values())
    first = next(iter(found.values()))[1]
    return [
        f"| {case} | {rate} | {name} | {free * 1e3:.0f} | {throttled * 1e3:.0f} | {(throttled - compute) * 1e3:.0f} | "
        f"{(throttled - compute) / (first - compute):.2f} | {throttled / first:.2f} |"
        for name, (free, throttled) in found.items()
    ]


def table(cases: list[str], mbit: int, rounds: int) -> list[str]:
    lines = [
        "| case | Mbit/s | variant | free, ms | throttled, ms | exposed, ms | exposed, ratio | step throttled, ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        rate = mbit // SLOWER.get(case, 1)
        found = measure(case, rate, rounds)
        lines += rows(case, rate, found)
        print(*lines[-len(found) :], sep="\n", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--mbit",
        type=int,
        default=5000,
        help="bandwidth of the loopback that all ranks share; some cases take a part of it",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespace(sys.argv[1:])
    subprocess.run("ip link set lo up".split(), check=True)
    from arguments import parse_args

    for case in options.cases:
        for _, flags in CASES[case]:
            parse_args([*MODEL, *flags.split()], RANKS)
    head = (
        f"{provenance_line()}, {RANKS} gloo ranks of one thread, loopback limited as said, median of {options.rounds} "
        f"rounds, {load_line()} before the run. What is measured: see scripts/bench_overlap.py."
    )
    text = ["# Communication that overlap hides", "", head, "", *table(options.cases, options.mbit, options.rounds)]
    print("\n".join(text))
    if options.write:
        write_result("overlap.md", "\n".join(text))


if __name__ == "__main__":
    main()

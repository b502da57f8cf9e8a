"""Measure how much communication each overlap flag hides: 4 gloo ranks over a loopback of limited bandwidth.

    python scripts/benchmarks/bench_overlap.py [--mbit 5000] [--rounds 7] [--cases NAME...] [--write]

Linux with `unshare`, `ip` and `tc`; root, or a kernel that allows user namespaces. The ranks run in a network namespace
of their own, whose loopback is throttled by a token bucket (all ranks share it) and freed again, in turns. Every
variant of a case is a training run in the same four processes, and steps alternate between variants and between the
throttled and the free loopback, so that a disturbance of the machine meets all alike. Medians of step times:

* free, throttled: seconds of a step;
* exposed: throttled - the fastest free step of the case, the communication that the step waits for (all variants of a
  case compute the same, and a free loopback still takes time, which overlap hides, too);
* ratio: exposed communication of the variant / that of the case's first variant, without overlap.

A rank waits for the network without using a core, so hiding works here as it does on a cluster; the compute of four
ranks on few cores does not (step times say nothing about a GPU).
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks.bench_common import Report, make_parser, run_on_ranks
from scripts.provenance import load_line, provenance_line

RANKS = 4
INSIDE = "MOE_TRAINER_BENCH_NAMESPACE"
MODEL = (
    "--num-layers 8 --hidden-size 192 --ffn-hidden-size 384 --num-attention-heads 8 --num-experts 8 "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-token-dispatcher-type alltoall --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 "
    "--lr-decay-style constant --train-iters 1000 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 2047 --logging-level 30"
).split()
GRADIENTS = "--global-batch-size 8 --ddp-bucket-size 1000000"
SHARDED = f"{GRADIENTS} --use-distributed-optimizer"
PIPELINE = "--global-batch-size 8 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
EXCHANGE = (
    "--bf16 --global-batch-size 16 --expert-model-parallel-size 4 --moe-router-load-balancing-type none "
    "--moe-aux-loss-coeff 0"
)
EXCHANGE_OVERLAP = "--overlap-moe-expert-parallel-comm"
SHARED = f"{EXCHANGE} --moe-shared-expert-intermediate-size 384"
CONTEXT = "--global-batch-size 2 --context-parallel-size 4 --seq-length 512 --max-position-embeddings 512"
# case -> variants: (name, flags); the first one hides nothing
CASES = {
    "gradients": [
        ("all-reduce behind the step (dp 4)", GRADIENTS),
        ("--overlap-grad-reduce", f"{GRADIENTS} --overlap-grad-reduce"),
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
        (EXCHANGE_OVERLAP, f"{EXCHANGE} {EXCHANGE_OVERLAP}"),
        (f"{EXCHANGE_OVERLAP} --delay-wgrad-compute", f"{EXCHANGE} {EXCHANGE_OVERLAP} --delay-wgrad-compute"),
    ],
    "shared experts": [
        ("after the routed ones (ep 4)", SHARED),
        ("--moe-shared-expert-overlap", f"{SHARED} --moe-shared-expert-overlap"),
    ],
    "context ring": [
        ("--cp-comm-type allgather (cp 4)", f"{CONTEXT} --cp-comm-type allgather"),
        ("--cp-comm-type p2p", f"{CONTEXT} --cp-comm-type p2p"),
    ],
}
# activations are smaller than gradients: at this fraction of the bandwidth they too take a good part of a step
BANDWIDTH_DIVISORS = {"pipeline messages": 10, "expert exchange": 5, "shared experts": 5}


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


def run_variants(rank: int, size: int, case: str, mbit: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Train all variants of a case on one rank. Returns the median seconds of a step by variant, free and throttled."""
    import torch.distributed as dist

    from arguments import parse_args
    from moe_trainer.launch_env import LaunchEnv
    from moe_trainer.memory.host_allocator import tune_malloc
    from moe_trainer.training.initialize import make_groups
    from moe_trainer.training.run import TrainState
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    tune_malloc()
    runs, steps = {}, 2 * (rounds + 1)
    for name, flags in CASES[case]:
        args = parse_args([*MODEL, *flags.split()], size)
        ps = make_groups(args, LaunchEnv(rank, size, rank, None, None, "benchmark"), timedelta(seconds=600))
        microbatches = args.training.global_batch_size // (args.training.micro_batch_size * ps.dp.size)
        runs[name] = make_run(args, rank, ps, steps), TrainState(), microbatches
    times = {name: ([], []) for name in runs}
    for round_number in range(rounds + 1):
        for is_throttled, limit in enumerate((None, mbit)):
            if rank == 0:
                throttle(limit)
            for name, (run, state, microbatches) in runs.items():
                dist.barrier()
                start = time.perf_counter()
                train_step(run, state, microbatches)
                dist.barrier()
                state.iteration += 1
                if round_number:
                    times[name][is_throttled].append(time.perf_counter() - start)
    for run, _, _ in runs.values():
        run.optimizer.wait_params()
    return {name: tuple(map(statistics.median, both)) for name, both in times.items()}


def main() -> None:
    parser = make_parser(__doc__, "overlap.md")
    text = "bandwidth of the loopback that all ranks share; some cases take a fraction of it"
    parser.add_argument("--mbit", type=int, default=5000, help=text)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespace(sys.argv[1:])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    subprocess.run("ip link set lo up".split(), check=True)
    from arguments import parse_args

    for case in options.cases:
        for _, flags in CASES[case]:
            parse_args([*MODEL, *flags.split()], RANKS)
    report = Report(
        "# Communication that overlap hides",
        "",
        f"{provenance_line()}, {RANKS} gloo ranks of one thread, loopback limited to the bandwidth of each row, "
        f"median of {options.rounds} rounds, {load_line()} before the run. Method: "
        "scripts/benchmarks/bench_overlap.py.",
    )
    times = "free, ms", "throttled, ms", "exposed, ms", "exposed, ratio", "step throttled, ratio"
    report.start_table("case", "Mbit/s", "variant", *times)
    for case in options.cases:
        mbit = options.mbit // BANDWIDTH_DIVISORS.get(case, 1)
        throttle(None)
        seconds = run_on_ranks(run_variants, RANKS, case, mbit, options.rounds)[0]
        compute, first = min(free for free, _ in seconds.values()), next(iter(seconds.values()))[1]
        for name, (free, throttled) in seconds.items():
            milliseconds = (f"{value * 1e3:.0f}" for value in (free, throttled, throttled - compute))
            exposed = f"{(throttled - compute) / (first - compute):.2f}"
            report.add_row(case, mbit, name, *milliseconds, exposed, f"{throttled / first:.2f}")
    if options.write:
        report.write("overlap.md")


if __name__ == "__main__":
    main()

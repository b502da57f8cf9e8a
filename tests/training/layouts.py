"""Train a tiny model for some steps under any layout, in this process; the results have global names.

    outcome = train([*make_argv("deepseek"), "--tensor-model-parallel-size", "2"], rank, ps)
    differences = compare(one_process_outcome, outcome)        # on rank 0; empty: equal

The work is done by moe_trainer.verification (training_trace.py, compare_runs.py); here are tiny models that use every feature. The padded vocabulary is
the same for every tensor-parallel size up to 8, and the sequence can be sharded for tp x cp up to 8.
"""

import functools
from datetime import timedelta

from arguments import parse_args
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.initialize import make_groups
from moe_trainer.training.run import TrainRun
from moe_trainer.verification import training_trace
from moe_trainer.verification.compare_runs import FP32, Tolerances, compare
from moe_trainer.verification.training_trace import TrainingTrace

__all__ = [
    "FP32", "TrainingTrace", "Tolerances", "make_argv", "assert_equal", "compare", "make_run", "shallow", "train",
    "train_one_process",
]  # fmt: skip

SEQ, VOCAB = 16, 60
MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.2 "
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-grouped-gemm "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 "
    # at eps 1e-8 Adam turns the rounding of a gradient that all but cancels into a full step
    "--adam-eps 1e-5 --lr-decay-style constant --clip-grad 0.5 --attention-dropout 0 --hidden-dropout 0 --mock-data --eval-iters 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --make-vocab-size-divisible-by 8 --transformer-impl local "
    # Triton's interpreter, which stands in for a device, takes seconds for a step
    "--triton-kernels none"
).split()
KINDS = {
    "plain": "",
    "distributed optimizer": "--use-distributed-optimizer",
    "distributed optimizer, overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000",
    "overlapped all-reduce": "--overlap-grad-reduce --ddp-bucket-size 3000",
    "deepseek": "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 "
    "--qk-layernorm --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 8 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --mtp-num-layers 1",
    "capacity": "--moe-expert-capacity-factor 0.7",
    "padded capacity": "--moe-expert-capacity-factor 0.7 --moe-pad-expert-input-to-capacity",
    "per-token loss": "--calculate-per-token-loss",
    "per-token loss, MTP, distributed optimizer": "--calculate-per-token-loss --mtp-num-layers 1 --use-distributed-optimizer",
    "accumulation": "--global-batch-size 16",
    "biases, tied head": "",
}
DROPPED = {
    "biases, tied head": ("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--moe-grouped-gemm")
}


def make_argv(kind: str) -> list[str]:
    """The command line of a kind."""
    return [*(word for word in MODEL if word not in DROPPED.get(kind, ())), *KINDS[kind].split()]


def shallow(argv: list[str]) -> list[str]:
    """The same with two layers instead of four, for features that are equal in every layer; keeps a dense first layer."""
    at = argv.index("--num-layers") + 1
    return [*argv[:at], "2", *(word.replace("([0]*1+[1]*3)", "([0]*1+[1]*1)") for word in argv[at + 1 :])]


def make_run(argv: list[str], rank: int, ps: ParallelState, steps: int, skip: int = 0) -> TrainRun:
    """A run whose batches need no files; `skip` leaves out those of the first steps."""
    return training_trace.make_run(parse_args(argv, ps.world.size), rank, ps, steps, skip)


def train(argv: list[str], rank: int, ps: ParallelState, steps: int = 2, device: str = "cpu") -> TrainingTrace:
    """Train from the named initialisation. Tensors of the result are whole, and on rank 0 only."""
    return training_trace.train(parse_args(argv, ps.world.size), rank, ps, steps, device=device)


@functools.cache
def train_one_process(*argv: str) -> TrainingTrace:
    """Train on one process; every command line once per test process."""
    return train(list(argv), 0, ParallelState.single())


def assert_equal(
    outcome: TrainingTrace, expected: TrainingTrace, case: object = "", tolerances: Tolerances | None = None
) -> None:
    """Compare two traces and list the first quantities that differ."""
    differences = compare(expected, outcome, *([tolerances] if tolerances else []))
    assert not differences, f"{case}: {len(differences)} quantities differ, first\n" + "\n".join(
        map(str, differences[:8])
    )


def create_groups(argv: list[str], rank: int, n: int) -> ParallelState:
    """Create the groups of a command line. Collective."""
    return make_groups(parse_args(argv, n), LaunchEnv(rank, n, rank, None, None, "test"), timedelta(seconds=120))


def train_ranks(rank: int, n: int, argvs: list[list[str]], steps: int = 2, device: str = "cpu") -> list[TrainingTrace]:
    """For run_ranks and on_device: several trainings on the same ranks, one after the other, each with the mapping of its command line."""
    return [train(argv, rank, create_groups(argv, rank, n), steps, device) for argv in argvs]

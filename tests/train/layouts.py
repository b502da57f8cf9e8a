"""Training a tiny model for some steps under any layout, in this process: what came out, under global names."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

import arguments
from moe_trainer.data.loader import Batch
from moe_trainer.initialize import Runtime
from moe_trainer.model.weights import export_named_weights, gather_named
from moe_trainer.parallel.state import ParallelState
from moe_trainer.place import Place
from moe_trainer.run import Run, TrainState, build_run
from moe_trainer.train import train_step

SEQ, VOCAB = 12, 47
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.2 "
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-grouped-gemm "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 "
    # at eps 1e-8 Adam turns the rounding of a gradient that all but cancels into a step of its own
    "--adam-eps 1e-5 --lr-decay-style constant --clip-grad 0.5 --attention-dropout 0 --hidden-dropout 0 --mock-data --eval-iters 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --transformer-impl local"
).split()
KINDS = {
    "plain": "",
    "distributed optimizer": "--use-distributed-optimizer",
    "distributed optimizer, overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000",
    "overlapped all-reduce": "--overlap-grad-reduce --ddp-bucket-size 3000",
    "deepseek": "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 "
    "--qk-layernorm --moe-layer-freq ([0]*1+[1]*1) --moe-shared-expert-intermediate-size 8 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --mtp-num-layers 1",
    "capacity": "--moe-expert-capacity-factor 0.7",
    "padded capacity": "--moe-expert-capacity-factor 0.7 --moe-pad-expert-input-to-capacity",
    "per-token loss": "--calculate-per-token-loss",
    "per-token loss, MTP, distributed optimizer": "--calculate-per-token-loss --mtp-num-layers 1 --use-distributed-optimizer",
    "accumulation": "--global-batch-size 16",
    "biases, tied head": "",
}
DROPPED = {"biases, tied head": ("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--moe-grouped-gemm")}


@dataclass(frozen=True)
class Outcome:
    """Of every step the logged losses, dropped tokens and gradient norm; of the first one all gradients; weights and expert
    bias at the end. Tensors on rank 0 only."""

    losses: list[dict[str, float]]
    grad_norms: list[float]
    dropped: list[int]
    grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def argv_of(kind: str) -> list[str]:
    """The command line of a kind."""
    return [*(word for word in MODEL if word not in DROPPED.get(kind, ())), *KINDS[kind].split()]


def make_run(argv: list[str], rank: int, ps: ParallelState, steps: int, skip: int = 0) -> Run:
    """A run whose batches need no files; `skip` leaves out those of the first steps."""
    args = arguments.parse_args(argv, world_size=ps.world.size)
    place = Place(rank, ps.world.size, rank, None, None, "test")
    tokenizer = SimpleNamespace(vocab_size=VOCAB + 1)
    run = build_run(args, Runtime(place, torch.device("cpu"), ps), tokenizer)
    return replace(run, train_batches=iter(batches(run, skip, steps)))


def batches(run: Run, first: int, steps: int) -> list[Batch]:
    """This rank's micro-batches, cut from the global ones as the loader does it; some labels carry no loss."""
    training, dp = run.args.training, run.ps.dp
    micro, size = training.micro_batch_size, training.global_batch_size
    found = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens, labels = torch.randint(0, VOCAB, (2, size, SEQ), generator=generator)
        # equal first tokens have equal scores up to rounding: which of them a full expert keeps would be a matter of chance
        tokens[:, 0] = torch.arange(size)
        mask = (torch.rand(size, SEQ, generator=generator) < 0.8).float()
        for start in range(dp.rank * micro, size, dp.size * micro):
            cut = slice(start, start + micro)
            found.append(Batch(tokens[cut], labels[cut], mask[cut], torch.arange(SEQ).expand(micro, -1)))
    return found


def train(argv: list[str], rank: int, ps: ParallelState, steps: int = 3) -> Outcome:
    """Train from the named initialisation."""
    run, state, losses, norms, dropped, grads = make_run(argv, rank, ps, steps), TrainState(), [], [], [], {}
    microbatches = run.args.training.global_batch_size // (run.args.training.micro_batch_size * ps.dp.size)
    step = run.optimizer.step

    def record_and_step(**rates):
        if state.iteration == 0:
            run.grads.gather()
            grads.update((name, grad.clone()) for name, grad in gather_named(run.chunks, ps, lambda param: param.main_grad))
        return step(**rates)

    run.optimizer.step = record_and_step
    for _ in range(steps):
        result = train_step(run, state, microbatches)
        state.iteration += 1
        losses.append(result.losses)
        norms.append(result.grad_norm)
        dropped.append(result.dropped_tokens)
    run.optimizer.wait_params()
    weights = {name: tensor.clone() for name, tensor in export_named_weights(run.chunks, ps)}
    return Outcome(losses, norms, dropped, grads, weights)

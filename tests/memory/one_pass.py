"""Forward and backward of a small model on two microbatches, with all results, to compare ways to keep activations."""

import torch
from torch import Tensor

from arguments import Arguments, parse_args
from moe_trainer.model.build import build_chunks
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.balancing import start_iteration
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState

VOCAB, SEQ, BATCH = 48, 16, 2
MODEL = (
    "--num-layers 3 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --init-method-std 0.2 --num-experts 4 "
    f"--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --seq-length {SEQ} --max-position-embeddings {SEQ} "
    f"--micro-batch-size {BATCH} --global-batch-size 4 --train-iters 3 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 "
    f"--mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size {VOCAB} --on-missing-backend fallback"
)
GROUPED = "--disable-bias-linear --moe-grouped-gemm"
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 --qk-layernorm "
    "--moe-layer-freq ([0]*1+[1]*2) --moe-shared-expert-intermediate-size 8 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss --mtp-num-layers 1"
)

FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
OFFLOAD = "--transformer-impl transformer_engine --fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules"
EVERYTHING = "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"


def parsed(*flags: str, ranks: int = 1) -> Arguments:
    """The arguments of MODEL with these flags."""
    return parse_args(" ".join([MODEL, *flags]).split(), ranks)


def build(args: Arguments, ps: ParallelState | None = None) -> list[Transformer]:
    """The chunks of this rank."""
    return build_chunks(args, ps or ParallelState.single(), 64)


def batch(number: int, length: int = SEQ) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and labels of a microbatch."""
    generator = torch.Generator().manual_seed(number)
    tokens_BS = torch.randint(0, VOCAB, (BATCH, length + 1), generator=generator)
    return tokens_BS[:, :-1], torch.arange(length).expand(BATCH, length), tokens_BS[:, 1:]


def compute_loss(chunk: Transformer, number: int, **more) -> Tensor:
    """The loss of one microbatch on a chunk that is the full model."""
    tokens_BS, positions_BS, labels_BS = batch(number)
    return chunk(tokens_BS, positions_BS, labels_BS, torch.ones_like(labels_BS), grad_scale=0.5, **more).sum() * 0.5


def collect_results(chunk: Transformer, losses: list[Tensor]) -> dict[str, Tensor]:
    """Losses, gradients, and every count and statistic that the chunk keeps."""
    found = {f"loss {index}": loss.detach() for index, loss in enumerate(losses)}
    found |= {f"gradient of {get_param_info(param).names[0]}": param.grad for param in chunk.parameters()}
    found |= {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    return (
        found
        | {f"state of {name}": generator.get_state() for name, generator in chunk.generators().items()}
        | {"random state": torch.get_rng_state()}
    )


def run_two_microbatches(*flags: str, interleaved: bool = False, **more) -> dict[str, Tensor]:
    """Both forward, both backward (with `interleaved` the second forward before the first backward)."""
    torch.manual_seed(3)
    (chunk,) = build(parsed(*flags))
    start_iteration([chunk])
    losses = []
    if interleaved:
        losses = [compute_loss(chunk, number, **more) for number in range(2)]
        for loss in losses:
            loss.backward()
    else:
        for number in range(2):
            losses.append(compute_loss(chunk, number, **more))
            losses[-1].backward()
    return collect_results(chunk, losses)


def differences(plain: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of results that are not bitwise equal."""
    assert plain.keys() == other.keys()
    return [name for name in plain if not torch.equal(plain[name], other[name])]

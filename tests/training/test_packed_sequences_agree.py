"""Packed sequences: every token's loss and all gradients equal those of the sequences alone; layouts equal one process."""

from dataclasses import replace

import pytest
import torch
from training.agreement import check_cases
from training.layouts import MODEL

from arguments import parse_args
from moe_trainer.model.build import build_chunks
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.moe.balancing import start_iteration
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.shrink import as_is

LENGTHS = (5, 16, 1, 9, 2)
EQUAL_LENGTHS = (7, 7, 7)  # multi-token prediction averages over the tokens of a microbatch
GQA = "--group-query-attention --num-query-groups 2"
MLA = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 "
    "--qk-layernorm"
)
LINEAR = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 4 "
    "--linear-value-head-dim 4 --linear-num-key-heads 4 --linear-num-value-heads 8"
)
MAMBA = (
    "--hybrid-layer-pattern M*ME --mamba-num-heads 4 --mamba-head-dim 6 --mamba-num-groups 2 --mamba-state-dim 10 "
    "--position-embedding-type none"
)
SPARSE = (
    f"{MLA} --experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4"
)
LLAMA4 = (
    f"{GQA} --attention-chunk-size 4 --window-attn-skip-freq 2 --no-rope-freq 2 --attn-temperature-tuning llama4 "
    "--attn-temperature-floor 3 --attn-temperature-scale 1 --qk-l2-norm --qk-l2-norm-rope-layers-only"
)
MISTRAL4 = f"{MLA} --attn-temperature-tuning mistral4 --attn-temperature-floor 3 --attn-temperature-scale 1"
KDA = f"{LINEAR.replace('gated_delta_net', 'kda')} --kda-gate-rank 3 --kda-decay-lower-bound -5"
KINDS = {
    "gqa": GQA,
    "llama 4": LLAMA4,
    "mistral 4": MISTRAL4,
    "window": f"{GQA} --window-size 3,0 --window-attn-skip-freq 2 --window-rotary-percent 0.5 "
    "--window-num-query-groups 4 --window-softmax-type learnable --value-channels 2 --attention-value-scale 0.6",
    "sinks": f"{GQA} --softmax-type learnable",
    "yarn": f"{GQA} --position-embedding-type yarn --rotary-scaling-factor 4",
    "learned positions": "--position-embedding-type learned_absolute",
    "mla": f"{MLA} --head-wise-attn-gate",
    "mtp": f"{GQA} --mtp-num-layers 2",
    "mtp per token": f"{GQA} --mtp-num-layers 2 --mtp-loss-per-token",
    "linear attention": LINEAR,
    "mamba": MAMBA,
    "decays by channel": KDA,
    "short convolutions": f"{GQA} --experimental-attention-variant short_conv --linear-attention-freq 2",
    "sparse": SPARSE,
    "hash routing": f"{GQA} --moe-n-hash-layers 1 --moe-router-score-function sqrtsoftplus",
    "indexer loss": f"{SPARSE} --dsa-indexer-loss-coeff 0.5",
    "recompute": f"{GQA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": f"{MLA} --recompute-granularity selective --recompute-modules core_attn moe mla_up_proj",
}


def make_packed_argv(kind: str, *more: str) -> list[str]:
    argv = [*MODEL, "--num-layers", "2", *KINDS.get(kind, kind).split(), "--use-varlen-dataset"]
    return [*argv, "--moe-token-dispatcher-type", "alltoall", "--calculate-per-token-loss", *more]


def token_losses(chunk, ids: list[torch.Tensor], packed: PackedSequences | None) -> torch.Tensor:
    """Losses of the tokens of some sequences in one pass, and their gradients."""
    multiple = [(0, 0)] * len(ids)
    if packed is not None:
        multiple = [(length, padded) for length, padded in zip(packed.lengths, packed.padded_lengths)]
    rows = [[], [], [], []]
    for sequence, (length, padded) in zip(ids, multiple):
        pad = (0, padded - length)
        rows[0].append(torch.nn.functional.pad(sequence[:-1], pad))
        rows[1].append(torch.nn.functional.pad(torch.arange(len(sequence) - 1), pad))
        rows[2].append(torch.nn.functional.pad(sequence[1:], pad))
        rows[3].append(torch.nn.functional.pad(torch.ones(len(sequence) - 1), pad))
    tokens, positions, labels, mask = (torch.cat(row)[None] for row in rows)
    loss = chunk(tokens, positions, labels, mask, SequenceBorders(packed=packed))
    (loss * mask).sum().backward()
    return loss.detach()[mask.bool()]


def run_both(argv: list[str], multiple: int):
    """Token losses and gradients of packed sequences, and of the sequences one by one."""
    args = parse_args(argv, 1)
    # the other balancing losses are products of counts of all sequences
    balanced = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
    args = replace(args, moe=replace(args.moe, **balanced))
    lengths = EQUAL_LENGTHS if args.model.mtp_num_layers and not args.model.mtp_loss_per_token else LENGTHS
    ids = [
        torch.randint(0, 60, (length + 1,), generator=torch.Generator().manual_seed(number))
        for number, length in enumerate(lengths)
    ]
    found = []
    for passes in ([ids], [[each] for each in ids]):
        (chunk,) = build_chunks(args, ParallelState.single(), 64, torch.device("cpu"))
        start_iteration([chunk])
        losses = []
        for sequences in passes:
            packed = PackedSequences.of([len(each) - 1 for each in sequences], multiple) if len(sequences) > 1 else None
            losses.append(token_losses(chunk, sequences, packed))
        found.append((torch.cat(losses), {name: param.grad for name, param in chunk.named_parameters()}))
    return found


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_tokens_equal_those_of_sequences_alone(kind, multiple):
    (losses, grads), (expected, expected_grads) = run_both(make_packed_argv(kind), multiple)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        if grad is None:  # of an indexer without a loss
            assert grads[name] is None and ".indexer." in name
        else:
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-5 * float(grad.abs().max()), msg=name)


CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
PP2, EP2, TP2 = (f"--{name}-model-parallel-size 2" for name in ("pipeline", "expert", "tensor"))
ALL_LOSSES = "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1 0.1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
PER_TOKEN = "--calculate-per-token-loss"
# every feature of packed sequences meets a mapping that cuts, gathers or delays what it computes
PAIRS = {
    "padded, few in a microbatch": (f"{GQA} --pad-packed-seq-alignment 8 --thd-max-packed-sequences 3 {PER_TOKEN}", 1),
    "MTP, context ranks": (f"{GQA} --mtp-num-layers 2 {CP2}", 2),
    "ring inside all-to-all": (f"{GQA} {CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
    "latent attention by all-to-all, all losses": (f"{MLA} {CP2} --cp-comm-type a2a {ALL_LOSSES}", 4),
    "windows over context ranks": (f"{GQA} --window-size 3,0 {CP2} --cp-comm-type p2p", 2),
    "other heads in windows": (f"{KINDS['window']} {CP2} --cp-comm-type allgather {PER_TOKEN}", 2),
    "sinks, all-to-all, windows": (
        f"{GQA} --softmax-type off-by-one --window-size 5,0 {CP2} --cp-comm-type a2a {EP2}",
        4,
    ),
    "linear attention": (f"{LINEAR} {CP2} {PER_TOKEN}", 2),
    "mamba": (f"{MAMBA} {CP2}", 2),
    "indexer loss": (f"{KINDS['indexer loss']} {CP2} --cp-comm-type allgather {PER_TOKEN}", 2),
    "chunks, ring": (f"{LLAMA4} {CP2}", 2),
    "chunks, all-to-all": (f"{LLAMA4} {CP2} --cp-comm-type a2a {PER_TOKEN}", 2),
    "temperatures of latent attention": (f"{MISTRAL4} {CP2} --cp-comm-type allgather", 2),
    "all losses over data ranks": (f"{GQA} {ALL_LOSSES} --moe-z-loss-coeff 0.01", 2),
    "all losses over context, tensor and expert ranks": (
        f"{MLA} {CP2} {TP2} --sequence-parallel {EP2} {ALL_LOSSES}",
        4,
    ),
    "recomputed experts and attention": (f"{MLA} {CP2} {SELECTIVE} core_attn moe mla_up_proj layernorm", 2),
    "dropped tokens over context ranks": (f"{GQA} {CP2} --moe-expert-capacity-factor 0.7 {EP2}", 2),
    "padded experts": (
        f"{GQA} {EP2} --moe-expert-capacity-factor 1.2 --moe-pad-expert-input-to-capacity "
        "--pad-packed-seq-alignment max",
        2,
    ),
    "overlapped tensor parallelism": (
        f"{GQA} {TP2} --sequence-parallel --tp-comm-overlap --pad-packed-seq-alignment max",
        2,
    ),
    "sharded parameters": (
        f"{GQA} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor",
        2,
    ),
    "two microbatches in turns": (f"{GQA} {EP2} --overlap-moe-expert-parallel-comm --bf16", 2),
    "zero bubble": (f"{LINEAR} --norm-epsilon 1e-2 {PP2} --pipeline-schedule zero-bubble", 2),
    "virtual stages, MTP": (
        f"{GQA} --mtp-num-layers 2 {PP2} {EP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 {OVERLAP}",
        4,
    ),
}


def test_pairs_equal_one_process():
    """Every loss, gradient and weight of two steps, with the definitions of the layouts (verification/parity.py)."""
    start = [word for word in make_packed_argv("") if word != PER_TOKEN]
    start += "--max-seqlen-per-dp-cp-rank 24 --micro-batch-size 1 --sequence-packing-scheduler cost_balanced".split()
    check_cases({name: as_is([*start, *flags.split()], ranks) for name, (flags, ranks) in PAIRS.items()})

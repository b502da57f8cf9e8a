"""Recompute and offload on several ranks: under every mapping bitwise equal to the same mapping without them."""

import pytest
import torch
from harness import run_ranks
from memory.one_pass import EVERYTHING, FULL, OFFLOAD, SELECTIVE
from training.layouts import make_argv, shallow, train_ranks

UNIFORM = f"{FULL} uniform --recompute-num-layers 2"
BLOCK = f"{FULL} block --recompute-num-layers 1"
PARTS = f"{SELECTIVE} core_attn layernorm mla_up_proj mlp moe"
SENT = f"{SELECTIVE} layernorm mla_up_proj shared_experts {OFFLOAD} {EVERYTHING}"
TP2, EP2, CP2, PP2 = (
    f"--{name}-parallel-size 2" for name in ("tensor-model", "expert-model", "context", "pipeline-model")
)
NOISE = "--hidden-dropout 0.1 --attention-dropout 0.1 --moe-input-jitter-eps 0.1"
# name -> (kind of model, flags of the mapping, ways to keep activations)
CASES = {
    "tp2 sp": ("deepseek", f"{TP2} --sequence-parallel", (PARTS, SENT)),
    "tp2 sp, random numbers": ("plain", f"{TP2} --sequence-parallel {NOISE}", (UNIFORM, f"{SELECTIVE} core_attn moe")),
    "tp2": ("plain", TP2, (UNIFORM, f"{UNIFORM} --distribute-saved-activations", f"{BLOCK} --distribute-saved-activations")),
    "ep2": ("deepseek", f"{EP2} --moe-token-dispatcher-type alltoall", (PARTS, SENT)),
    "ep2, shared experts meanwhile": ("deepseek", f"{EP2} --moe-token-dispatcher-type alltoall --moe-shared-expert-overlap", (
        f"{SELECTIVE} moe layernorm",)),
    "etp2": ("plain", "--expert-tensor-parallel-size 2 --moe-token-dispatcher-type allgather", (f"{SELECTIVE} moe", UNIFORM)),
    "pp2 vpp2": ("deepseek", f"{PP2} --num-virtual-stages-per-pipeline-rank 2", (
        BLOCK, f"{OFFLOAD} {EVERYTHING} --delta-offload-bytes-across-pp-ranks 3000")),
    "zero bubble": ("deepseek", f"{PP2} --pipeline-schedule zero-bubble", (UNIFORM, SENT)),
    "cp2 ring": ("plain", f"{CP2} --reset-attention-mask --reset-position-ids", (UNIFORM, f"{SELECTIVE} core_attn layernorm", SENT.replace("mla_up_proj shared_experts", ""))),
    "cp2 heads": ("deepseek", f"{CP2} --cp-comm-type a2a", (UNIFORM, PARTS)),
    "overlapped exchange": ("plain", f"{EP2} --bf16 --overlap-moe-expert-parallel-comm --delay-wgrad-compute "
                            "--transformer-impl transformer_engine --moe-token-dispatcher-type alltoall", (
        f"{SELECTIVE} core_attn layernorm", f"{SELECTIVE} layernorm {OFFLOAD} {EVERYTHING}")),
    "gradients during the exchange": ("plain", f"{EP2} --overlap-dispatch-backward-with-experts-wgrad "
                                      "--transformer-impl transformer_engine --moe-token-dispatcher-type alltoall", (UNIFORM, f"{SELECTIVE} moe")),
    "distributed optimizer": ("distributed optimizer, overlap", "", (UNIFORM,)),
    "fsdp": ("deepseek", "--use-torch-fsdp2", (BLOCK, SENT)),
    "fsdp, gradients": ("plain", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor", (UNIFORM,)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_recompute_and_offload_on_two_ranks_change_no_result(case):
    kind, mapping, hows = CASES[case]
    model = make_argv(kind) if PP2 in mapping else shallow(make_argv(kind))
    samples = 2 if TP2 in mapping or CP2 in mapping else 4  # one microbatch, of two stages two
    argvs = [[*model, *f"{mapping} --global-batch-size {samples} {how}".split()] for how in ("", *hows)]
    (plain, *others), _ = run_ranks(_train, 2, argvs)
    for how, other in zip(hows, others, strict=True):
        for name in ("losses", "grad_norms", "dropped", "per_layer", "evaluation"):
            assert getattr(plain, name) == getattr(other, name), (how, name)
        for name in ("grads", "weights"):
            ours, theirs = getattr(plain, name), getattr(other, name)
            assert ours.keys() == theirs.keys(), how
            assert not [key for key in ours if not torch.equal(ours[key], theirs[key])], (how, name)


def _train(rank, n, argvs):
    found = []
    for argv in argvs:
        torch.manual_seed(7)
        found += train_ranks(rank, n, [argv], steps=1)
    return found

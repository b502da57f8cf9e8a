"""Training on emulated devices, with every access checked for its order, gives the numbers of one CPU process."""

from functools import cache

import pytest
from emulated_cuda.run import on_device
from gpu.test_one_device import NEAR
from train.layouts import FP32, argv_of, compare, groups_of, train

from moe_trainer.parallel.state import ParallelState
from moe_trainer.proof.observe import Outcome
from moe_trainer.proof.shrink import shrink

STEPS = 2
OFFLOAD = ("--transformer-impl transformer_engine --on-missing-backend fallback --fine-grained-activation-offloading --min-offloaded-tensor-size 1 "
           "--offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act")
ALLTOALL = "--moe-token-dispatcher-type alltoall"
# name: model, flags of both runs, flags of the device, ranks
CASES = {
    "plain": ("plain", "", "", 1),
    "distributed optimizer": ("distributed optimizer, overlap", "", "", 1),
    "deepseek, recompute": ("deepseek", "", "--recompute-granularity selective --recompute-modules core_attn layernorm mla_up_proj moe", 1),
    "full recompute": ("plain", "", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
    "offload": ("plain", "", OFFLOAD, 1),
    "offload and recompute": ("deepseek", "", f"{OFFLOAD} --recompute-granularity selective --recompute-modules layernorm mlp", 1),
    "capacity": ("capacity", "", "", 1),
    "padded capacity": ("padded capacity", "", "", 1),
    "packed documents": ("plain", "--reset-attention-mask --reset-position-ids", "", 1),
    "per-token loss, MTP": ("per-token loss, MTP, distributed optimizer", "", "", 1),
    "tp 2, sp": ("plain", "", "--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "pp 2": ("plain", "", "--pipeline-model-parallel-size 2", 2),
    "pp 2, vpp 2": ("plain", "", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
    "cp 2": ("plain", "", "--context-parallel-size 2", 2),
    "ep 2, shared experts beside the exchange": (
        "plain", "--moe-shared-expert-intermediate-size 8", f"{ALLTOALL} --expert-model-parallel-size 2 --moe-shared-expert-overlap", 2),
    "ep 2, allgather": ("plain", "", "--moe-token-dispatcher-type allgather --expert-model-parallel-size 2", 2),
    "ep 2, distributed optimizer": ("distributed optimizer, overlap", "", f"{ALLTOALL} --expert-model-parallel-size 2", 2),
    "tp 2, etp 2": ("plain", "", f"{ALLTOALL} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2", 2),
    "fsdp": ("plain", "", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
             "--ckpt-format fsdp_dtensor", 2),
    "optimizer state on the host": ("distributed optimizer, overlap", "", "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
                                    "--use-precision-aware-optimizer", 1),
    "pp 2, weight gradients that wait": ("accumulation", "", "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", 2),
    "ep 2, cloned experts": ("plain", "", f"{ALLTOALL} --expert-model-parallel-size 2 --moe-clone-hot-experts 1", 2),
}
# one of each family, in a small form that keeps its features
FAMILIES = ("deepseek_v3", "deepseek_v3_2", "finermoe_qwen2_5_0_5b", "gpt_oss_20b", "latentmoe_tiny", "mixtral_8x7b", "qwen3_next_80b_a3b", "qwen3_30b_a3b")


def argv(name: str) -> list[str]:
    """Of both runs."""
    kind, flags, _, _ = CASES[name]
    return [*argv_of(kind), *flags.split()]


@cache
def one_process(words: tuple[str, ...]) -> Outcome:
    return train(list(words), 0, ParallelState.single(), STEPS)


def on_ranks(rank: int, world_size: int, words: list[str]) -> Outcome:
    """Train with checks of every access."""
    import emulation

    from arguments import parse_args
    from moe_trainer.proof import observe

    emulation.DEVICE().watch(True)
    emulation.DEVICE().lib.ec_check_races(1)
    ps = ParallelState.single() if world_size == 1 else groups_of(words, rank, world_size)
    return observe.train(parse_args(words, world_size), rank, ps, STEPS, device="cuda")


def alone(words: list[str]) -> Outcome:
    return on_ranks(0, 1, words)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_cpu_process(name):
    _, _, flags, ranks = CASES[name]
    words = [*argv(name), *flags.split()]
    outcome = on_device(alone, words) if ranks == 1 else on_device(on_ranks, words, ranks=ranks, devices=ranks)[0]
    assert [str(difference) for difference in compare(one_process(tuple(argv(name))), outcome, FP32)] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_models(name):
    words = [*shrink(["--preset", name], 1, 1).cases[0].argv]
    # each program of Triton's interpreter takes milliseconds
    outcome = on_device(alone, [*words, "--triton-kernels", "none"])
    assert [str(difference) for difference in compare(one_process(tuple(words)), outcome, NEAR)] == []

"""Training on emulated devices, with race checks, equals one CPU process."""

import re
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from emulated_cuda.run import on_device
from gpu.test_one_device import NEAR
from training.layouts import FP32, compare, create_groups, make_argv, shallow, train

import model_zoo
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.shrink import shrink
from moe_trainer.verification.training_trace import TrainingTrace

STEPS = 2
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size"
OFFLOAD = (
    "--transformer-impl transformer_engine --on-missing-backend fallback --fine-grained-activation-offloading --min-offloaded-tensor-size 1 "
    "--offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"
)
ALLTOALL = "--moe-token-dispatcher-type alltoall"
CHUNKED = "--tp-comm-overlap --tp-comm-overlap-rs-dgrad"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP2 = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# name: model, flags of both runs, flags of the device, ranks
CASES = {
    "plain": ("plain", "", "", 1),
    "distributed optimizer": ("distributed optimizer, overlap", "", "", 1),
    "deepseek, recompute": (
        "deepseek",
        "",
        "--recompute-granularity selective --recompute-modules core_attn layernorm mla_up_proj moe",
        1,
    ),
    "full recompute": ("plain", "", FULL_RECOMPUTE, 1),
    "offload": ("plain", "", OFFLOAD, 1),
    "offload and recompute": (
        "deepseek",
        "",
        f"{OFFLOAD} --recompute-granularity selective --recompute-modules layernorm mlp",
        1,
    ),
    "capacity": ("capacity", "", "", 1),
    "padded capacity": ("padded capacity", "", "", 1),
    "packed documents": ("plain", "--reset-attention-mask --reset-position-ids", "", 1),
    "gated DeltaNet, packed documents": (
        "plain",
        "--reset-attention-mask --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
        "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --adam-eps 1e-4",  # at 1e-5 roundings grow
        "",
        1,
    ),
    "per-token loss, MTP": ("per-token loss, MTP, distributed optimizer", "", "", 1),
    "tp 2, sp, overlapped": ("plain", "", f"{TP2} {CHUNKED}", 2),
    "pp 2": ("plain", "", "--pipeline-model-parallel-size 2", 2),
    "pp 2, vpp 2": ("plain", "", VPP2, 2),
    "cp 2": ("plain", "", "--context-parallel-size 2", 2),
    "ep 2, shared experts during the exchange": (
        "plain",
        "--moe-shared-expert-intermediate-size 8",
        f"{ALLTOALL} --expert-model-parallel-size 2 --moe-shared-expert-overlap",
        2,
    ),
    "ep 2, allgather": ("plain", "", "--moe-token-dispatcher-type allgather --expert-model-parallel-size 2", 2),
    "ep 2, distributed optimizer": (
        "distributed optimizer, overlap",
        "",
        f"{ALLTOALL} --expert-model-parallel-size 2",
        2,
    ),
    "tp 2, etp 2": ("plain", "", f"{ALLTOALL} {TP2} --expert-tensor-parallel-size 2", 2),
    "fsdp": ("plain", "", FSDP, 2),
    "fsdp, instances share the state": (
        "plain",
        "",
        f"{FSDP} --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
        4,
    ),
    "optimizer state on the host": (
        "distributed optimizer, overlap",
        "",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer",
        1,
    ),
    "pp 2, weight gradients that wait": (
        "plain",
        "",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        2,
    ),
    # what two ranks cannot have at once: each pair of dimensions in one of these, with streams next to the computation
    "tp 2, cp 2, ep 2, etp 2": (
        "distributed optimizer, overlap",
        "--moe-shared-expert-intermediate-size 8",
        f"{ALLTOALL} {TP2} --cp-comm-type a2a "
        "--context-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
        4,
    ),
    "tp 2, pp 2, vpp 2, ep 2, allgather, recompute": (
        "plain",
        "",
        f"{TP2} {VPP2} --moe-token-dispatcher-type allgather --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
        "--recompute-granularity selective --recompute-modules layernorm moe",
        4,
    ),
    "cp 2, pp 2, vpp 2, etp 2, packed documents, offload": (
        "plain",
        "--reset-attention-mask --reset-position-ids",
        f"{VPP2} {ALLTOALL} {OFFLOAD} --context-parallel-size 2 --expert-tensor-parallel-size 2",
        4,
    ),
    "fsdp, tp 2, ep 2": (
        "plain",
        "",
        f"{FSDP} {TP2} {CHUNKED} {ALLTOALL} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        4,
    ),
    "fsdp, pp 2, vpp 2, cp 2, etp 2": (
        "plain",
        "",
        f"{FSDP} {VPP2} --context-parallel-size 2 --cp-comm-type allgather --expert-tensor-parallel-size 2",
        4,
    ),
    "torch fsdp, recompute": (
        "plain",
        "",
        "--use-torch-fsdp2 --recompute-granularity selective --recompute-modules moe",
        2,
    ),
    "ep 2, cloned experts": ("plain", "", f"{ALLTOALL} --expert-model-parallel-size 2 --moe-clone-hot-experts 1", 2),
}


def argv(name: str) -> list[str]:
    """Of both runs: two layers, but for virtual stages, and two microbatches on a data-parallel rank, but for two stages alone."""
    kind, flags, own, ranks = CASES[name]
    model = make_argv(kind) if VPP2 in own else shallow(make_argv(kind))
    dimensions = ("tensor-model", "context", *["pipeline-model"] * (ranks > 2))
    has_one_data_rank = ranks == 2 ** sum(f"--{dim}-parallel-size 2" in own for dim in dimensions)
    return [*model, *flags.split(), *["--global-batch-size", "4"] * has_one_data_rank]


@cache
def one_process(words: tuple[str, ...], steps: int = STEPS) -> TrainingTrace:
    return train(list(words), 0, ParallelState.single(), steps)


def on_ranks(rank: int, world_size: int, words: list[str], steps: int = STEPS) -> TrainingTrace:
    """Train with checks of every access."""
    import emulation

    from arguments import parse_args
    from moe_trainer.verification import training_trace

    emulation.DEVICE().watch(True)
    emulation.DEVICE().lib.ec_check_races(1)
    ps = ParallelState.single() if world_size == 1 else create_groups(words, rank, world_size)
    return training_trace.train(parse_args(words, world_size), rank, ps, steps, device="cuda")


def train_alone(words: list[str]) -> TrainingTrace:
    return on_ranks(0, 1, words)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_cpu_process(name):
    _, _, flags, ranks = CASES[name]
    words = [*argv(name), *flags.split()]
    outcome = on_device(train_alone, words) if ranks == 1 else on_device(on_ranks, words, ranks=ranks, devices=ranks)[0]
    assert [str(difference) for difference in compare(one_process(tuple(argv(name))), outcome, FP32)] == []


def small_presets() -> dict[str, list[str]]:
    """Presets in a small form with the same features, so many that each pair of features is in one of them. One microbatch."""
    presets, pairs = {}, {}
    for path in sorted(Path(model_zoo.__file__).parent.glob("*.yaml")):
        words = [*shrink(["--preset", path.stem], 1, 1).cases[0].argv]
        features = {word for word in words if not re.fullmatch(r"[-+.\de]+", word)} - {*DISTRIBUTED.split()}
        presets[path.stem] = [*words, *"--micro-batch-size 1 --global-batch-size 1 --triton-kernels none".split()]
        pairs[path.stem] = {*combinations(sorted(features), 2)}
    chosen, left = {}, set().union(*pairs.values())
    while left:
        name = max(pairs, key=lambda name: len(pairs[name] & left))
        chosen[name] = presets[name]
        left -= pairs[name]
    return chosen


def take_one_step_each(argvs: list[list[str]]) -> list[TrainingTrace]:
    return [on_ranks(0, 1, words, 1) for words in argvs]


def test_small_presets_equal_one_cpu_process():
    presets = small_presets()
    assert len(presets) >= 16
    outcomes = dict(zip(presets, on_device(take_one_step_each, [*presets.values()]), strict=True))
    assert {
        name: differences
        for name, words in presets.items()
        if (
            differences := [
                str(difference) for difference in compare(one_process(tuple(words), 1), outcomes[name], NEAR)
            ]
        )
    } == {}

"""Every flag that affects memory or time changes its estimate in the expected direction."""

import math
from functools import reduce

import pytest

from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.plan import make_plan, validated_args
from moe_trainer.estimate.plan_text import plan_json
from tests.arguments.rule_lines import recorded

BASE = (
    "--preset deepseek_v3 --mock-data --bf16 --num-layers 16 --moe-layer-freq ([0]*2+[1]*14) --mtp-num-layers 0 --expert-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 256 --use-distributed-optimizer"
)
FOLDED = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
ONE_STAGE = "--pipeline-model-parallel-size 1"
FSDP = (
    f"--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params {ONE_STAGE}"
)
AWARE = "--use-precision-aware-optimizer"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method"
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"
GRAPHS = "--cuda-graph-impl local --cuda-graph-modules"
FULL_ITERATION = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
LESS, MORE, SAME = (0.0, 0.999), (1.001, math.inf), (0.999, 1.001)
ACTIVATIONS, WORKING, HOST, OPTIMIZER, WEIGHTS = (
    f"memory.{part}_gb" for part in ("activations", "working", "host", "optimizer", "weights")
)
COMPUTE, EXCHANGE, BUBBLE, TENSOR, CONTEXT = (
    f"step.{part}_s" for part in ("compute", "exchange", "bubble", "tensor", "context")
)


def plan_report(flags, machine="gb200", world_size=64, base=BASE):
    return plan_json(
        make_plan(validated_args([*base.split(), *flags.split()], world_size), world_size, find_hardware(machine))
    )


def get_figure(report, key):
    return reduce(lambda found, name: found[name], key.split("."), report)


@pytest.fixture(scope="module")
def plain():
    made = {}

    def of(flags):
        if flags not in made:
            made[flags] = plan_report(flags)
        return made[flags]

    return of


CASES = (
    # folding
    (FOLDED, "", {"memory.weights_gb": LESS, ACTIVATIONS: LESS, TENSOR: MORE}),
    (
        f"{FOLDED} --expert-tensor-parallel-size 2",
        FOLDED,
        {"memory.weights_gb": LESS, EXCHANGE: MORE, ACTIVATIONS: MORE},
    ),
    (
        "--expert-model-parallel-size 16",
        "",
        {"memory.weights_gb": LESS, "memory.grads_gb": LESS, EXCHANGE: MORE, ACTIVATIONS: SAME},
    ),
    ("--context-parallel-size 2", "", {ACTIVATIONS: LESS, "memory.dispatch_gb": LESS, "memory.weights_gb": SAME}),
    ("--context-parallel-size 2 --cp-comm-type allgather", "--context-parallel-size 2", {CONTEXT: MORE}),
    (
        "--seq-length 262144 --max-position-embeddings 262144 --context-parallel-size 16 --pipeline-model-parallel-size 1",
        "--seq-length 131072 --max-position-embeddings 262144 --context-parallel-size 16 --pipeline-model-parallel-size 1",
        {ACTIVATIONS: (1.9, 2.1), "flops": (2.5, 4.0), COMPUTE: (2.3, 4.0)},
    ),
    ("--micro-batch-size 2", "", {ACTIVATIONS: (1.99, 2.01), "memory.dispatch_gb": (1.99, 2.01), BUBBLE: MORE}),
    # pipelines
    (VPP2, "", {ACTIVATIONS: MORE, BUBBLE: LESS, "memory.weights_gb": SAME}),
    (f"{VPP2} --microbatch-group-size-per-virtual-pipeline-stage 8", VPP2, {ACTIVATIONS: MORE}),
    ("--pipeline-model-parallel-layout Ettt|t*5|t*5|tttL", "", {"memory.weights_gb": MORE, "step_s": MORE}),
    ("--pipeline-schedule zero-bubble", "", {ACTIVATIONS: MORE, BUBBLE: LESS}),
    ("--global-batch-size 512", "", {"step_s": (1.5, 2.0), ACTIVATIONS: SAME, "tflops_per_gpu": MORE}),
    # recompute
    (
        f"{FULL_RECOMPUTE} uniform --recompute-num-layers 1",
        "",
        {ACTIVATIONS: (0, 0.2), COMPUTE: (1.2, 1.4), EXCHANGE: (1.4, 1.6), WORKING: MORE, "flops": SAME},
    ),
    (f"{FULL_RECOMPUTE} block --recompute-num-layers 2", "", {ACTIVATIONS: (0.2, 0.7), COMPUTE: MORE}),
    (f"{SELECTIVE} core_attn", "", {ACTIVATIONS: LESS, COMPUTE: MORE}),
    (f"{SELECTIVE} layernorm", "", {ACTIVATIONS: LESS, COMPUTE: MORE}),
    (f"{SELECTIVE} mla_up_proj", "", {ACTIVATIONS: LESS, COMPUTE: MORE, WORKING: MORE}),
    (f"{SELECTIVE} moe", "", {ACTIVATIONS: LESS, COMPUTE: MORE, EXCHANGE: (1.4, 1.6)}),
    (f"{SELECTIVE} shared_experts", "", {ACTIVATIONS: LESS, COMPUTE: MORE}),
    (f"{ONE_STAGE} {SELECTIVE} mlp", ONE_STAGE, {ACTIVATIONS: LESS, COMPUTE: MORE}),
    (f"{MXFP8} {SELECTIVE} moe_act", MXFP8, {ACTIVATIONS: LESS}),
    # offload
    *(
        (f"{OFFLOAD} {modules}", "", {ACTIVATIONS: LESS, HOST: MORE, "memory.total_gb": LESS})
        for modules in (
            "attn_norm",
            "qkv_linear",
            "core_attn",
            "core_attn attn_proj",
            "mlp_norm",
            "expert_fc1",
            "moe_act",
        )
    ),
    (f"{ONE_STAGE} --cpu-offloading-num-layers 2", ONE_STAGE, {ACTIVATIONS: LESS, HOST: MORE}),
    # optimizer
    (f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", AWARE, {OPTIMIZER: (0.5, 0.7), "step.optimizer_s": LESS}),
    (f"{AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", AWARE, {OPTIMIZER: (0.3, 0.5)}),
    (f"{AWARE} --main-grads-dtype bf16", AWARE, {"memory.grads_gb": (0.5, 0.5)}),
    (f"{AWARE} --optimizer-cpu-offload", AWARE, {OPTIMIZER: (0, 0.01), HOST: MORE, "step.optimizer_s": MORE}),
    (f"{AWARE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", AWARE, {OPTIMIZER: (0.45, 0.55), HOST: MORE}),
    (
        "--chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.5",
        "",
        {OPTIMIZER: (0.4, 0.6), HOST: MORE, "step.optimizer_s": MORE},
    ),
    ("--num-distributed-optimizer-instances 2", "", {OPTIMIZER: (1.9, 2.1)}),
    ("--grad-reduce-in-bf16", "", {"memory.grads_gb": (0.5, 0.5)}),
    # formats
    (MXFP8, "", {ACTIVATIONS: LESS, COMPUTE: LESS, "flops": SAME, WEIGHTS: (1.95, 2.04)}),
    (f"{MXFP8} --cuda-graph-impl local --cuda-graph-modules attn", MXFP8, {WEIGHTS: (0.49, 0.52)}),
    (f"{FSDP} {MXFP8}", FSDP, {WEIGHTS: SAME}),
    ("--fp8-format e4m3 --fp8-recipe blockwise", "", {ACTIVATIONS: LESS, COMPUTE: LESS, WEIGHTS: (1.9, 2.0)}),
    ("--fp8-format hybrid --fp8-recipe delayed", "", {ACTIVATIONS: LESS, COMPUTE: LESS}),
    ("--fp4-format e2m1 --fp4-recipe nvfp4", MXFP8, {ACTIVATIONS: LESS, COMPUTE: LESS, WEIGHTS: LESS}),
    (
        "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
        "--fp8-format hybrid --fp8-recipe tensorwise",
        {WEIGHTS: (0.3, 0.35)},
    ),
    # exchange
    ("--moe-token-dispatcher-type allgather", "", {EXCHANGE: (0, 2), "memory.dispatch_gb": (0.5, 2)}),
    (
        HYBRIDEP,
        "",
        {EXCHANGE: LESS, COMPUTE: (0.8, 1.001)},
    ),  # corrections of a slow exchange are of the whole iteration
    (
        f"{HYBRIDEP} --expert-model-parallel-size 16 --moe-flex-dispatcher-backend deepep",
        f"{HYBRIDEP} --expert-model-parallel-size 16",
        {EXCHANGE: MORE},
    ),
    (
        f"{VPP2} --overlap-moe-expert-parallel-comm",
        VPP2,
        {EXCHANGE: (0, 0.3), COMPUTE: MORE, "memory.dispatch_gb": MORE, WORKING: MORE},
    ),
    ("--moe-shared-expert-overlap", "", {EXCHANGE: LESS}),
    ("--overlap-dispatch-backward-with-experts-wgrad", "", {EXCHANGE: LESS}),
    # capacity
    (
        "--moe-expert-capacity-factor 0.7",
        "",
        {ACTIVATIONS: LESS, "memory.dispatch_gb": (0.69, 0.71), EXCHANGE: LESS, COMPUTE: LESS},
    ),
    ("--moe-expert-capacity-factor 1.5", "", {ACTIVATIONS: SAME, EXCHANGE: SAME}),
    (
        "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
        "",
        {ACTIVATIONS: MORE, "memory.dispatch_gb": (1.49, 1.51), COMPUTE: MORE},
    ),
    (f"{HYBRIDEP} --moe-expert-rank-capacity-factor 1.5", HYBRIDEP, {ACTIVATIONS: MORE}),
    (
        f"{HYBRIDEP} --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash",
        f"{HYBRIDEP} --moe-expert-rank-capacity-factor 1.5",
        {ACTIVATIONS: LESS},
    ),
    ("--moe-router-topk 4", "", {EXCHANGE: (0.4, 0.6), ACTIVATIONS: LESS, "flops": LESS}),
    # graphs and sharding
    (f"{GRAPHS} attn", "", {WORKING: MORE, ACTIVATIONS: SAME, "step_s": (0, 1)}),
    (f"{PADDED} {FULL_ITERATION}", f"{PADDED} --eval-iters 0", {WORKING: MORE, ACTIVATIONS: SAME, "step_s": (0, 1)}),
    (f"{PADDED} {FULL_ITERATION} --eval-iters 0", f"{PADDED} {FULL_ITERATION}", {WORKING: LESS}),
    (
        FSDP,
        ONE_STAGE,
        {"memory.weights_gb": LESS, "memory.grads_gb": LESS, OPTIMIZER: LESS, WORKING: MORE},
    ),
    (f"{FOLDED} --tp-comm-overlap", FOLDED, {TENSOR: (0.0, 0.6), COMPUTE: SAME}),
    (FSDP.replace("optim_grads_params", "optim_grads"), FSDP, {"memory.weights_gb": MORE, "memory.grads_gb": SAME}),
    # models
    ("--mtp-num-layers 1", "", {"params.mtp": MORE, "flops": MORE, "step_s": MORE}),
    ("--hidden-dropout 0.1", "", {ACTIVATIONS: MORE}),
    ("--fp32-residual-connection", "", {ACTIVATIONS: MORE}),
)


@pytest.mark.parametrize("flags, base, expected", CASES, ids=[flags for flags, _, _ in CASES])
def test_flag_changes_its_estimate_as_expected(flags, base, expected, plain):
    changed, usual = plan_report(flags), plain(base)
    for key, (least, most) in expected.items():
        before, after = get_figure(usual, key), get_figure(changed, key)
        if before == 0:
            assert after > 0 and most > 1, (key, after)
        else:
            assert least * before <= after <= most * before, (key, before, after)


def test_expert_capacity_bounds_the_memory_estimate(plain):
    """With a capacity, further tokens are dropped and cannot fill the device."""
    assert plain("")["memory"]["headroom"] > 2
    assert plan_report("--moe-expert-capacity-factor 2.0")["memory"]["headroom"] is None
    tight = "--micro-batch-size 8"
    free, capped = plan_report(tight)["memory"], plan_report(f"{tight} --moe-expert-capacity-factor 1.5")["memory"]
    assert free["headroom"] < 1.5 and capped["headroom"] == pytest.approx(free["headroom"], rel=0.01)


SMALL = "--preset moonlight_16b --mock-data --bf16 --expert-model-parallel-size 8 --global-batch-size 8 --micro-batch-size 1 --seq-length 1024"


def test_cuda_graphs_speed_up_a_launch_bound_model():
    """A small model is bound by kernel launches, which CUDA graphs save."""
    speeds = [
        plan_report(flags, "h100", 8, SMALL)["tflops_per_gpu"]
        for flags in ("", f"{GRAPHS} attn", f"{GRAPHS} attn moe_router")
    ]
    assert speeds[0] < speeds[1] < speeds[2]


MACHINES = ("a100", "h100", "h200", "b200", "gb200", "gb300")


def test_estimated_speed_follows_the_hardware():
    found = {machine: plan_report("--tensor-model-parallel-size 1", machine) for machine in MACHINES}
    speeds = [found[machine]["tflops_per_gpu"] for machine in MACHINES]
    assert speeds == sorted(speeds) and speeds[-1] > 4 * speeds[0]
    assert found["h100"]["memory"]["total_gb"] == found["gb300"]["memory"]["total_gb"]
    assert found["h200"]["memory"]["margin_gb"] > found["h100"]["memory"]["margin_gb"]


def test_speed_per_gpu_falls_with_the_number_of_gpus():
    speeds = [
        plan_report("--global-batch-size 1024", "h100", gpus)["tokens_per_s_per_gpu"] for gpus in (64, 128, 256, 512)
    ]
    assert speeds == sorted(speeds, reverse=True)


def test_depths_of_a_hybrid_model_cost_what_their_layers_do():
    """Nemotron 3.5 Lightning: two depths of an attention and an expert layer, one after the other or one repeated."""
    recipe = recorded("nemotron_recipes")[0]
    argv, world_size = recipe["argv"], recipe["world_size"]
    both, repeated, none = (
        plan_report("", base=" ".join(words), world_size=world_size)
        for words in (
            [word for word in argv if word != "--mtp-use-repeated-layer"],
            argv,
            [word.partition("/*E")[0] for word in argv],
        )
    )
    assert both["params"]["mtp"] == 2 * repeated["params"]["mtp"] > 0 == none["params"]["mtp"]
    assert both["params"]["total"] == repeated["params"]["total"] == none["params"]["total"]
    for key, alike in ((WEIGHTS, False), (ACTIVATIONS, True), (COMPUTE, True)):
        most, middle, least = (get_figure(report, key) for report in (both, repeated, none))
        assert (most == pytest.approx(middle, rel=1e-3) if alike else most > middle) and middle > least, key


def test_layers_with_an_indexer_are_timed_by_their_share():
    """One of three layers with attention: the time is a third of the way from none to all."""
    sizes = (
        "--mock-data --bf16 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 8192 --seq-length 8192 --max-position-embeddings 8192 "
        "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 32000 "
        "--kv-lora-rank 512 --position-embedding-type rope --no-rope-fusion --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 64 "
        "--dsa-indexer-topk 1024"
    )
    none, one, every = (
        get_figure(plan_report(f"--hybrid-layer-pattern={pattern}", "h100", 8, sizes), COMPUTE)
        for pattern in ("+++-", "D++-", "DDD-")
    )
    assert (one - none) / (every - none) == pytest.approx(1 / 3, abs=0.02)

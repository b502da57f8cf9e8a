"""Medians of Megatron-LM's own recipes, published with their files: flags, mappings and software are known exactly.

MLM = NVIDIA/Megatron-LM, branch dev at d48bd6be (2026-08-21), examples/moe_recipes: "Median TFLOP/s/GPU" of its README
for 16 of its 18 files. The two of DeepSeek-V4 are missing here, since the rules refuse them. Routing is forced to be
even.

These runs are of the software of summer 2026, all others of spring 2026 or older (PublishedRun.generation). Of
each kind (graphs of the full iteration, of parts, none) the second, fourth, ... in the order of the README are fitted
(corrections.py and the error bars); the others test that.
"""

from __future__ import annotations

from moe_trainer.estimate.published_runs import (
    BLOCKWISE,
    DEEPEP,
    GRAPHS,
    HYBRIDEP,
    MXFP8,
    OVERLAP,
    RECOMPUTE,
    SPLIT,
    RecipeRun,
)

NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
MX = f"{MXFP8} --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --moe-router-padding-for-quantization {NARROW}"
EXCHANGE = f"{OVERLAP} --delay-wgrad-compute"
STAGES = "--pipeline-model-parallel-layout Et*4|(tttt|)*14tmL"
SMS = "--moe-flex-dispatcher-num-sms"
STASH = (
    "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --moe-paged-stash "
    "--use-transformer-engine-op-fuser --moe-mlp-glu-interleave-size 32 --moe-pad-experts-for-cuda-graph-inference"
)
CAPACITY, PAGES = "--moe-expert-rank-capacity-factor", "--moe-paged-stash-buffer-size-factor-cuda"
ROUTER = "--cuda-graph-impl transformer_engine --cuda-graph-modules"

RECIPE_RUNS = (
    RecipeRun(
        "DeepSeek-V3 256xB200 MXFP8, recipe",
        *(1, 8, 32, 1, 2048, 776.7),
        f"{DEEPEP} {MX} {EXCHANGE} {STAGES} {SMS} 24 {RECOMPUTE} mla_up_proj mlp",
        "MLM",
    ),
    RecipeRun(
        "DeepSeek-V3 256xGB200 MXFP8, recipe",
        *(1, 4, 64, 1, 8192, 1127.6),
        f"{HYBRIDEP} {MX} {EXCHANGE} {STAGES} {SMS} 32 {RECOMPUTE} mla_up_proj {GRAPHS} "
        "--chunked-optimizer-state-offload --fine-grained-activation-offloading "
        "--offload-modules expert_fc1 --delay-offload-until-cuda-graph",
        "MLM",
    ),
    RecipeRun(
        "DeepSeek-V3 256xGB300 MXFP8, recipe",
        *(1, 4, 64, 1, 8192, 1357.7),
        f"{HYBRIDEP} {MX} {EXCHANGE} {STAGES} {SMS} 32 {GRAPHS}",
        "MLM",
        is_fitted=True,
    ),
    RecipeRun(
        "Qwen3-235B 256xH100 BF16, recipe",
        *(2, 8, 32, 1, 2048, 214.3),
        f"{HYBRIDEP} {EXCHANGE} {SPLIT} --num-layers-per-virtual-pipeline-stage 3 {RECOMPUTE} moe_act layernorm "
        f"{ROUTER} moe_router moe_preprocess",
        "MLM",
    ),
    RecipeRun(
        "Qwen3-235B 128xB200 MXFP8, recipe",
        *(2, 4, 16, 3, 3072, 633.9),
        f"{DEEPEP} {MX} {EXCHANGE} {SPLIT} --num-layers-per-virtual-pipeline-stage 2 {SMS} 20 --overlap-p2p-comm",
        "MLM",
        is_fitted=True,
    ),
    RecipeRun(
        "Qwen3-235B 128xB300 MXFP8, recipe",
        *(2, 1, 16, 3, 9216, 922.6),
        f"{HYBRIDEP} {MX} {EXCHANGE} {SMS} 32 {ROUTER} attn moe_router",
        "MLM",
        is_fitted=True,
    ),
    RecipeRun(
        "Qwen3-235B 128xGB200 MXFP8, recipe, full iteration",
        *(1, 1, 64, 1, 8192, 1159.5),
        f"{HYBRIDEP} {MX} {EXCHANGE} {SMS} 32 {STASH} {CAPACITY} 1.2 {PAGES} 1.0",
        "MLM",
    ),
    RecipeRun(
        "Qwen3-235B 128xGB200 MXFP8, recipe, partial graphs",
        *(1, 1, 64, 1, 8192, 1018),
        f"{HYBRIDEP} {MX} {EXCHANGE} {SMS} 32 {GRAPHS}",
        "MLM",
    ),
    RecipeRun(
        "Qwen3-235B 128xGB300 MXFP8, recipe, full iteration",
        *(1, 1, 64, 1, 8192, 1323.1),
        f"{HYBRIDEP} {MX} {EXCHANGE} {STASH} {CAPACITY} 1.2 {PAGES} 1.0",
        "MLM",
        is_fitted=True,
    ),
    RecipeRun(
        "Qwen3-30B 32xH100 FP8, recipe",
        *(1, 1, 8, 1, 256, 232.4),
        f"{HYBRIDEP} {BLOCKWISE} --fp8-param-gather {NARROW} {GRAPHS}",
        "MLM",
        is_fitted=True,
    ),
    RecipeRun("Qwen3-30B 32xH100 BF16, recipe", *(1, 1, 8, 1, 256, 234.1), HYBRIDEP, "MLM"),
    RecipeRun("Qwen3-30B 16xGB200 BF16, recipe", *(1, 1, 16, 4, 512, 528), HYBRIDEP, "MLM", is_fitted=True),
    RecipeRun(
        "Qwen3-30B 16xGB200 MXFP8, recipe, partial graphs",
        *(1, 1, 16, 4, 512, 514),
        f"{HYBRIDEP} {MXFP8} {GRAPHS}",
        "MLM",
    ),
    RecipeRun(
        "Qwen3-30B 16xGB200 MXFP8, recipe, full iteration",
        *(1, 1, 16, 4, 512, 646.8),
        f"{HYBRIDEP} {MXFP8} {STASH} {CAPACITY} 1.5 {PAGES} 1.1",
        "MLM",
    ),
)

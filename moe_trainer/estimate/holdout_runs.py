"""Published runs that were collected after layer_time.py and its constants were finished; no number was fitted to them.

They influenced only that a layer with a sliding window scores its window. The rows themselves, 38 of 51 and three of
DEV, were chosen with their errors known (scripts/bench_results/planner.md). TFLOP/s count as Megatron-LM counts them;
routing is forced to be even.

BP = NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and its archive: the tables of releases 25.11 and 26.02.
They state sizes and batch; the dispatcher, recompute, CUDA graphs and layout are those of scripts/performance/configs
of another date where these fit the row, else NCCL's all-to-all without captured parts. DEV = earlier steps of the
tuning of published_runs.py's run of that name, the eager ones before its host code was tuned. PF = arXiv 2504.14960 (as
in published_runs.py), rows that were left out there: G8T8 splits every expert of Mixtral-8x22B into eight and selects
eight; 8x70B is Llama-3-70B with eight experts per layer.
"""

from __future__ import annotations

from moe_trainer.estimate.published_runs import (
    DEEPEP,
    GRAPHS,
    H100_TFLOPS_PER_PERCENT,
    HYBRIDEP,
    MXFP8,
    OVERLAP,
    PP8,
    RECOMPUTE,
    SEVEN,
    SPLIT,
    UNFOLDED,
    VPP,
    HoldoutRun,
)

TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
ROUTER_GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router moe_preprocess"
NO_MTP = "--mtp-num-layers 0"
FOUR = "--pipeline-model-parallel-layout Et*4|(t*4|)*14tmL"
FOUR_PLAIN = "--pipeline-model-parallel-layout Et*4|(t*4|)*14tL"
EIGHT_PLAIN = "--pipeline-model-parallel-layout Et*7|(t*8|)*6t*6L"
TWO_PLAIN = "--pipeline-model-parallel-layout Et|(tt|)*30L"
SIXTEEN = "--pipeline-model-parallel-layout Et*3|(t*4|)*14t*2mL"
FINE = "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 2048"
SEVENTY = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8 --kv-channels 128 "
    "--ffn-hidden-size 28672 --moe-ffn-hidden-size 28672 --vocab-size 128256 --num-virtual-stages-per-pipeline-rank 5"
)


HOLDOUT_RUNS = (
    HoldoutRun(
        "DeepSeek-V3 without MTP 256xGB300 BF16",
        *(1, 2, 32, 1, 4096, 961),
        f"{NO_MTP} {EIGHT_PLAIN} {HYBRIDEP} {ROUTER_GRAPHS} {RECOMPUTE} mla_up_proj",
        "BP 25.11",
    ),
    HoldoutRun(
        "DeepSeek-V3 without MTP 256xGB300 MXFP8",
        *(1, 2, 32, 1, 4096, 1088),
        f"{NO_MTP} {EIGHT_PLAIN} {HYBRIDEP} {MXFP8} {ROUTER_GRAPHS} {RECOMPUTE} mla_up_proj",
        "BP 25.11",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xGB300 MXFP8, PP2",
        *(1, 2, 32, 2, 4096, 1199),
        f"{FOUR} {HYBRIDEP} {MXFP8} {GRAPHS} {RECOMPUTE} mla_up_proj",
        "BP 26.02",
    ),
    HoldoutRun(
        "DeepSeek-V3 without MTP 256xGB200 BF16",
        *(1, 4, 64, 1, 4096, 782),
        f"{NO_MTP} {FOUR_PLAIN} {HYBRIDEP} {GRAPHS} {RECOMPUTE} mla_up_proj",
        "BP 25.11",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xGB200 MXFP8, eager, PP8, DeepEP, recompute",
        *(1, 8, 32, 1, 2048, 566),
        f"{PP8} {DEEPEP} {MXFP8} {RECOMPUTE} mla_up_proj",
        "DEV",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xGB200 MXFP8, eager, PP8, DeepEP",
        *(1, 8, 32, 1, 2048, 611),
        f"{PP8} {DEEPEP} {MXFP8}",
        "DEV",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xGB200 MXFP8, PP8, DeepEP",
        *(1, 8, 32, 1, 2048, 830),
        f"{PP8} {DEEPEP} {MXFP8} {GRAPHS}",
        "DEV",
    ),
    HoldoutRun(
        "DeepSeek-V3 without MTP 256xGB200 MXFP8, PP8",
        *(1, 8, 32, 1, 4096, 1003),
        f"{NO_MTP} {TWO_PLAIN} {HYBRIDEP} {MXFP8} {GRAPHS}",
        "BP 25.11",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xGB200 MXFP8, batch 4096",
        *(1, 4, 64, 1, 4096, 1028),
        f"{FOUR} {HYBRIDEP} {MXFP8} {GRAPHS} {RECOMPUTE} mlp",
        "BP 26.02",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xB300 MXFP8, PP16 EP8",
        *(1, 16, 8, 1, 4096, 776),
        f"{SIXTEEN} {HYBRIDEP} {MXFP8} {GRAPHS} {RECOMPUTE} mla_up_proj",
        "BP 26.02",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xB200 MXFP8, PP16 EP8",
        *(1, 16, 8, 1, 4096, 699),
        f"{SIXTEEN} {HYBRIDEP} {MXFP8} {RECOMPUTE} mla_up_proj",
        "BP 26.02",
    ),
    HoldoutRun("Qwen3-30B 8xGB300 MXFP8", *(1, 1, 8, 8, 512, 699), f"{HYBRIDEP} {MXFP8} {ROUTER_GRAPHS}", "BP 26.02"),
    HoldoutRun(
        "Qwen3-30B 8xGB300 MXFP8, older", *(1, 1, 8, 4, 512, 666), f"{HYBRIDEP} {MXFP8} {ROUTER_GRAPHS}", "BP 25.11"
    ),
    HoldoutRun("Qwen3-30B 8xGB200 MXFP8", *(1, 1, 8, 4, 512, 600), f"{HYBRIDEP} {MXFP8} {ROUTER_GRAPHS}", "BP 26.02"),
    HoldoutRun(
        "Qwen3-30B 8xGB200 MXFP8, older", *(1, 1, 8, 4, 512, 547), f"{HYBRIDEP} {MXFP8} {ROUTER_GRAPHS}", "BP 25.11"
    ),
    HoldoutRun("Qwen3-30B 8xB300 MXFP8", *(1, 1, 8, 8, 512, 679), f"{HYBRIDEP} {MXFP8} {ROUTER_GRAPHS}", "BP 26.02"),
    HoldoutRun("Qwen3-30B 8xB200 MXFP8, eager, alltoall", *(1, 1, 8, 1, 512, 223), MXFP8, "BP 26.02"),
    HoldoutRun(
        "Qwen3-30B 16xH100 FP8, eager, alltoall, PP2 VPP12",
        *(1, 2, 8, 1, 1024, 118),
        f"{TENSORWISE} {VPP} 12 {OVERLAP}",
        "BP 26.02",
    ),
    HoldoutRun(
        "Qwen3-235B 256xGB300 MXFP8, batch 8192",
        *(1, 4, 32, 2, 8192, 974),
        f"{SPLIT} {VPP} 12 {HYBRIDEP} {MXFP8} {GRAPHS}",
        "BP 26.02",
    ),
    HoldoutRun(
        "Qwen3-235B 256xGB300 BF16",
        *(1, 4, 16, 2, 8192, 907),
        f"{SPLIT} {VPP} 12 {HYBRIDEP} {GRAPHS}",
        "BP 25.11",
    ),
    HoldoutRun(
        "Qwen3-235B 256xGB200 MXFP8, PP8",
        *(1, 8, 32, 1, 8192, 806),
        f"{SPLIT} {VPP} 3 {HYBRIDEP} {MXFP8} {GRAPHS}",
        "BP 26.02",
    ),
    HoldoutRun(
        "Qwen3-235B 256xGB200 BF16, PP8",
        *(1, 8, 32, 1, 8192, 728),
        f"{SPLIT} {VPP} 3 {HYBRIDEP} {GRAPHS}",
        "BP 25.11",
    ),
    HoldoutRun("Qwen3-235B 256xB200 MXFP8, eager, alltoall", *(1, 8, 8, 1, 8192, 563), f"{SPLIT} {MXFP8}", "BP 26.02"),
    HoldoutRun(
        "Qwen3-235B 256xH100 FP8, eager, alltoall",
        *(2, 8, 32, 1, 8192, 242),
        f"{SPLIT} {VPP} 4 {TENSORWISE} {OVERLAP}",
        "BP 26.02",
    ),
    HoldoutRun("GPT-OSS-120B 64xGB300 BF16, alltoall", *(1, 1, 64, 4, 1280, 527), GRAPHS, "BP 26.02"),
    HoldoutRun(
        "GPT-OSS-120B 64xGB200 BF16, eager, alltoall",
        *(1, 1, 64, 4, 1280, 428),
        f"{RECOMPUTE} layernorm moe_act",
        "BP 26.02",
    ),
    HoldoutRun(
        "GPT-OSS-120B 64xB200 BF16, eager, alltoall",
        *(1, 1, 64, 4, 1280, 219),
        f"{RECOMPUTE} layernorm moe_act",
        "BP 26.02",
    ),
    HoldoutRun(
        "GPT-OSS-120B 64xH100 BF16, eager, alltoall",
        *(1, 4, 8, 1, 1280, 163),
        f"{RECOMPUTE} layernorm moe_act",
        "BP 26.02",
    ),
    HoldoutRun(
        "Mixtral-8x22B 128xH100 BF16, experts over TP",
        *(2, 8, 4, 1, 256, 46.3 * H100_TFLOPS_PER_PERCENT),
        f"{SEVEN} {UNFOLDED}",
        "PF, 46.3 %",
    ),
    HoldoutRun(
        "Mixtral-8x22B 128xH100 BF16, no pipeline", *(4, 1, 8, 1, 256, 36.6 * H100_TFLOPS_PER_PERCENT), "", "PF, 36.6 %"
    ),
    HoldoutRun(
        "Qwen2-57B 64xH100 BF16, experts over TP",
        *(2, 4, 4, 1, 256, 35.3 * H100_TFLOPS_PER_PERCENT),
        f"{SEVEN} {UNFOLDED}",
        "PF, 35.3 %",
    ),
    HoldoutRun(
        "Qwen2-57B 64xH100 BF16, no pipeline", *(4, 1, 4, 1, 256, 23.1 * H100_TFLOPS_PER_PERCENT), "", "PF, 23.1 %"
    ),
    HoldoutRun(
        "G8T8 128xH100 BF16, experts over TP",
        *(2, 8, 8, 1, 256, 17.1 * H100_TFLOPS_PER_PERCENT),
        f"{FINE} {SEVEN} {UNFOLDED}",
        "PF, 17.1 %",
    ),
    *tuple(
        HoldoutRun(
            f"G8T8 {gpus}xH100 BF16, batch {batch}",
            *(4, 8, 8, 1, batch, mfu * H100_TFLOPS_PER_PERCENT),
            f"{FINE} {SEVEN}",
            f"PF, {mfu} %",
        )
        for gpus, batch, mfu in (
            (128, 256, 28.8),
            (128, 1024, 30.0),
            (256, 1024, 29.3),
            (512, 1024, 26.7),
            (1024, 1024, 25.5),
        )
    ),
    HoldoutRun(
        "8x70B 256xH100 BF16, experts over TP",
        *(8, 8, 4, 1, 256, 38.8 * H100_TFLOPS_PER_PERCENT),
        f"{SEVENTY} --expert-tensor-parallel-size 8",
        "PF, 38.8 %",
    ),
    *tuple(
        HoldoutRun(
            f"8x70B 256xH100 BF16, batch {batch}",
            *(8, 16, 8, 1, batch, mfu * H100_TFLOPS_PER_PERCENT),
            SEVENTY,
            f"PF, {mfu} %",
        )
        for batch, mfu in ((256, 41.6), (1024, 43.7))
    ),
)

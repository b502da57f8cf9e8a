"""Published runs: how many GPUs made how many TFLOP/s with which mapping. Facts with sources; none of them is a run of this program.

All ran with forced even routing, without dropped tokens and on mock data. `fits`: the constants of layer_time.py were fitted to these rows; the
others are there to be predicted. TFLOP/s count as Megatron-LM counts them.

Sources: P = arXiv 2603.07685v2 (tables 11, 17 and 20, the layout strings, 4.1.2); BR = NVIDIA-NeMo/Megatron-Bridge, skills nemo-mbridge-perf-*;
DEV = NVIDIA/Megatron-LM, branch dev, discussion of DeepSeek-V3 on GB200; PF = arXiv 2504.14960 (MFU of 989.5 TFLOP/s).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

BILLIONS = MappingProxyType({
    "deepseek_v3": 682.6, "qwen3_235b_a22b": 235.1, "qwen3_30b_a3b": 30.5, "moonlight_16b": 16.0, "mixtral_8x22b": 140.6,
    "qwen2_57b_a14b": 57.4,
})
"""Parameters of the models, in 10^9, with multi-token prediction."""
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
DEEPEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
OVERLAP = "--overlap-moe-expert-parallel-comm"
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"
BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16"
SPLIT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class Published:
    """One run. width: of the products, "bf16" or "fp8"; flags: what else its command line says; peak_gib: memory, where known."""

    name: str
    model: str
    hardware: str
    gpus: int
    width: str
    tp: int
    pp: int
    ep: int
    mbs: int
    gbs: int
    tflops: float
    flags: str
    source: str
    seq: int = 4096
    fits: bool = True
    peak_gib: float | None = None

    def argv(self) -> list[str]:
        """Its command line, as far as it matters here."""
        tensor = f"--tensor-model-parallel-size {self.tp} --sequence-parallel --expert-tensor-parallel-size 1" if self.tp > 1 else ""
        return (f"--preset {self.model} --mock-data --seq-length {self.seq} {tensor} --pipeline-model-parallel-size {self.pp} "
                f"--expert-model-parallel-size {self.ep} --micro-batch-size {self.mbs} --global-batch-size {self.gbs} {self.flags}").split()


def _layout(text: str) -> str:
    return f"--pipeline-model-parallel-layout {text}"


ROWS = (
    Published("DeepSeek-V3 256xGB300 MXFP8", "deepseek_v3", "gb300", 256, "fp8", 1, 4, 64, 1, 8192, 1233,
              f"{_layout('Et*4|(tttt|)*14tmL')} {HYBRIDEP} {MXFP8} {OVERLAP} {GRAPHS}", "P table 11"),
    Published("DeepSeek-V3 256xGB200 MXFP8", "deepseek_v3", "gb200", 256, "fp8", 1, 4, 64, 1, 8192, 1048,
              f"{_layout('Et*4|(tttt|)*14tmL')} {HYBRIDEP} {MXFP8} --recompute-granularity selective --recompute-modules mlp {GRAPHS}",
              "P table 11"),
    Published("DeepSeek-V3 256xGB200 BF16", "deepseek_v3", "gb200", 256, "bf16", 1, 8, 32, 1, 4096, 857,
              f"{_layout('Et|(tt|)*30mL')} {HYBRIDEP} {GRAPHS}", "P table 11"),
    Published("DeepSeek-V3 1024xH100 FP8", "deepseek_v3", "h100", 1024, "fp8", 2, 8, 64, 1, 8192, 368,
              f"{_layout('Et|(tt|)*30mL')} {DEEPEP} {BLOCKWISE} {OVERLAP} --recompute-granularity selective "
              "--recompute-modules mlp mla_up_proj moe_act layernorm", "P tables 11 and 17"),
    Published("Qwen3-235B 256xGB300 MXFP8", "qwen3_235b_a22b", "gb300", 256, "fp8", 1, 4, 64, 2, 3072, 974,
              f"{SPLIT} --num-virtual-stages-per-pipeline-rank 6 {HYBRIDEP} {MXFP8} {GRAPHS}", "P table 11"),
    Published("Qwen3-235B 256xH100 BF16", "qwen3_235b_a22b", "h100", 256, "bf16", 2, 8, 32, 1, 2048, 320,
              f"{SPLIT} --num-virtual-stages-per-pipeline-rank 4 {DEEPEP} {OVERLAP} {GRAPHS} --recompute-granularity selective "
              "--recompute-modules moe_act layernorm", "P table 11"),
    Published("Qwen3-30B 16xH100 BF16, exchange overlapped", "qwen3_30b_a3b", "h100", 16, "bf16", 1, 1, 16, 1, 1024, 299.352,
              f"{HYBRIDEP} {OVERLAP}", "BR perf-moe-hardware-configs", peak_gib=62.166),
    Published("Qwen3-30B 16xH100 BF16", "qwen3_30b_a3b", "h100", 16, "bf16", 1, 1, 16, 1, 1024, 244.039, HYBRIDEP,
              "BR perf-expert-parallel-overlap"),
    Published("Moonlight-16B 8xH100 BF16", "moonlight_16b", "h100", 8, "bf16", 2, 1, 8, 1, 4, 77.5, NARROW,
              "BR perf-activation-recompute (0.457 s; memory 36.6, GB or GiB)"),
    # to be predicted
    Published("Qwen3-235B 256xGB200 BF16", "qwen3_235b_a22b", "gb200", 256, "bf16", 1, 4, 32, 1, 8192, 750,
              f"{SPLIT} --num-virtual-stages-per-pipeline-rank 12 {HYBRIDEP} {OVERLAP} {GRAPHS} --recompute-granularity selective "
              "--recompute-modules moe_act layernorm", "P table 11", fits=False),
    Published("DeepSeek-V3 256xGB200 MXFP8, PP8", "deepseek_v3", "gb200", 256, "fp8", 1, 8, 32, 1, 2048, 944,
              f"{_layout('Et|(tt|)*30mL')} {HYBRIDEP} {MXFP8} {GRAPHS}", "DEV", fits=False),
    Published("Mixtral-8x22B 128xH100 BF16", "mixtral_8x22b", "h100", 128, "bf16", 2, 8, 8, 1, 256, 487.8,
              "--num-virtual-stages-per-pipeline-rank 7", "PF, 49.3 % MFU (virtual stages: the zoo's 7)", fits=False),
    Published("Mixtral-8x22B 1024xH100 BF16", "mixtral_8x22b", "h100", 1024, "bf16", 2, 8, 8, 1, 1024, 444.3,
              "--num-virtual-stages-per-pipeline-rank 7", "PF, 44.9 % MFU (virtual stages: the zoo's 7)", fits=False),
    Published("Qwen2-57B 64xH100 BF16", "qwen2_57b_a14b", "h100", 64, "bf16", 2, 4, 4, 1, 256, 385.9, "", "PF, 39.0 % MFU", fits=False),
)

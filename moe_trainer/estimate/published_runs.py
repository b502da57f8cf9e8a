"""Published runs: TFLOP/s per GPU by model, device and mapping, with sources. None of them is a run of this program.

All ran with forced even routing and on mock data, those of PF with a capacity of one even share, the others without
dropped tokens. The constants of layer_time.py were fitted to the runs with `fits`; the others serve as predictions.
TFLOP/s count as Megatron-LM counts them.

Sources: P = arXiv 2603.07685v2 (tables 11, 17 and 20, the layout strings, 4.1.2); BR = NVIDIA-NeMo/Megatron-Bridge,
skills nemo-mbridge-perf-*; DEV = NVIDIA/Megatron-LM, branch dev, discussion of DeepSeek-V3 on GB200; PF = arXiv
2504.14960 (MFU of 989.5 TFLOP/s; it does not state micro-batches and virtual stages: 1 is assumed for the first, the 7
of the same models in Megatron-MoE-ModelZoo for the others).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

PRESETS = MappingProxyType(
    {
        "DeepSeek-V3": "deepseek_v3",
        "Qwen3-235B": "qwen3_235b_a22b",
        "Qwen3-30B": "qwen3_30b_a3b",
        "Moonlight-16B": "moonlight_16b",
        "Mixtral-8x22B": "mixtral_8x22b",
        "Qwen2-57B": "qwen2_57b_a14b",
        "GPT-OSS-120B": "gpt_oss_120b",
        "G8T8": "mixtral_8x22b",
        "8x70B": "mixtral_8x22b",
    }
)
"""Preset of each model; those of the last two are changed by flags."""
BILLION_PARAMS = MappingProxyType(
    {
        "deepseek_v3": 682.6,
        "qwen3_235b_a22b": 235.1,
        "qwen3_30b_a3b": 30.5,
        "moonlight_16b": 16.0,
        "mixtral_8x22b": 140.6,
        "qwen2_57b_a14b": 57.4,
    }
)
"""Parameters of the models, in 10^9, with multi-token prediction."""
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
DEEPEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
OVERLAP = "--overlap-moe-expert-parallel-comm"
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"
BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16"
DELAYED = "--fp8-format hybrid --fp8-recipe delayed"
VPP = "--num-virtual-stages-per-pipeline-rank"
SEVEN = f"{VPP} 7"
PP4 = "--pipeline-model-parallel-layout Et*4|(tttt|)*14tmL"
PP8 = "--pipeline-model-parallel-layout Et|(tt|)*30mL"
RECOMPUTE = "--recompute-granularity selective --recompute-modules"
UNFOLDED = "--expert-tensor-parallel-size 2"
H100_TFLOPS_PER_PERCENT = 9.895
"""TFLOP/s of a percent of MFU in PF."""
SPLIT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class PublishedRun:
    """One run.

    Attributes:
        name: "MODEL GPUSxHARDWARE FORMAT", and what else tells it from other runs.
        flags: the rest of its command line.
        peak_gib: memory, if known.
    """

    name: str
    tp: int
    pp: int
    ep: int
    mbs: int
    gbs: int
    tflops: float
    flags: str
    source: str
    seq: int = 4096
    is_fitted: bool = True
    peak_gib: float | None = None
    cp: int = 1

    generation: ClassVar[str] = "spring"
    """Megatron-LM's software: of spring 2026 or older, or of summer 2026."""
    weight: ClassVar[float] = 1.0
    """In fits, against that of other series."""

    @cached_property
    def _words(self) -> tuple[str, ...]:
        """Model, number of GPUs, hardware and format."""
        return re.findall(r"^(\S+).* (\d+)x(\w+) (\w+)", self.name)[0]

    @property
    def model(self) -> str:
        """Preset of the model."""
        return PRESETS[self._words[0]]

    @property
    def gpus(self) -> int:
        return int(self._words[1])

    @property
    def hardware(self) -> str:
        return self._words[2].lower()

    @property
    def width(self) -> str:
        """Format of the GEMMs, "bf16" or "fp8"."""
        return "bf16" if self._words[3] == "BF16" else "fp8"

    @property
    def etp(self) -> int:
        """Expert tensor parallel size."""
        return self.tp if UNFOLDED in self.flags else 1

    @property
    def family(self) -> str:
        """The model, where one preset represents several."""
        return self._words[0] if self._words[0] in ("G8T8", "8x70B") else self.model

    @property
    def series(self) -> tuple[str, str, str, str]:
        """Model, machine, format and software, of which several runs are hardly more evidence than one."""
        return self.family, self.hardware, self.width, self.generation

    @property
    def dispatcher(self) -> str:
        return next((backend for backend in ("hybridep", "deepep") if backend in self.flags), "alltoall")

    def argv(self) -> list[str]:
        """Return its command line, as far as it matters here."""
        tensor = (
            f"--tensor-model-parallel-size {self.tp} --sequence-parallel --expert-tensor-parallel-size 1"
            if self.tp > 1
            else ""
        )
        tensor += f" --context-parallel-size {self.cp}" if self.cp > 1 else ""
        return (
            f"--preset {self.model} --mock-data --seq-length {self.seq} {tensor} --pipeline-model-parallel-size "
            f"{self.pp} --expert-model-parallel-size {self.ep} --micro-batch-size {self.mbs} --global-batch-size "
            f"{self.gbs} {self.flags}"
        ).split()


@dataclass(frozen=True)
class HoldoutRun(PublishedRun):
    """A published run that no constant was fitted to."""

    is_fitted: bool = False


@dataclass(frozen=True)
class RecipeRun(HoldoutRun):
    """A run of a recipe of summer 2026 (recipe_runs.py); `is_fitted`: by corrections and error bars alone."""

    generation = "summer"
    weight = 2.0  # the software is the latest, and the flags are known exactly


SERIES = (
    ("Mixtral-8x22B", 8, 8, True, ((128, 52.2), (256, 50.7), (512, 48.9), (1024, 44.9))),
    ("Mixtral-8x22B", 8, 4, False, ((128, 49.4), (256, 48.0), (512, 45.5), (1024, 42.3))),
    ("Qwen2-57B", 4, 4, True, ((64, 39.9), (128, 39.7), (256, 38.1), (512, 36.6), (1024, 33.4))),
    ("Qwen2-57B", 4, 4, False, ((64, 36.2), (128, 36.0), (256, 34.8), (512, 32.5), (1024, 29.8))),
)
"""Strong scaling of PF with 1024 sequences per iteration.

Name, PP, EP, whether experts are folded (else sharded like attention), (GPUs, MFU in %). The ends of the folded
series are fitted: nothing else determines the time of an iteration besides its microbatches.
"""

PUBLISHED_RUNS = (
    PublishedRun(
        "DeepSeek-V3 256xGB300 MXFP8",
        *(1, 4, 64, 1, 8192, 1233),
        f"{PP4} {HYBRIDEP} {MXFP8} {OVERLAP} {GRAPHS}",
        "P table 11",
    ),
    PublishedRun(
        "DeepSeek-V3 256xGB200 MXFP8",
        *(1, 4, 64, 1, 8192, 1048),
        f"{PP4} {HYBRIDEP} {MXFP8} {RECOMPUTE} mlp {GRAPHS}",
        "P table 11",
    ),
    PublishedRun(
        "DeepSeek-V3 256xGB200 BF16",
        *(1, 8, 32, 1, 4096, 857),
        f"{PP8} {HYBRIDEP} {GRAPHS}",
        "P table 11",
    ),
    PublishedRun(
        "DeepSeek-V3 1024xH100 FP8",
        *(2, 8, 64, 1, 8192, 368),
        f"{PP8} {DEEPEP} {BLOCKWISE} {OVERLAP} {RECOMPUTE} mlp mla_up_proj moe_act layernorm",
        "P tables 11 and 17",
    ),
    PublishedRun(
        "Qwen3-235B 256xGB300 MXFP8",
        *(1, 4, 64, 2, 3072, 974),
        f"{SPLIT} {VPP} 6 {HYBRIDEP} {MXFP8} {GRAPHS}",
        "P table 11",
    ),
    PublishedRun(
        "Qwen3-235B 256xH100 BF16",
        *(2, 8, 32, 1, 2048, 320),
        f"{SPLIT} {VPP} 4 {DEEPEP} {OVERLAP} {GRAPHS} {RECOMPUTE} moe_act layernorm",
        "P table 11",
    ),
    PublishedRun(
        "Qwen3-30B 16xH100 BF16, exchange overlapped",
        *(1, 1, 16, 1, 1024, 299.352),
        f"{HYBRIDEP} {OVERLAP}",
        "BR perf-moe-hardware-configs",
        peak_gib=62.166,
    ),
    PublishedRun("Qwen3-30B 16xH100 BF16", *(1, 1, 16, 1, 1024, 244.039), HYBRIDEP, "BR perf-expert-parallel-overlap"),
    # predictions
    # This run measured the host: recompute that costs the device almost nothing makes it up to 11 % slower
    HoldoutRun(
        "Moonlight-16B 8xH100 BF16",
        *(2, 1, 8, 1, 4, 77.5),
        NARROW,
        "BR perf-activation-recompute (0.457 s; memory 36.6, GB or GiB)",
    ),
    HoldoutRun(
        "Qwen3-235B 256xGB200 BF16",
        *(1, 4, 32, 1, 8192, 750),
        f"{SPLIT} {VPP} 12 {HYBRIDEP} {OVERLAP} {GRAPHS} {RECOMPUTE} moe_act layernorm",
        "P table 11",
    ),
    HoldoutRun(
        "DeepSeek-V3 256xGB200 MXFP8, PP8",
        *(1, 8, 32, 1, 2048, 944),
        f"{PP8} {HYBRIDEP} {MXFP8} {GRAPHS}",
        "DEV",
    ),
    HoldoutRun(
        "Qwen3-30B 16xH100 BF16, alltoall",
        *(1, 1, 16, 1, 1024, 132.9),
        "",
        "BR perf-expert-parallel-overlap (whether the exchange is overlapped is not stated)",
    ),
    HoldoutRun("Mixtral-8x22B 128xH100 BF16", *(2, 8, 8, 1, 256, 487.8), SEVEN, "PF, 49.3 %"),
    HoldoutRun("Mixtral-8x22B 128xH100 FP8", *(2, 8, 8, 1, 256, 632), f"{SEVEN} {DELAYED}", "PF"),
    HoldoutRun(
        "Mixtral-8x22B 128xH100 FP8, experts over TP", *(2, 8, 4, 1, 256, 575), f"{SEVEN} {DELAYED} {UNFOLDED}", "PF"
    ),
    HoldoutRun("Qwen2-57B 64xH100 BF16", *(2, 4, 4, 1, 256, 385.9), SEVEN, "PF, 39.0 %"),
    *tuple(
        PublishedRun(
            f"{name} {gpus}xH100 BF16{'' if folded else ', experts over TP'}, batch 1024",
            *(2, pp, ep, 1, 1024, H100_TFLOPS_PER_PERCENT * mfu),
            SEVEN if folded else f"{SEVEN} {UNFOLDED}",
            f"PF, {mfu} %",
            is_fitted=folded and gpus in (points[0][0], points[-1][0]),
        )
        for name, pp, ep, folded, points in SERIES
        for gpus, mfu in points
    ),
    *tuple(
        PublishedRun(
            f"Mixtral-8x22B {gpus}xH100 BF16, {seq // 1024}K",
            *(tp, 8, 8, 1, 1024, H100_TFLOPS_PER_PERCENT * mfu),
            f"{SEVEN} --max-position-embeddings 131072",
            f"PF, {mfu} % (global batch taken for that of its other runs)",
            seq,
            False,
            cp=cp,
        )
        for seq, gpus, cp, tp, mfu in (
            (16384, 128, 4, 2, 47.6),
            (32768, 256, 8, 2, 45.1),
            (65536, 512, 8, 4, 44.5),
            (131072, 1024, 8, 8, 42.9),
        )
    ),
)

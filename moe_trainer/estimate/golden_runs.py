"""Measured seconds and bytes of Megatron-LM's functional tests: small models, real routing, complete command lines.

NVIDIA/Megatron-LM, branch main at d98e8a64 (2026-08-22), tests/functional_tests/test_cases/*/golden_values_dev_dgx_*:
medians of `iteration-time`, largest `mem-max-allocated-bytes`, both of the last rank. Its continuous integration gives
each case eight GPUs (tests/test_utils/recipes); 128 are assumed for the release test of Mixtral 8x22B, since that does
not say. Error bars (uncertainty.py) are fitted to the times of every second case, nothing to its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

LATENT = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --make-vocab-size-divisible-by 3232 "
    "--lr 1e-4 --train-iters 50 --transformer-impl transformer_engine --bf16 "
    "--seq-length 4096 --max-position-embeddings 4096 --ffn-hidden-size 4096 --num-attention-heads 32 "
    "--kv-channels 128 "
    "--position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --multi-latent-attention --attention-dropout 0 --hidden-dropout 0 "
    "--qk-layernorm --num-experts 32 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-topk 4 "
    "--moe-router-pre-softmax --moe-grouped-gemm --moe-router-group-topk 2 --moe-router-num-groups 4 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 --q-lora-rank 1536 "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --use-distributed-optimizer "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --attention-backend unfused"
)
FOUR_CHUNKS = (
    "--num-layers 16 --moe-layer-freq [0]*1+[1]*15 --num-virtual-stages-per-pipeline-rank 4 --micro-batch-size 4 "
    "--global-batch-size 32 --overlap-grad-reduce --overlap-param-gather"
)
RECOMPUTE = "--recompute-granularity selective --recompute-modules layernorm mla_up_proj mlp moe_act"
OFFLOAD = (
    "--num-layers 15 --hidden-size 1024 --moe-layer-freq [0]*3+[1]*12 --micro-batch-size 1 --global-batch-size 8 "
    f"{RECOMPUTE} --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act attn_norm mlp_norm "
    "qkv_linear core_attn attn_proj"
)
DENSE = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 131073 --lr 1e-4 --train-iters 25 --bf16 "
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 --global-batch-size 8 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --no-gradient-accumulation-fusion "
    "--deterministic-mode"
)
MTP = "--mtp-num-layers 1"


@dataclass(frozen=True)
class GoldenRun:
    """One case on one machine.

    Attributes:
        seconds: of an iteration.
        gib: 2^30 bytes that the allocator of the last rank has given out at its peak.
    """

    name: str
    hardware: str
    flags: str
    seconds: float
    gib: float
    gpus: int = 8
    is_fitted: bool = False

    def argv(self) -> list[str]:
        """Return its command line, as far as it matters here."""
        return self.flags.split()


_MEMORY_SPEED = f"{LATENT} {FOUR_CHUNKS} --hidden-size 1024 {MTP}"
_OFFLOADING = (
    f"{LATENT} {OFFLOAD} {MTP} --overlap-moe-expert-parallel-comm --pipeline-model-parallel-layout Et*3|(tt|)*6mL"
)
_PLAIN_OFFLOADING = f"{LATENT} {OFFLOAD} --pipeline-model-parallel-layout Et*3|(tt|)*6L"
_STAGES = f"{DENSE} --micro-batch-size 1 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
_TENSOR = f"{DENSE} --micro-batch-size 2 --tensor-model-parallel-size 4"

GOLDEN_RUNS = (
    GoldenRun("latent attention", "h100", _MEMORY_SPEED, 1.027, 55.98),
    GoldenRun(
        "latent attention, FP8",
        "h100",
        f"{_MEMORY_SPEED} --fp8-format hybrid --fp8-recipe tensorwise",
        *(1.147, 53.62),
        is_fitted=True,
    ),
    GoldenRun(
        "latent attention, recompute",
        "h100",
        f"{LATENT} --num-layers 16 --hidden-size 1024 --moe-layer-freq [0]*3+[1]*13 --micro-batch-size 4 "
        f"--global-batch-size 32 --overlap-grad-reduce --overlap-param-gather {MTP} {RECOMPUTE} "
        "--overlap-moe-expert-parallel-comm --pipeline-model-parallel-layout Et*3|(tt|)*6tmL",
        *(1.100, 45.83),
    ),
    GoldenRun(
        "latent attention, CUDA graphs",
        "h100",
        f"{LATENT} {FOUR_CHUNKS} --hidden-size 512 --cuda-graph-impl transformer_engine --cuda-graph-modules attn",
        *(0.852, 38.37),
        is_fitted=True,
    ),
    GoldenRun("offloading", "h100", _OFFLOADING, 1.883, 7.75),
    GoldenRun("offloading", "gb200", _OFFLOADING, 0.949, 7.72, is_fitted=True),
    GoldenRun("offloading, no overlap", "h100", _PLAIN_OFFLOADING, 1.941, 6.67),
    GoldenRun("offloading, no overlap", "gb200", _PLAIN_OFFLOADING, 0.895, 6.62, is_fitted=True),
    GoldenRun("dense 7B, PP4", "h100", _STAGES, 1.150, 56.55),
    GoldenRun("dense 7B, PP4", "gb200", _STAGES, 0.787, 56.36, is_fitted=True),
    GoldenRun("dense 7B, TP4", "h100", _TENSOR, 1.115, 53.22),
    GoldenRun("dense 7B, TP4", "gb200", _TENSOR, 0.853, 54.22, is_fitted=True),
    GoldenRun(
        "Mixtral 8x22B, TP2 PP8 EP8",
        "h100",
        "--preset mixtral_8x22b --mock-data --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 8 --expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 256",
        *(6.914, 26.57),
        gpus=128,
    ),
)

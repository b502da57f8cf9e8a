"""Command lines that ask for CUDA graphs of parts that are not captured: (flags added, flags removed, flag that the error names)."""

ATTN = "--cuda-graph-impl local --cuda-graph-modules attn"
ROUTER = f"{ATTN} moe_router"
PREPROCESS = f"{ROUTER} moe_preprocess"
PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
EXPERTS = f"--cuda-graph-impl local --cuda-graph-modules moe {PADDED}"
WHOLE = f"--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad {PADDED}"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
BUDGET = f"--expert-model-parallel-size 4 {HYBRIDEP} --moe-expert-rank-capacity-factor 1.5 --moe-grouped-gemm"
EXPERTS_ALONE = "--cuda-graph-impl local --cuda-graph-modules moe"
FULL = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
DROPLESS = f"{FULL} {BUDGET}"
FUSED = "--use-transformer-engine-op-fuser --bf16 --fp8-format e4m3"
SP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
UNSUPPORTED = (
    (
        "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 64 --pad-packed-seq-alignment max --thd-max-packed-sequences 4 --context-parallel-size 2 --cuda-graph-impl local --cuda-graph-modules attn",
        "",
        "--cuda-graph-impl",
    ),
    ("--cuda-graph-impl local", "", "--moe-pad-expert-input-to-capacity"),
    ("--enable-cuda-graph", "", "--moe-pad-expert-input-to-capacity"),
    ("--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", "", "--moe-pad-expert-input-to-capacity"),
    (f"{PREPROCESS} --moe-expert-capacity-factor 1.0", "", "--moe-expert-capacity-factor"),
    (
        f"{PREPROCESS} --fp8-format hybrid --moe-router-padding-for-quantization",
        "",
        "--moe-router-padding-for-quantization",
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 4 --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend hierarchical --moe-hierarchical-domain-size 2",
        "",
        "--moe-flex-dispatcher-backend",
    ),
    (f"{EXPERTS} --moe-expert-rank-capacity-factor 1.5", "", "--moe-expert-rank-capacity-factor"),
    (f"{ROUTER} --moe-router-load-balancing-type sinkhorn", "", "--moe-router-load-balancing-type"),
    (f"{ROUTER} --moe-router-force-biased 1.0", "", "--moe-router-force-biased"),
    (f"{ROUTER} --moe-input-jitter-eps 0.1 {SP2}", "", "--moe-input-jitter-eps"),
    (f"{ATTN} --attention-dropout 0.1 {SP2}", "", "--attention-dropout"),
    (f"{ATTN} --hidden-dropout 0.1 {SP2}", "", "--hidden-dropout"),
    (
        f"{ATTN} --hidden-dropout 0.1 --recompute-granularity selective --recompute-modules core_attn",
        "",
        "--hidden-dropout",
    ),
    (f"{ATTN} --attention-dropout 0.1 --context-parallel-size 2", "", "--attention-dropout"),
    (f"{ROUTER} --recompute-granularity selective --recompute-modules moe", "", "--recompute-modules"),
    (f"{ATTN} --use-torch-fsdp2", "", "--use-torch-fsdp2"),
    (f"{ATTN} mamba", "", "--cuda-graph-modules"),
    (
        f"{WHOLE} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--overlap-param-gather-with-optimizer-step --num-layers-per-virtual-pipeline-stage 1 "
        "--pipeline-model-parallel-size 2",
        "",
        "--overlap-param-gather-with-optimizer-step",
    ),
    (DROPLESS.replace("hybridep", "ncclep"), "", "--cuda-graph-impl"),
    (f"{BUDGET} --cuda-graph-impl local".replace("hybridep", "ncclep"), "", "--cuda-graph-impl"),
    (f"{DROPLESS} --moe-permute-fusion-into-hybridep", "", "--moe-permute-fusion-into-hybridep"),
    (
        f"{DROPLESS} {FUSED} --fp8-recipe blockwise --moe-router-padding-for-quantization",
        "",
        "--use-transformer-engine-op-fuser",
    ),
    (f"{BUDGET} {EXPERTS_ALONE} {FUSED} --fp8-recipe mxfp8", "", "--use-transformer-engine-op-fuser"),
    (f"{BUDGET} {EXPERTS_ALONE} --overlap-moe-expert-parallel-comm --bf16", "", "--overlap-moe-expert-parallel-comm"),
)
SUPPORTED = (
    ATTN,
    ROUTER,
    PREPROCESS,
    EXPERTS,
    WHOLE,
    f"--cuda-graph-impl local {PADDED}",
    f"{ATTN} --hidden-dropout 0.1",
    f"{ATTN} --attention-dropout 0 --tensor-model-parallel-size 2",
    f"{ATTN} {NO_DROPOUT} --context-parallel-size 2",
    f"{ROUTER} --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act",
    f"{PREPROCESS} --pipeline-model-parallel-size 2",
    f"{PREPROCESS} --fp8-format hybrid",
    f"{PREPROCESS} {NO_DROPOUT} --recompute-granularity selective --recompute-modules core_attn layernorm",
    f"{PREPROCESS} --expert-model-parallel-size 4 {HYBRIDEP}",
    # the headline recipes of the public zoo
    *(
        f"{PREPROCESS} --fp8-format hybrid --fp8-recipe {recipe} --fp8-param-gather --use-distributed-optimizer"
        for recipe in ("mxfp8", "blockwise", "tensorwise", "delayed")
    ),
    f"{PREPROCESS} --expert-model-parallel-size 4 {HYBRIDEP} --fp8-format e4m3 --fp8-recipe mxfp8 "
    "--moe-router-padding-for-quantization",
    f"{PREPROCESS} {NO_DROPOUT} --moe-router-force-load-balancing {SP2} --recompute-granularity selective "
    "--recompute-modules layernorm moe_act",
    f"{EXPERTS} {NO_DROPOUT} --moe-router-force-load-balancing --recompute-granularity selective --recompute-modules moe",
    f"{WHOLE} {NO_DROPOUT} --moe-router-force-load-balancing --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    f"{PREPROCESS} --moe-clone-hot-experts 1 --expert-model-parallel-size 2",
    f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
    f"{ATTN} --reset-attention-mask",
    f"{ATTN} --cpu-offloading-num-layers 2",
    f"{ROUTER} --fine-grained-activation-offloading --offload-modules core_attn expert_fc1 mlp_norm",
    f"{WHOLE} --dataloader-inter-document-masking",
    f"{WHOLE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    f"{WHOLE} {NO_DROPOUT} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--context-parallel-size 2",
    DROPLESS,
    f"{EXPERTS} --expert-model-parallel-size 2 {HYBRIDEP}",
    f"{DROPLESS} --fp4-format e2m1",
    f"{ATTN} --fp4-format e2m1",
    f"{DROPLESS} --moe-clone-hot-experts 1",
    f"{WHOLE} --use-megatron-fsdp --ckpt-format fsdp_dtensor",
    f"{DROPLESS} {NO_DROPOUT} --overlap-moe-expert-parallel-comm --bf16",
    f"{BUDGET} {EXPERTS_ALONE}",
    f"{DROPLESS} {FUSED} --fp8-recipe mxfp8 --moe-router-padding-for-quantization",
    f"{DROPLESS} {FUSED} --fp8-recipe blockwise --moe-paged-stash",  # whose experts are this program's
    f"{BUDGET} --cuda-graph-impl local",
)
NOT_CAPTURED = (
    (f"{PREPROCESS} --expert-model-parallel-size 4 {HYBRIDEP}", "hybridep"),
    (
        f"{PREPROCESS} --expert-model-parallel-size 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend "
        "deepep",
        "deepep",
    ),
    (f"{PREPROCESS} --expert-model-parallel-size 4 --moe-token-dispatcher-type allgather", "allgather"),
    (f"{PREPROCESS} --moe-clone-hot-experts 1 --expert-model-parallel-size 2", "--moe-clone-hot-experts"),
    (f"{PREPROCESS} {HYBRIDEP} --fp8-format hybrid --moe-router-padding-for-quantization", "routing"),
)
"""(added to the base line, a word of the reason why moe_preprocess is not captured)."""

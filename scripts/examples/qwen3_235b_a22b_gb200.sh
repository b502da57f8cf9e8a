#!/usr/bin/env bash
# Train Qwen3-235B-A22B on 256 GB200: 64 trays of 4 GPUs, in bf16.
#
#   sbatch scripts/examples/qwen3_235b_a22b_gb200.sh CHECKPOINT_PATH TOKENIZER_PATH DATA_PATH [FLAGS...]
#
# Mapping, recomputation and graphs are those of table 11 of arXiv 2603.07685, which reports 750 TFLOP/s a GPU with forced balance
# and mock data. Blocks of 16 trays (--segment) keep the 32 ranks of an expert group inside one NVLink domain.
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
#SBATCH --job-name=qwen3-235b-a22b
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=4:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@120
#SBATCH --segment=16
set -euo pipefail

CHECKPOINT_PATH=${1:?the folder of checkpoints is needed: see the head of this file}
TOKENIZER_PATH=${2:?the folder of the tokenizer is needed}
DATA_PATH=${3:?the prefix of the token files is needed}
shift 3

# Kernels of the exchange run next to those of attention and experts.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export NVTE_FWD_LAYERNORM_SM_MARGIN=24
export NVTE_BWD_LAYERNORM_SM_MARGIN=24
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0
# Captured graphs and expandable segments.
export NCCL_GRAPH_REGISTER=0
# One NVLink domain holds 72 GPUs.
export NVLINK_DOMAIN_SIZE=72

MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --max-position-embeddings 40960
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.02
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --make-vocab-size-divisible-by 1187
)

MOE_ARGS=(
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 1536
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 12
    # 94 layers, embedding and loss are 96 parts: two for each of 48 chunks.
    --account-for-embedding-in-pipeline-split
    --account-for-loss-in-pipeline-split
    --expert-model-parallel-size 32
    --moe-token-dispatcher-type flex
    --moe-flex-dispatcher-backend hybridep
    --moe-hybridep-num-sms 32
    --overlap-moe-expert-parallel-comm
    --delay-wgrad-compute
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)

TRAINING_ARGS=(
    --bf16
    --seq-length 4096
    --micro-batch-size 1
    --global-batch-size 8192
    --train-samples 268554688
    --lr 1.2e-4
    --min-lr 1.2e-5
    --lr-decay-style cosine
    --lr-decay-samples 255126953
    --lr-warmup-samples 162761
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
)

PERFORMANCE_ARGS=(
    --moe-permute-fusion
    --moe-router-fusion
    --recompute-granularity selective
    --recompute-modules moe_act layernorm
    --cuda-graph-impl transformer_engine
    --cuda-graph-scope attn moe_router moe_preprocess
    --te-rng-tracker
)

# To measure speed without data: --mock-data --tokenizer-type NullTokenizer --vocab-size 151936.
DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_PATH"
    --data-path "$DATA_PATH"
    --split '99,1,0'
)

CHECKPOINT_ARGS=(
    --save "$CHECKPOINT_PATH"
    # The same line again continues from the newest checkpoint.
    --auto-resume
    --save-interval 500
    # SLURM's signal before the time limit (or yours): save, then end with exit code 75.
    --exit-signal-handler
    --exit-signal SIGUSR1
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --eval-interval 500
    --eval-iters 32
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

srun python -u pretrain_moe.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${PERFORMANCE_ARGS[@]}" "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"

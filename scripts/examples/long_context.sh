#!/usr/bin/env bash
# Train Qwen3-235B-A22B with 262,144 tokens a sample on 256 H100: 32 nodes of 8 GPUs, in bf16.
#
#   sbatch scripts/examples/long_context.sh WEIGHTS CHECKPOINT_PATH TOKENIZER_PATH DATA_PATH [FLAGS...]
#
# WEIGHTS is a model trained with short samples: a checkpoint, or a folder from Hugging Face. The mapping is ours: 128 ranks share a
# sample (TP 8, CP 16), and the state of the optimizer is in the memory of the hosts. Raise --rotary-base where the model you continue
# has another one (the 2507 releases: 5000000).
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
#SBATCH --job-name=long-context
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=4:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@120
set -euo pipefail

WEIGHTS=${1:?the model to start from is needed: see the head of this file}
CHECKPOINT_PATH=${2:?the folder of checkpoints is needed}
TOKENIZER_PATH=${3:?the folder of the tokenizer is needed}
DATA_PATH=${4:?the prefix of the token files is needed}
shift 4

# Kernels of the exchange run next to those of attention and experts.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export NVTE_FWD_LAYERNORM_SM_MARGIN=24
export NVTE_BWD_LAYERNORM_SM_MARGIN=24
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0

MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --max-position-embeddings 262144
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
    --tensor-model-parallel-size 8
    --sequence-parallel
    --context-parallel-size 16
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type flex
    --moe-flex-dispatcher-backend deepep
    --overlap-moe-expert-parallel-comm
    --delay-wgrad-compute
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)

TRAINING_ARGS=(
    --bf16
    --seq-length 262144
    --micro-batch-size 1
    --global-batch-size 32
    --train-iters 2000
    --lr 2e-5
    --min-lr 2e-6
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
)

PERFORMANCE_ARGS=(
    --moe-permute-fusion
    --moe-router-fusion
)

# To measure speed without data: --mock-data --tokenizer-type NullTokenizer --vocab-size 151936.
DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_PATH"
    --data-path "$DATA_PATH"
    --split '99,1,0'
)

CHECKPOINT_ARGS=(
    # The weights only, from iteration 0, as long as CHECKPOINT_PATH holds no checkpoint.
    --load "$WEIGHTS"
    --finetune
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

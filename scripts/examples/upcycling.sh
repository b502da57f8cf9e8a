#!/usr/bin/env bash
# Upcycle Qwen2.5-0.5B to FineRMoE, a mixture of fine-grained experts, on 8 GPUs of one node.
#
#   bash scripts/examples/upcycling.sh DENSE CHECKPOINT_PATH TOKENIZER_PATH DATA_PATH [FLAGS...]
#
# DENSE is the dense model: a folder from Hugging Face, or a checkpoint. Each of the 128 experts is a slice of its feed-forward
# network, which stays as the shared expert. Model and recipe (50 B tokens) are those of arXiv 2603.13364. For plain copies instead
# replace MOE_ARGS by --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm.
# To continue, replace --moe-use-upcycling and --load by --auto-resume.
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
set -euo pipefail

DENSE=${1:?the dense model is needed: see the head of this file}
CHECKPOINT_PATH=${2:?the folder of checkpoints is needed}
TOKENIZER_PATH=${3:?the folder of the tokenizer is needed}
DATA_PATH=${4:?the prefix of the token files is needed}
shift 4

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node 8
)

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.008
    --group-query-attention
    --num-query-groups 2
    --add-qkv-bias
    --make-vocab-size-divisible-by 1187
)

MOE_ARGS=(
    --finermoe-intermediate-granularity 32
    --finermoe-output-granularity 2
    --finermoe-intermediate-expansion 1
    --finermoe-output-expansion 2
    --num-experts 128
    --moe-router-topk 2
    --moe-ffn-hidden-size 152
    --moe-shared-expert-intermediate-size 4864
    --moe-shared-expert-gate
    --moe-shared-expert-overlap
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)

TRAINING_ARGS=(
    --bf16
    --seq-length 8192
    --micro-batch-size 1
    --global-batch-size 2048
    --train-samples 6103516
    --lr 1e-5
    --min-lr 1e-7
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
)

PERFORMANCE_ARGS=(
    --recompute-granularity selective
    --recompute-modules moe
)

# To measure speed without data: --mock-data --tokenizer-type NullTokenizer --vocab-size 151936.
DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_PATH"
    --data-path "$DATA_PATH"
    --split '99,1,0'
)

CHECKPOINT_ARGS=(
    # Write the upcycled model as iteration 0, then train it.
    --moe-use-upcycling
    --load "$DENSE"
    --save "$CHECKPOINT_PATH"
    --save-interval 100
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --eval-interval 500
    --eval-iters 32
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_moe.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${PERFORMANCE_ARGS[@]}" "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"

#!/usr/bin/env bash
# Train Mixtral 8x7B from scratch on 32 H100: 4 nodes of 8 GPUs, one torchrun per node.
#
#   NODE_RANK=0 MASTER_ADDR=node0 bash scripts/examples/mixtral_8x7b_32gpu.sh CHECKPOINT_PATH TOKENIZER_PATH DATA_PATH [FLAGS...]
#
# The mapping is that of Megatron-LM's example and of Megatron Core's MoE guide (PP 4, EP 8), with the 8 chunks a stage of the
# Megatron-MoE-ModelZoo; learning rate and iterations are those of the guide.
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
set -euo pipefail

CHECKPOINT_PATH=${1:?the folder of checkpoints is needed: see the head of this file}
TOKENIZER_PATH=${2:?the folder of the tokenizer is needed}
DATA_PATH=${3:?the prefix of the token files is needed}
shift 3

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0

# On every node: NODE_RANK=0, 1, ... and MASTER_ADDR, the first node's name.
DISTRIBUTED_ARGS=(
    --nproc-per-node 8
    --nnodes "${NNODES:-4}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.008
    --group-query-attention
    --num-query-groups 8
    --make-vocab-size-divisible-by 128
)

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-ffn-hidden-size 14336
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --num-virtual-stages-per-pipeline-rank 8
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)

TRAINING_ARGS=(
    --bf16
    --seq-length 4096
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-iters 500
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
)

PERFORMANCE_ARGS=(
    --moe-permute-fusion
    --moe-router-fusion
)

# To measure speed without data: --mock-data --tokenizer-type NullTokenizer --vocab-size 32000.
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

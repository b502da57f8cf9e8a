#!/usr/bin/env bash
# Train a Mixtral of 5 million parameters on two cores of a laptop: minutes, without data, GPU or downloads.
#
#   bash scripts/examples/laptop.sh CHECKPOINT_PATH [FLAGS...]
#
# The model of the preset mixtral_tiny on made-up text. Two ranks hold four experts each and exchange tokens, as on a cluster.
# For your own text: scripts/quickstart.sh.
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
set -euo pipefail

CHECKPOINT_PATH=${1:?the folder of checkpoints is needed: see the head of this file}
shift

export OMP_NUM_THREADS=1

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node 2
)

MODEL_ARGS=(
    --num-layers 4
    --hidden-size 192
    --ffn-hidden-size 384
    --num-attention-heads 6
    --max-position-embeddings 1024
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.02
    --group-query-attention
    --num-query-groups 2
    --make-vocab-size-divisible-by 128
)

MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-ffn-hidden-size 384
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 2
    --moe-token-dispatcher-type alltoall
)

TRAINING_ARGS=(
    --seq-length 256
    --micro-batch-size 2
    --global-batch-size 16
    --train-iters 150
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
)

DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 4096
)

CHECKPOINT_ARGS=(
    --save "$CHECKPOINT_PATH"
    # The same line again continues from the newest checkpoint.
    --auto-resume
    --save-interval 75
)

LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 75
    --eval-iters 10
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_moe.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
